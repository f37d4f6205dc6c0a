"""Problems on which CTAs that walk over tiles have to prove that they do: several each, unevenly shared."""

from __future__ import annotations

from outblas.geometry import gemv_blocks
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.problem import Problem
from outblas.roofline import Gpu


def walks(problem: Problem, c: Sm80GemvConfig, gpu: Gpu) -> list[tuple[int, int, int]]:
    """M, N, K of problems for a persistent sm80_gemv_mma, every last tile ragged; empty for others.

    Two tiles or three, with a round of the ring and a bit; one tile more than CTAs, K less than the warps can share;
    and with kept tokens one tile or two, K all but the most that it keeps.
    """
    if not c.persistent:
        return []
    ctas, round_k = gpu.sms * gemv_blocks(problem, c), c.bk * c.wk * c.unroll
    found = [(c.bm, c.bn * (2 * ctas + 5) + 8, round_k + 24), (c.bm - 1, c.bn * (ctas + 1) - 8, c.bk + 8)]
    if c.kept_k:
        found += [(c.bm, c.bn * (ctas + ctas // 3) + 8, c.kept_k - 8), (3, c.bn * (2 * ctas + 1) + 8, 2 * round_k - 8)]
    return found
