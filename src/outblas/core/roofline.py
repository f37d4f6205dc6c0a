"""The physical floor of a problem on a GPU, and the regime it falls in.

Floor: max(1 us of launch, 2MNK / peak, bytes / bandwidth), where the bandwidth is HBM's when the
rotating operand sets exceed L2 and L2's otherwise. The peak figures are what was sustained on
N(0, 1) data, not datasheet values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from outblas.core.problem import Problem

#: Graph nodes captured at most per timed graph, and bytes over which operands rotate.
MAX_REPEATS = 32
TARGET_GRAPH_US = 300.0
ROTATE_BYTES = 200e6
#: Work below this is dominated by launch latency on every GPU that we know.
LAUNCH_BOUND_US = 3.0


@dataclass(frozen=True)
class Gpu:
    """What the floor and the legality predicate need to know of a GPU.

    Attributes:
        name: short name, e.g. ``h200``.
        arch: compute capability times ten, e.g. 90.
        sms: streaming multiprocessors.
        smem_optin: dynamic shared memory a block may ask for, bytes.
        l2_bytes: L2 capacity, bytes.
        tflops: sustained dense half-precision rate, TFLOP/s.
        hbm_tbs, l2_tbs: sustained bandwidth, TB/s.
        launch_us: floor of one kernel node, microseconds.
        clusters: most clusters of 1, 2, 3 ... CTAs that are resident at once, at one CTA per SM (SMs of
            a cluster belong to one GPC, so some stay idle); as cuOccupancyMaxActiveClusters answered.
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
        """Clusters of ``size`` CTAs resident at once, one CTA per SM; a guess where it was not asked."""
        known = self.clusters[size - 1] if size <= len(self.clusters) else 0
        return known or max(1, self.sms // size)


#: Clusters of 5, 7, 9-11 and 13-15 were not asked: between their neighbours.
_H200_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15, 11, 9, 8, 7, 7, 7, 7, 7)
H200 = Gpu("h200", 90, 132, 232448, 60_000_000, 800.0, 4.2, 6.0, clusters=_H200_CLUSTERS)
GPUS = {"h200": H200}


def architecture(gpu: Gpu) -> str:
    """What to compile for: sm_90a on Hopper, whose wgmma needs the a."""
    return "sm_90a" if gpu.arch == 90 else f"sm_{gpu.arch}"


def floor_us(problem: Problem, gpu: Gpu = H200) -> float:
    """Fastest possible GPU time per call, microseconds."""
    return max(gpu.launch_us, work_us(problem, gpu))


def work_us(problem: Problem, gpu: Gpu = H200) -> float:
    """The floor without the launch: the larger of arithmetic and memory time, microseconds."""
    return max(*_parts_us(problem, gpu))


def operand_sets(problem: Problem, est_us: float) -> int:
    """Operand sets to rotate over: enough for 200 MB, never more than the calls in a graph."""
    return max(1, min(repeats(est_us), math.ceil(ROTATE_BYTES / problem.bytes)))


def repeats(est_us: float) -> int:
    """Back-to-back calls per graph: about 300 us of work, at most 32."""
    return max(1, min(MAX_REPEATS, round(TARGET_GRAPH_US / max(est_us, 1e-3))))


def regime(problem: Problem, gpu: Gpu = H200) -> str:
    """``launch``, or ``memory_1eD`` / ``compute_1eD`` with D the decade of FLOP."""
    compute, memory = _parts_us(problem, gpu)
    if max(compute, memory) < LAUNCH_BOUND_US:
        return "launch"
    decade = int(math.floor(math.log10(problem.flops)))
    return f"{'memory' if memory > compute else 'compute'}_1e{decade}"


def _parts_us(problem: Problem, gpu: Gpu) -> tuple[float, float]:
    compute = problem.flops / (gpu.tflops * 1e6)
    sets = operand_sets(problem, max(compute, problem.bytes / (gpu.hbm_tbs * 1e6), gpu.launch_us))
    bandwidth = gpu.hbm_tbs if problem.bytes * sets > gpu.l2_bytes else gpu.l2_tbs
    return compute, problem.bytes / (bandwidth * 1e6)
