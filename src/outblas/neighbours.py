"""Configs one or two knobs away from a good one: what a catalogue is too coarse for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from outblas.config import KernelConfig
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.problem import Problem
from outblas.roofline import H200, Gpu
from outblas.space import WGMMA_ROWS, even_twin, rows_to_load, shifted, why_illegal

#: Tile rows (or columns) walked together that are tried.
GROUPS = (4, 8, 16, 32)
#: K up to which walking CTAs may keep their tokens that are tried.
KEPT = (2048, 4096, 8192)


def neighbours(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> list[KernelConfig]:
    """Legal configs that differ from a legal one in one idea (early loads of B, CTAs spread evenly, L2
    hints, order of tiles, multicast, parts of K, depth), what was most often worth it first; without itself."""
    if isinstance(config, Sm90WgmmaConfig):
        ideas = [
            _few_rows(problem, config),
            _edges(problem, config),
            _hints(problem, config),
            _orders(config),
            _parts(config),
            _multicast(config),
            _widths(config),
            _depths(config),
        ]
    elif isinstance(config, Sm80GemvConfig):
        ideas = [_gemv(config)]
    elif isinstance(config, Sm80DirectConfig):
        ideas = [_direct(config)]
    else:
        ideas = [_mma(config)]
    ideas = [_early(config), _even(problem, config, gpu), *ideas]
    # An idea's first suggestion, then the next idea's: a short list then has something of each.
    mixed = dict.fromkeys(c for turn in zip_longest(*ideas) for c in turn if c is not None)
    return [c for c in mixed if c != config and why_illegal(problem, c, gpu) is None]


def _early(c: KernelConfig) -> Iterator[KernelConfig]:
    if c.pdl and not c.early:
        yield c.with_knobs(early=True)


def _even(problem: Problem, c: KernelConfig, gpu: Gpu) -> Iterator[KernelConfig]:
    twin = even_twin(problem, c, gpu)
    if twin is not None:
        yield twin


def _few_rows(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    """No more rows of A than there are, and as many more stages as that leaves room for."""
    rows = rows_to_load(problem)
    if c.bm == WGMMA_ROWS and c.loaded_rows > rows:
        yield replace(c, a_rows=rows, stages=min(16, c.stages * (c.loaded_rows + c.bn) // (rows + c.bn)))
        yield replace(c, a_rows=rows)


def _edges(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    if shifted(problem, c) is not None:
        yield replace(c, shift=not c.shift)


def _hints(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    # The larger operand is the one that is read once.
    once, again = ("b", "a") if problem.n >= problem.m else ("a", "b")
    for l2 in (f"stream_{once}", f"stream_{once}c", "stream_c", f"stream_{again}", "plain"):
        yield replace(c, l2=l2)  # type: ignore[arg-type]


def _orders(c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    yield replace(c, raster="n" if c.raster == "m" else "m")
    for group in sorted(GROUPS, key=lambda g: abs(g.bit_length() - c.group.bit_length())):
        yield replace(c, group=group)


def _parts(c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    if c.split_k == 1:
        return
    if c.split_kind == "workspace":
        yield replace(c, split_k=c.split_k + 1)
        yield replace(c, split_k=c.split_k - 1)
        yield replace(c, split_kind="cluster")
    else:
        yield replace(c, split_kind="workspace")
        yield replace(c, split_k=c.split_k + 1)
        yield replace(c, split_k=c.split_k - 1)


def _multicast(c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    for cm, cn in ((1, 1), (2, 1), (1, 2)):
        yield replace(c, cluster_m=cm, cluster_n=cn)


def _widths(c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    """Narrower tiles (the stages still fit): another number of them may fill the last wave."""
    for less in (16, 8, 32):
        if c.bn - less >= 32:
            yield replace(c, bn=c.bn - less)


def _depths(c: Sm90WgmmaConfig) -> Iterator[KernelConfig]:
    if c.bk == 64 and c.stages >= 4:
        yield replace(c, bk=128, stages=c.stages // 2)
    if c.bk == 128:
        yield replace(c, bk=64, stages=2 * c.stages)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, stages=c.stages + 1)


def _gemv(c: Sm80GemvConfig) -> Iterator[KernelConfig]:
    yield replace(c, l2="plain" if c.l2 == "stream_b" else "stream_b")
    if c.warm_k:
        yield replace(c, warm_k=0)
    if c.persistent:
        yield replace(c, persistent=False, kept_k=0)
    for kept_k in (0, *KEPT):
        yield replace(c, persistent=True, kept_k=kept_k, split_k=1)
    for unroll in (c.unroll + 1, c.unroll - 1):
        yield replace(c, unroll=unroll)
    yield replace(c, ring="registers" if c.ring == "shared" else "shared")
    yield replace(c, split_k=2 * c.split_k)
    yield replace(c, split_k=c.split_k // 2)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, wk=c.wk // 2)


def _direct(c: Sm80DirectConfig) -> Iterator[KernelConfig]:
    for unroll in (c.unroll + 1, c.unroll - 1):
        yield replace(c, unroll=unroll)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, wk=c.wk // 2)
    yield replace(c, wk=c.wk + 1)
    yield replace(c, bn=2 * c.bn)
    yield replace(c, bn=c.bn // 2)
    yield replace(c, bm=2 * c.bm)
    yield replace(c, bm=c.bm // 2)


def _mma(c: Sm80MmaConfig) -> Iterator[KernelConfig]:
    yield replace(c, stages=c.stages + 1)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, split_k=2 * c.split_k)
    yield replace(c, split_k=c.split_k // 2)
    yield replace(c, wk=2 * c.wk)
    yield replace(c, bk=2 * c.bk)
    yield replace(c, bk=c.bk // 2)
