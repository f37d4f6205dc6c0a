"""The problems on which a config is proved in full before it is timed."""

from __future__ import annotations

from outblas.core.config import KernelConfig
from outblas.core.errors import ProblemError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal


def proof_shapes(problem: Problem, config: KernelConfig, gpu: Gpu) -> list[Problem]:
    """Return problems of the same layout, dtype and accumulator on which a config is proved in full.

    They cover whole tiles, ragged M, N and K, and less than one tile. They cover a long K with signed inputs, and N =
    K, where calls can be chained. They cover more tiles than SMs, and rows that are not 16-byte aligned. The family's
    own shapes come last.

    Problems that are illegal for the config are left out, so the list may be empty. The extents do not depend on those
    of ``problem``. The first has M = 2 ``bm``, N = 2 ``bn`` and K = 4 ``bk``, if that is legal.

    Args:
        problem: gives layout, dtype and accumulator.
    """
    bm, bn, bk = config.bm, config.bn, config.bk
    shapes = [
        (2 * bm, 2 * bn, 4 * bk),
        (bm + 1, bn + 8, 3 * bk + 8),
        (1, 8, 8),
        (7, 2 * bn + 24, bk + 24),
        (2 * bm - 1, 2 * bn - 8, 4096 + 8),
        (256, 256, 256),
        (16, 64, 16384),
        (7 * bm + 3, 19 * bn + 8, 2 * bk + 8),
        (127, 1001, 333),
    ]
    shapes += FAMILIES[config.family].proof_shapes(problem, config, gpu)
    found = []
    for m, n, k in dict.fromkeys(shapes):
        try:
            candidate = Problem(m, n, k, problem.layout, problem.dtype, problem.acc)
        except ProblemError:
            continue
        if why_illegal(candidate, config, gpu) is None:
            found.append(candidate)
    return found
