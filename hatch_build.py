"""Builds the C extension while the package is built or installed: into the source tree, as an editable install needs.

It is optional: without a C compiler the wheel is pure Python, and a line says so.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "src"


class NativeExtension(BuildHookInterface):
    """Compiles ``outblas._native`` and says which platform the wheel is then for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(SOURCE))
        try:
            from outblas.errors import ToolchainMissing
            from outblas.native_build import build
        finally:
            sys.path.remove(str(SOURCE))
        try:
            built = build()
        except ToolchainMissing as error:
            self.app.display_warning(f"outblas is installed without its native path: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["artifacts"].append(f"/{built.relative_to(SOURCE.parent)}")
