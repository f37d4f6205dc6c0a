"""Variants of a config of ``sm90_wgmma_gemm``: edges moved inside, transposed, one idea away; with proof shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import WGMMA_ROWS

if TYPE_CHECKING:
    from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig

#: Values of ``group`` that are tried.
GROUP_CHOICES = (4, 6, 8, 11, 12, 16, 24, 32)
#: Values of ``ctas`` that are tried: multiples of a tile order's width.
CTAS_CHOICES = (128, 120)


def neighbours(problem: Problem, config: Sm90WgmmaConfig) -> list[Iterable[Sm90WgmmaConfig]]:
    """Return configs near this one: a list of iterators, one per idea, the most successful idea first.

    Some configs may be illegal or equal to this one, and an iterator may be empty.
    """
    return [
        _few_rows(problem, config),
        _reducers(config),
        _swapped(problem, config),
        _edges(problem, config),
        _hints(problem, config),
        _orders(config),
        _parts(config),
        _multicast(config),
        _widths(config),
        _depths(config),
        _fewer_ctas(config),
    ]


def with_shifted_edges(problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig | None:
    """Return a copy of the config with ``shift=True``; None if no tile can be moved inside.

    A tile can be moved if M exceeds ``bm`` and is no multiple of it, or N likewise exceeds ``bn``. An extent that is
    smaller than one tile does not count.
    """
    ragged = (problem.m > config.bm and problem.m % config.bm) or (problem.n > config.bn and problem.n % config.bn)
    return replace(config, shift=True) if ragged else None


def proof_shapes(config: Sm90WgmmaConfig) -> list[tuple[int, int, int]]:
    """Return (M, N, K) of problems that prove workspaces and few rows of A, as a list.

    It has two shapes if ``split_kind`` is ``workspace``, then four if ``a_rows`` is not 0. It is empty for other
    configs.
    """
    bm, bn, bk = config.bm, config.bn, config.bk
    shapes = []
    if config.split_kind == "workspace":  # each part has one stage or two
        together = bk * config.split_k
        shapes += [(3 * bm + 1, 5 * bn + 8, together + 8), (bm + 1, together + 8, together + 8)]
    if config.a_rows:  # M may not exceed a_rows
        rows, deep = config.a_rows, bk * max(config.split_k, config.stages + 1)
        shapes += [
            (rows, 2 * bn, deep),
            (rows - 1, bn + 8, deep + 8),
            (rows // 2 + 1, 19 * bn + 8, 4096 + 8),
            (rows, 256, 256),
        ]
    return shapes


def rows_to_load(problem: Problem) -> int:
    """Return ``a_rows`` of kernels that load just the M rows of A; 64 if a wgmma tile must load all of its rows.

    M = 16 gives 16. M = 9 to 15 give 15: a stage has room for 16 rows, and a load has M.
    """
    rows = -(-problem.m // 8) * 8
    return min(rows if problem.m == rows else rows - 1, WGMMA_ROWS)


def _few_rows(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with only the existing rows of A, with and without using the freed room for stages."""
    rows = rows_to_load(problem)
    if c.bm == WGMMA_ROWS and (c.a_rows or c.bm) > rows:
        few = replace(c, a_rows=rows)
        yield replace(few, stages=min(16, c.stages * (c.loaded_rows + c.bn) // (few.loaded_rows + c.bn)))
        yield few


def _reducers(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with the other value of ``reducers``, if it has a workspace."""
    if c.split_kind == "workspace":
        yield replace(c, reducers="last" if c.reducers == "all" else "all")


def _swapped(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield transposed kernels with this tile, and with heights that only they can have."""
    if problem.layout != "TN" or c.split_k > 1 or c.a_rows or c.store != "tma":
        return
    if c.swap:
        for more in (16, -16, 8, -8):
            if 8 <= c.bm + more <= 256:
                yield replace(c, bm=c.bm + more)
        return
    consumers = {64: 1, 128: 2, 192: 3, 256: 2}.get(c.bn)
    if consumers is not None:
        consumers = 2 if c.schedule == "pingpong" else consumers
        for bm in (c.bm, c.bm - 32, c.bm - 16, c.bm + 16):
            yield replace(c, bm=bm, consumers=consumers, swap=True)


def _fewer_ctas(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield a persistent config with fewer CTAs, which tile orders of powers of two fill evenly."""
    if c.persistent and c.min_blocks == 1:
        for ctas in CTAS_CHOICES:
            for group in dict.fromkeys((c.group, 16)):
                yield replace(c, ctas=ctas, group=group)


def _edges(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with the other value of ``shift``, if a tile reaches past an edge."""
    if with_shifted_edges(problem, c) is not None:
        yield replace(c, shift=not c.shift)


def _hints(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with each L2 hint, the most promising first."""
    # The larger operand is read once.
    once, again = ("b", "a") if problem.n >= problem.m else ("a", "b")
    for l2 in (f"stream_{once}", f"stream_{once}c", "stream_c", f"stream_{again}", "plain"):
        yield replace(c, l2=l2)  # type: ignore[arg-type]


def _orders(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other tile orders."""
    yield replace(c, raster="n" if c.raster == "m" else "m")
    for group in sorted(GROUP_CHOICES, key=lambda g: abs(g.bit_length() - c.group.bit_length())):
        yield replace(c, group=group)


def _parts(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other splits of K, if K is split."""
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


def _multicast(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other clusters."""
    for cm, cn in ((1, 1), (2, 1), (1, 2)):
        yield replace(c, cluster_m=cm, cluster_n=cn)


def _widths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with narrower tiles (the stages still fit), because more tiles may fill the last wave."""
    for less in (16, 8, 32):
        if c.bn - less >= 32:
            yield replace(c, bn=c.bn - less)


def _depths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with other depths and numbers of stages."""
    if c.bk == 64 and c.stages >= 4:
        yield replace(c, bk=128, stages=c.stages // 2)
    if c.bk == 128:
        yield replace(c, bk=64, stages=2 * c.stages)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, stages=c.stages + 1)
