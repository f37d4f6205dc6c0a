"""The roofline floor of a problem on a GPU, and its regime (launch, memory or compute bound).

Floor = max(launch floor, 2 M N K / peak, bytes / bandwidth). The bandwidth is HBM's if the rotating operand sets exceed
L2, else L2's. The peak is that of the problem's accumulator. All rates are those of the GPU's record
(:mod:`outblas.core.gpu_records`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outblas.core.errors import UsageError
from outblas.core.problem import Acc, Problem

#: Maximum calls in a timed graph; work per timed graph, us; and bytes over which the operands rotate.
MAX_REPEATS = 32
TARGET_GRAPH_US = 300.0
ROTATE_BYTES = 200e6
#: Below this much work, microseconds, launch latency dominates on every known GPU.
LAUNCH_BOUND_US = 3.0
#: Compute capability, times ten, of the oldest GPUs that the kernels run on.
OLDEST_ARCH = 80


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that floor, legality, cost model and policy need.

    :mod:`outblas.core.gpu_records` has the record of each known GPU.

    Attributes:
        arch: compute capability times ten, e.g. 90 for 9.0.
        smem_optin: dynamic shared memory that a block may request, bytes.
        l2_bytes: L2 capacity, bytes.
        tflops: sustained dense half-precision rate with fp32 accumulators, TFLOP/s, by the fastest instructions.
        hbm_tbs: sustained bandwidth of the GPU's memory, TB/s.
        l2_tbs: sustained bandwidth of L2, TB/s.
        launch_us: least time of one kernel node in a graph, microseconds.
        clusters: entry i is the maximum of resident clusters of i + 1 CTAs at one CTA per SM, as
            cuOccupancyMaxActiveClusters returned it. The SMs of a cluster belong to one GPC, so some SMs may stay idle.
            Empty: not known.
        clock_mhz: highest clock of an SM, MHz.
        memory_bytes: size of the GPU's memory, bytes.
        sm_smem: shared memory of an SM, bytes.
        sm_threads: threads that an SM can hold.
        wgmma_tflops: rate of wgmma with fp32 accumulators, TFLOP/s; 0 if the GPU lacks it.
        mma_tflops: rate of mma.sync with fp32 accumulators, TFLOP/s.
        acc16_tflops: as ``tflops``, with fp16 accumulators.
    """

    name: str
    arch: int
    sms: int
    smem_optin: int
    l2_bytes: int
    tflops: float
    hbm_tbs: float
    l2_tbs: float
    launch_us: float
    clusters: tuple[int, ...]
    clock_mhz: float
    memory_bytes: int
    sm_smem: int
    sm_threads: int
    wgmma_tflops: float
    mma_tflops: float
    acc16_tflops: float

    def peak_tflops(self, acc: Acc) -> float:
        """Return the sustained rate with an accumulator, TFLOP/s: ``acc16_tflops`` for fp16, else ``tflops``."""
        return self.acc16_tflops if acc == "fp16" else self.tflops

    def most_clusters(self, size: int) -> int:
        """Return the maximum of resident clusters of ``size`` CTAs at one CTA per SM.

        It is ``clusters[size - 1]``. If that is missing or 0, it is the estimate ``sms // size``, at least 1. For the
        H200, 2 gives 66 and 4 gives 30.

        Args:
            size: CTAs of a cluster, 1 or more.

        Raises:
            UsageError: ``size`` is below 1.
        """
        if size < 1:
            wrong = f"the cluster size is {size} CTAs"
            raise UsageError(wrong, "1 or more CTAs", "pass 1 for a kernel without clusters")
        known = self.clusters[size - 1] if size <= len(self.clusters) else 0
        return known or max(1, self.sms // size)


def architecture(gpu: Gpu) -> str:
    """Return the compile target of a GPU, e.g. ``"sm_80"``.

    Hopper gives ``"sm_90a"`` because wgmma needs the suffix. Data-centre Blackwell gives ``"sm_100a"`` and consumer
    Blackwell ``"sm_120a"``.
    """
    return f"sm_{gpu.arch}a" if gpu.arch >= 90 else f"sm_{gpu.arch}"


def floor_us(problem: Problem, gpu: Gpu) -> float:
    """Return the least plausible GPU time per call, microseconds: ``max(gpu.launch_us, work_us(problem, gpu))``.

    Small problems give the launch floor, 1.0 us on the H200. 4096 x 4096 x 4096 gives 171.8 us on the H200.
    """
    return max(gpu.launch_us, work_us(problem, gpu))


def work_us(problem: Problem, gpu: Gpu) -> float:
    """Return the larger of arithmetic time and memory time per call, microseconds, without the launch floor.

    Arithmetic time is 2 M N K / ``gpu.peak_tflops(problem.acc)``. Memory time is ``problem.bytes`` / bandwidth.
    That is HBM's if ``problem.bytes`` times the :func:`operand_sets` exceeds ``gpu.l2_bytes``, else that of L2.
    """
    return max(*_parts_us(problem, gpu))


def operand_sets(problem: Problem, est_us: float) -> int:
    """Return over how many operand copies a timed graph rotates: 200 MB in total, at most one set per call.

    It is ceil(200e6 / ``problem.bytes``), limited to 1 to ``repeats(est_us)``.

    Args:
        est_us: estimated time per call, microseconds.
    """
    return max(1, min(repeats(est_us), math.ceil(ROTATE_BYTES / problem.bytes)))


def repeats(est_us: float) -> int:
    """Return the number of back-to-back calls per graph: 300 us / ``est_us``, rounded, from 1 to 32 calls.

    Example: 1 us gives 32, 100 us gives 3, 1000 us gives 1.

    Args:
        est_us: estimated time per call, microseconds; 0 gives 32.
    """
    return max(1, min(MAX_REPEATS, round(TARGET_GRAPH_US / max(est_us, 1e-3))))


def regime(problem: Problem, gpu: Gpu) -> str:
    """Return the regime of a problem on a GPU, a string.

    It is ``"launch"`` if :func:`work_us` is below 3. Otherwise it is ``memory_1eD`` if memory time exceeds arithmetic
    time, else ``compute_1eD``, with D = floor(log10(FLOP)). 4096 x 4096 x 4096 gives ``"compute_1e11"`` on the H200.
    """
    compute, memory = _parts_us(problem, gpu)
    if max(compute, memory) < LAUNCH_BOUND_US:
        return "launch"
    decade = int(math.floor(math.log10(problem.flops)))
    return f"{'memory' if memory > compute else 'compute'}_1e{decade}"


def arithmetic_us(problem: Problem, gpu: Gpu) -> float:
    """Return the time of 2 M N K operations at ``gpu.peak_tflops(problem.acc)``, microseconds."""
    return problem.flops / (gpu.peak_tflops(problem.acc) * 1e6)


def memory_us(problem: Problem, gpu: Gpu) -> float:
    """Return the time of ``problem.bytes`` at the bandwidth of the memory, or of L2 as :func:`work_us` says, us."""
    compute = arithmetic_us(problem, gpu)
    sets = operand_sets(problem, max(compute, problem.bytes / (gpu.hbm_tbs * 1e6), gpu.launch_us))
    bandwidth = gpu.hbm_tbs if problem.bytes * sets > gpu.l2_bytes else gpu.l2_tbs
    return problem.bytes / (bandwidth * 1e6)


def _parts_us(problem: Problem, gpu: Gpu) -> tuple[float, float]:
    """Return (arithmetic time, memory time) per call, microseconds."""
    return arithmetic_us(problem, gpu), memory_us(problem, gpu)
