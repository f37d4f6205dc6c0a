"""Build the parts of a wheel that are not source: the C extension and the compiled kernels (cubins).

Both are written into the source tree, as an editable install needs. Without a C compiler the wheel is pure Python.

``OUTBLAS_BUILD_CUBINS`` decides about the cubins of a wheel:

- ``auto``, or not set: pack them if NVRTC is there, else warn. An isolated build (``pip wheel .``) has no NVRTC. pip
  hides a build's output, so the warning goes to the terminal, too.
- ``require``: fail without NVRTC. ``make build`` and the release use it.
- ``skip``: leave them out.

Without cubins, each kernel is compiled by NVRTC at its first use.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SOURCES = [str(ROOT / "src"), str(ROOT / "lab" / "src")]
CUBINS_VARIABLE = "OUTBLAS_BUILD_CUBINS"
CUBINS_CHOICES = ("auto", "require", "skip")
#: The terminal of this process, also if its output is redirected.
TERMINAL = "/dev/tty"


class NativeExtension(BuildHookInterface):
    """Compile ``outblas.dispatch._native`` and tag the wheel for its platform; pack cubins into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before hatchling collects the files.

        Args:
            version: ``standard`` or ``editable``. An editable install gets no cubins: its kernels change.
            build_data: Hatchling's dictionary. It receives the tag and the built files.

        Raises:
            SystemExit: Cubins are required and cannot be built, or the variable has another value.
        """
        before = list(sys.path)
        sys.path[:0] = SOURCES  # processes that compile kernels inherit the path
        try:
            self._extension(build_data)
            if version != "editable":
                self._cubins(build_data)
        finally:
            sys.path[:] = before

    def _extension(self, build_data: dict[str, Any]) -> None:
        from outblas.core.errors import ToolchainMissing
        from outblas.runtime.native_build import build

        try:
            built = build()
        except ToolchainMissing as error:
            self.app.display_warning(f"outblas is built without its native path: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp310-abi3-{platform}"
        build_data["artifacts"].append(f"/{built.relative_to(ROOT)}")

    def _cubins(self, build_data: dict[str, Any]) -> None:
        choice = os.environ.get(CUBINS_VARIABLE) or "auto"
        if choice not in CUBINS_CHOICES:
            self.app.abort(f"{CUBINS_VARIABLE} is {choice!r}; expected {', '.join(CUBINS_CHOICES)}; correct it")
        if choice == "skip":
            self.app.display_info(f"outblas is built without compiled kernels: {CUBINS_VARIABLE} is skip")
            return
        from outblas.core.errors import ToolchainMissing
        from outblas_lab.build.cubin_build import build_for_wheel

        try:
            pack = build_for_wheel(report=self.app.display_info)
        except ToolchainMissing as error:
            wrong = f"outblas is built WITHOUT COMPILED KERNELS: {error.wrong}"
            if choice == "require":
                self.app.abort(f"{wrong}; expected {error.expected}; run `make build`, or set {CUBINS_VARIABLE}=auto")
            warning = f"{wrong}; each is compiled at its first use; `make build` packs them"
            self.app.display_warning(warning)
            if not sys.stderr.isatty():
                _tell_terminal(warning)
            return
        build_data["artifacts"].append(f"/{pack.relative_to(ROOT)}")


def _tell_terminal(line: str) -> None:
    """Write a line to the terminal, if this process has one: a build in CI or in Docker has not."""
    with contextlib.suppress(OSError), open(TERMINAL, "w", encoding="utf-8") as terminal:
        terminal.write(f"\n{line}\n")
