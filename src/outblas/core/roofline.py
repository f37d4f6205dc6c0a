"""The roofline floor of a problem on a GPU, and its regime (launch, memory or compute bound).

Floor = max(launch floor, 2 M N K / peak, bytes / bandwidth); the launch floor of the H200 is 1 us. The bandwidth is
HBM's if the rotating operand sets exceed L2, else L2's. Rates are what was sustained on N(0, 1) data, not datasheet
values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outblas.core.problem import Problem

#: Maximum calls in a timed graph; work per timed graph, us; and bytes over which the operands rotate.
MAX_REPEATS = 32
TARGET_GRAPH_US = 300.0
ROTATE_BYTES = 200e6
#: Below this much work, microseconds, launch latency dominates on every known GPU.
LAUNCH_BOUND_US = 3.0


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that the floor and the legality predicate need.

    Attributes:
        name: short name, e.g. ``h200``.
        arch: compute capability times ten, e.g. 90.
        sms: number of streaming multiprocessors.
        smem_optin: dynamic shared memory that a block may request, bytes.
        l2_bytes: L2 capacity, bytes.
        tflops: sustained dense half-precision rate, TFLOP/s.
        hbm_tbs: sustained bandwidth of HBM, TB/s.
        l2_tbs: sustained bandwidth of L2, TB/s.
        launch_us: least time of one kernel node in a graph, microseconds.
        clusters: entry i is the maximum of resident clusters of i + 1 CTAs at one CTA per SM, as
            cuOccupancyMaxActiveClusters returned it. The SMs of a cluster belong to one GPC, so some SMs may stay idle.
    """

    name: str
    arch: int
    sms: int
    smem_optin: int
    l2_bytes: int
    tflops: float
    hbm_tbs: float
    l2_tbs: float
    launch_us: float = 1.0
    clusters: tuple[int, ...] = ()

    def most_clusters(self, size: int) -> int:
        """Return the maximum of resident clusters of ``size`` CTAs at one CTA per SM.

        If :attr:`clusters` does not say, the result is the estimate ``sms // size``, at least 1.
        """
        known = self.clusters[size - 1] if size <= len(self.clusters) else 0
        return known or max(1, self.sms // size)


#: Sizes 5, 7, 9-11 and 13-15 were not queried; their entries are interpolated.
_H200_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15, 11, 9, 8, 7, 7, 7, 7, 7)
H200 = Gpu("h200", 90, 132, 232448, 60_000_000, 800.0, 4.2, 6.0, clusters=_H200_CLUSTERS)
GPUS = {"h200": H200}


def architecture(gpu: Gpu) -> str:
    """Return the compile target: ``sm_90a`` on Hopper, because wgmma needs the suffix, else ``sm_<arch>``."""
    return "sm_90a" if gpu.arch == 90 else f"sm_{gpu.arch}"


def floor_us(problem: Problem, gpu: Gpu = H200) -> float:
    """Return the least plausible GPU time per call, microseconds, launch floor included."""
    return max(gpu.launch_us, work_us(problem, gpu))


def work_us(problem: Problem, gpu: Gpu = H200) -> float:
    """Return the larger of arithmetic time and memory time per call, microseconds, without the launch floor."""
    return max(*_parts_us(problem, gpu))


def operand_sets(problem: Problem, est_us: float) -> int:
    """Return over how many operand copies a timed graph rotates: 200 MB in total, at most one set per call.

    Args:
        problem: the problem.
        est_us: estimated time per call, microseconds.
    """
    return max(1, min(repeats(est_us), math.ceil(ROTATE_BYTES / problem.bytes)))


def repeats(est_us: float) -> int:
    """Return the number of back-to-back calls per graph: about 300 us of work, from 1 to 32 calls.

    Args:
        est_us: estimated time per call, microseconds.
    """
    return max(1, min(MAX_REPEATS, round(TARGET_GRAPH_US / max(est_us, 1e-3))))


def regime(problem: Problem, gpu: Gpu = H200) -> str:
    """Return ``launch`` if the work is below 3 us; else ``memory_1eD`` or ``compute_1eD``, D = floor(log10(FLOP))."""
    compute, memory = _parts_us(problem, gpu)
    if max(compute, memory) < LAUNCH_BOUND_US:
        return "launch"
    decade = int(math.floor(math.log10(problem.flops)))
    return f"{'memory' if memory > compute else 'compute'}_1e{decade}"


def _parts_us(problem: Problem, gpu: Gpu) -> tuple[float, float]:
    """Return (arithmetic time, memory time) per call, microseconds."""
    compute = problem.flops / (gpu.tflops * 1e6)
    sets = operand_sets(problem, max(compute, problem.bytes / (gpu.hbm_tbs * 1e6), gpu.launch_us))
    bandwidth = gpu.hbm_tbs if problem.bytes * sets > gpu.l2_bytes else gpu.l2_tbs
    return compute, problem.bytes / (bandwidth * 1e6)
