"""Hardware counters of one template kernel, by Nsight Compute, for tool ``profile``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.pool.counters import counters_of
from outblas_lab.pool.ncu_target import Profiler, ProfileWork, cache_of

#: Seconds for each start of ncu.
TIMEOUT_S = 300.0


def profiled_counters(problem: Problem, config: KernelConfig, gpu: Gpu, gpu_index: int, tool: str) -> dict[str, float]:
    """Return name -> value of the counters of one call of a kernel; the names are those of ``outblas list counters``.

    Args:
        config: a kernel that was proven on it.
        gpu: properties of the GPU.
        gpu_index: CUDA's index of the GPU.
        tool: path of ncu.

    Raises:
        DeviceError: no permission to read counters, or a launch that failed.
        RecordError: ncu's output cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="outblas-profile-") as scratch:
        profiler = Profiler(tool, Path(scratch), TIMEOUT_S, gpu_index)
        ((kernels,),) = profiler.kernels([ProfileWork(problem, (config,), cache_of(problem, gpu))])
    if len(kernels) != 1:
        raise RecordError(f"{config_name(config)} launched {len(kernels)} kernels", "one per call", "profile again")
    return counters_of(kernels[0])
