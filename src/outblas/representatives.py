"""The problems on which a config is proved in full, before it is timed anywhere."""

from __future__ import annotations

from outblas.config import KernelConfig
from outblas.errors import ProblemError
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.problem import Problem
from outblas.roofline import H200, Gpu
from outblas.space import why_illegal
from outblas.walks import walks


def representatives(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> list[Problem]:
    """Problems of the same layout, dtype and accumulator on which a config is proved in full.

    Whole tiles; ragged M, N and K; less than one tile; K long, with signed inputs; N = K, where calls can
    be chained; more tiles than SMs; rows that are not 16-byte aligned. Only those that the config allows.
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
    if isinstance(config, Sm80MmaConfig):
        shapes.append((33, 2 * bn - 2, 2 * bk + 2))
    if isinstance(config, Sm90WgmmaConfig) and config.split_kind == "workspace":  # each part has one stage or two
        together = bk * config.split_k
        shapes += [(3 * bm + 1, 5 * bn + 8, together + 8), (bm + 1, together + 8, together + 8)]
    if isinstance(config, Sm90WgmmaConfig) and config.a_rows:  # never more rows than that
        rows, deep = config.a_rows, bk * max(config.split_k, config.stages + 1)
        shapes += [
            (rows, 2 * bn, deep),
            (rows - 1, bn + 8, deep + 8),
            (rows // 2 + 1, 19 * bn + 8, 4096 + 8),
            (rows, 256, 256),
        ]
    if isinstance(config, Sm80DirectConfig):  # K that ends just past a round of all warps, or inside the second one
        together = config.wk * config.unroll * bk
        shapes += [
            (9 * bm + 1, bn + 8, together + 8),
            (bm - 1, 2 * bn - 8, 2 * together - 24),
            (3, bn + 8, bk - 8),
        ]
    if isinstance(config, Sm80GemvConfig):  # never more rows than bm: every raggedness again, within them
        shapes += [
            (bm, 2 * bn, 4 * bk * config.wk * config.split_k),
            (bm - 1, bn + 8, 3 * bk + 8),
            (3, 2 * bn - 8, 4096 + 8),
            (bm // 2 + 1, 19 * bn + 8, bk * config.wk * config.unroll + 24),
            (bm, 256, 256),
            (1, 333, 2 * bk),
            *walks(problem, config, gpu),
        ]
    found = []
    for m, n, k in dict.fromkeys(shapes):
        try:
            candidate = Problem(m, n, k, problem.layout, problem.dtype, problem.acc)
        except ProblemError:
            continue
        if why_illegal(candidate, config, gpu) is None:
            found.append(candidate)
    return found
