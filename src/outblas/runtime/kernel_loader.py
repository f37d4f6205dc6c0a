"""Load a kernel: the shipped cubin, else one from the compile cache or from NVRTC."""

from __future__ import annotations

import logging
import time
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import CompileError, DeviceError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.kernels.source import Source

#: Architecture of the shipped kernels. The registry compiles for the architecture of each device.
ARCHITECTURE = "sm_90a"
_LOG = logging.getLogger(__name__)


def load_kernel(problem: Problem, config: KernelConfig, arch: str = ARCHITECTURE) -> tuple[Any, float]:
    """Load a kernel on the current CUDA device.

    The shipped cubin is used if it was built from exactly this source. Otherwise, or if the driver refuses it, the
    kernel is compiled here.

    Args:
        problem: the problem.
        config: the kernel.
        arch: architecture of that device.

    Returns:
        (bindable kernel, seconds of compilation); 0 seconds if it was shipped or cached.

    Raises:
        CompileError: it does not compile, or the machine code spills or accumulates otherwise than asked.
        ToolchainMissing: no compiler is installed.
        DeviceError: the driver cannot load it.
    """
    from outblas.kernels.source import make_source
    from outblas.runtime.launch import load
    from outblas.runtime.packaged_cubins import PACKAGED

    source = make_source(problem, config)
    packaged = PACKAGED.get(source, arch)
    if packaged is None:
        return _compiled(source, config, arch)
    try:
        kernel = load(packaged, config)
    except DeviceError as refused:
        found = _compiled_instead(source, config, arch, refused)
        PACKAGED.warn_refused(refused.wrong)
        return found
    kernel.packaged = True
    _LOG.info("%s was shipped", config_name(config))
    return kernel, 0.0


def _compiled_instead(source: Source, config: KernelConfig, arch: str, refused: DeviceError) -> tuple[Any, float]:
    """Compile a kernel whose shipped cubin the driver refused; an error names both failures in one line."""
    from outblas.runtime.packaged_cubins import PACKAGED

    try:
        return _compiled(source, config, arch)
    except (CompileError, ToolchainMissing, DeviceError) as error:
        raise DeviceError(
            f"the driver refuses the shipped cubin ({refused.wrong}) and it cannot be compiled here ({error.wrong})",
            f"a driver for {PACKAGED.driver_needed()}, or an NVRTC whose cubins this driver loads",
            "update the driver, or install that NVRTC",
        ) from error


def _compiled(source: Source, config: KernelConfig, arch: str) -> tuple[Any, float]:
    """Compile by NVRTC, or take the cubin from the compile cache; returns and raises as :func:`load_kernel`."""
    from outblas.runtime.launch import load
    from outblas.runtime.nvrtc import compile_tuned

    start = time.perf_counter()
    cubin = compile_tuned(source, arch)
    seconds = 0.0 if cubin.from_cache else time.perf_counter() - start
    _LOG.info("%s %s", config_name(config), f"compiled in {seconds:.2f} s" if seconds else "taken from the cache")
    return load(cubin, config), seconds
