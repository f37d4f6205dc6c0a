"""Variants of a config of ``sm90_wgmma_gemm``: edges moved inside, transposed, one idea away; with proof shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import WGMMA_ROWS

if TYPE_CHECKING:
    from outblas.kernels.families.family import CacheHint
    from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig

#: Values of ``group`` that are tried.
GROUP_CHOICES = (4, 8, 16, 32)

_TRANSPOSED_HINTS: dict[CacheHint, CacheHint] = {
    "stream_a": "stream_b",
    "stream_b": "stream_a",
    "stream_ac": "stream_bc",
    "stream_bc": "stream_ac",
}


def neighbours(problem: Problem, config: Sm90WgmmaConfig) -> list[Iterable[Sm90WgmmaConfig]]:
    """Return configs near this one: a list of eight iterators, one per idea, the most successful idea first.

    Ideas: fewer rows of A, ``shift``, L2 hints, tile order, parts of K, multicast, narrower tiles, depth. Some configs
    may be illegal or equal to this one, and an iterator may be empty.
    """
    return [
        _few_rows(problem, config),
        _edges(problem, config),
        _hints(problem, config),
        _orders(config),
        _parts(config),
        _multicast(config),
        _widths(config),
        _depths(config),
    ]


def with_shifted_edges(problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig | None:
    """Return a copy of the config with ``shift=True``; None if no tile can be moved inside.

    A tile can be moved if M exceeds ``bm`` and is no multiple of it, or N likewise exceeds ``bn``. An extent that is
    smaller than one tile does not count.
    """
    ragged = (problem.m > config.bm and problem.m % config.bm) or (problem.n > config.bn and problem.n % config.bn)
    return replace(config, shift=True) if ragged else None


def transposed(config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
    """Return the config that computes the transpose of C in the same way. It may be illegal.

    ``bm`` and ``bn`` are exchanged, and so are ``cluster_m`` and ``cluster_n``, the words ``m`` and ``n`` of
    ``raster``, and A and B in ``l2``. All other knobs stay.
    """
    return replace(
        config, bm=config.bn, bn=config.bm, cluster_m=config.cluster_n, cluster_n=config.cluster_m,
        raster="n" if config.raster == "m" else "m", l2=_TRANSPOSED_HINTS.get(config.l2, config.l2),
    )  # fmt: skip


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
    """Return the rows of A that a wgmma tile must load: M rounded up to a multiple of 8, at most 64. M = 9 gives 16."""
    return min(-(-problem.m // 8) * 8, WGMMA_ROWS)


def _few_rows(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Yield the config with only the existing rows of A, with and without using the freed room for stages."""
    rows = rows_to_load(problem)
    if c.bm == WGMMA_ROWS and c.loaded_rows > rows:
        yield replace(c, a_rows=rows, stages=min(16, c.stages * (c.loaded_rows + c.bn) // (rows + c.bn)))
        yield replace(c, a_rows=rows)


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
