"""Load a kernel: the shipped cubin, else one from the compile cache or from NVRTC.

It takes two steps. :func:`kernel_code` finds the machine code without CUDA, so that a thread of its own may do it.
:func:`load_code` loads it in the caller's context. If the driver refuses a shipped cubin, :class:`ShippedRefused` asks
for the first step again. :func:`load_kernel` takes all steps at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import CompileError, DeviceError, OutblasError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.source import Source
from outblas.runtime.cubin import Cubin

#: Architecture of the shipped kernels. The registry compiles for the architecture of each device.
ARCHITECTURE = "sm_90a"
_LOG = logging.getLogger(__name__)
_Kernel = TypeVar("_Kernel")


@dataclass(frozen=True)
class KernelCode:
    """Machine code of a kernel that is not loaded yet.

    Attributes:
        packaged: whether it was shipped.
        seconds: of compilation; 0 if it was shipped or cached.
        refused: why the driver refused the shipped cubin that it replaces; empty: it replaces none.
    """

    cubin: Cubin
    name: str
    packaged: bool = False
    seconds: float = 0.0
    refused: str = ""


class ShippedRefused(DeviceError):
    """The driver refuses a shipped cubin. ``kernel_code(..., refused=error.wrong)`` gives a compiled one instead."""


def load_kernel(problem: Problem, config: KernelConfig, gpu: Gpu | None = None) -> tuple[Any, float]:
    """Load a kernel on the current CUDA device. Return it and the seconds of compilation, 0 if it was shipped or
    cached.

    The shipped cubin is used if it was built from exactly this source. Otherwise, or if the driver refuses it, the
    kernel is compiled here.

    Raises:
        CompileError: it does not compile, or the machine code spills or accumulates otherwise than asked.
        ToolchainMissing: no compiler is installed.
        DeviceError: the driver cannot load it.
    """
    from outblas.kernels.source import make_source
    from outblas.runtime.launch import load

    source, arch = make_source(problem, config), ARCHITECTURE if gpu is None else architecture(gpu)
    return load_found(
        lambda refused: kernel_code(source, config_name(config), arch, refused), lambda cubin: load(cubin, config)
    )


def load_found(find: Callable[[str], KernelCode], load: Callable[[Cubin], _Kernel]) -> tuple[_Kernel, float]:
    """Load a kernel, or the compiled one if the driver refuses what was shipped; return it and its compile seconds.

    Args:
        find: returns the machine code; its argument is why the shipped one was refused, or empty.
        load: as for :func:`load_code`.
    """
    try:
        code = find("")
        return load_code(code, load), code.seconds
    except ShippedRefused as error:
        code = find(error.wrong)
        return load_code(code, load), code.seconds


def kernel_code(
    source: Source, name: str, arch: str = ARCHITECTURE, refused: str = "", else_say: tuple[str, str] | None = None
) -> KernelCode:
    """Return the machine code of a kernel: the shipped cubin, else from the compile cache or NVRTC. No CUDA is called.

    Args:
        refused: why the driver refused the shipped cubin, which is then left out.

    Raises:
        CompileError: it does not compile, or the machine code spills or accumulates otherwise than asked.
        ToolchainMissing: no compiler is installed.
        DeviceError: in place of both, if the shipped cubin was refused.
    """
    from outblas.runtime.nvrtc import compile_tuned
    from outblas.runtime.packaged_cubins import PACKAGED

    packaged = None if refused else PACKAGED.get(source, arch)
    if packaged is not None:
        return KernelCode(packaged, name, packaged=True)
    start = time.perf_counter()
    try:
        cubin = compile_tuned(source, arch, else_say)
    except (CompileError, ToolchainMissing) as error:
        if refused:
            raise _neither_loads(refused, error) from error
        raise
    seconds = 0.0 if cubin.from_cache else time.perf_counter() - start
    _LOG.debug("%s %s", name, f"compiled in {seconds:.2f} s" if seconds else "loaded from the cache")
    return KernelCode(cubin, name, seconds=seconds, refused=refused)


def load_code(code: KernelCode, load: Callable[[Cubin], _Kernel]) -> _Kernel:
    """Load the machine code of a kernel in the current CUDA context, and mark a shipped one as ``packaged``.

    A compiled kernel that replaces a refused one costs the process a warning once.

    Args:
        load: makes a cubin bindable, or raises DeviceError.

    Raises:
        ShippedRefused: the driver refuses the cubin, which was shipped.
        DeviceError: it refuses a compiled one.
    """
    from outblas.runtime.packaged_cubins import PACKAGED

    try:
        kernel = load(code.cubin)
    except DeviceError as error:
        if code.packaged:
            raise ShippedRefused(error.wrong, error.expected, error.do) from error
        if code.refused:
            raise _neither_loads(code.refused, error) from error
        raise
    if code.packaged:
        kernel.packaged = True  # type: ignore[attr-defined]
        _LOG.debug("%s was loaded from the package", code.name)
    if code.refused:
        PACKAGED.warn_refused(code.refused)
    return kernel


def _neither_loads(refused: str, error: OutblasError) -> DeviceError:
    """Return the error of a kernel whose shipped cubin the driver refuses and that cannot be compiled instead."""
    from outblas.runtime.packaged_cubins import PACKAGED

    return DeviceError(
        f"the driver rejected the packaged cubin ({refused}), and the kernel cannot be compiled here ({error.wrong})",
        f"a driver for {PACKAGED.driver_needed()}, or an NVRTC whose cubins this driver loads",
        "update the driver, or install a matching NVRTC",
    )
