"""Builds, while the package is built or installed, what is not source: the C extension and a wheel's cubins.

Both go into the source tree, as an editable install needs, and both are optional: without a C compiler the wheel is
pure Python, without NVRTC its kernels are compiled where they are used; a line says so.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "src"


class NativeExtension(BuildHookInterface):
    """Compiles ``outblas.dispatch._native``, and says which platform the wheel is then for; packs cubins into a real
    wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """``version``: ``standard`` or ``editable``. Compiling every kernel takes minutes: not for an editable install,
        whose kernels change."""
        sys.path.insert(0, str(SOURCE))  # processes that compile kernels take the path over
        try:
            self._extension(build_data)
            if version != "editable":
                self._cubins(build_data)
        finally:
            sys.path.remove(str(SOURCE))

    def _extension(self, build_data: dict[str, Any]) -> None:
        from outblas.core.errors import ToolchainMissing
        from outblas.dispatch.native_build import build

        try:
            built = build()
        except ToolchainMissing as error:
            self.app.display_warning(f"outblas is installed without its native path: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["artifacts"].append(f"/{built.relative_to(SOURCE.parent)}")

    def _cubins(self, build_data: dict[str, Any]) -> None:
        from outblas.core.errors import ToolchainMissing
        from outblas.dispatch.cubin_build import build_for_wheel

        try:
            pack = build_for_wheel(report=self.app.display_info)
        except ToolchainMissing as error:
            self.app.display_warning(f"outblas is built without compiled kernels: {error}")
            return
        build_data["artifacts"].append(f"/{pack.relative_to(SOURCE.parent)}")
