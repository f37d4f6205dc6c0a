"""Configs near one of ``sm90_wgmma_gemm``: edges in place, transposed, one idea away; and what proves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import WGMMA_ROWS

if TYPE_CHECKING:
    from outblas.kernels.families.family import CacheHint
    from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig

#: Tile rows (or columns) walked together that are tried.
GROUP_CHOICES = (4, 8, 16, 32)

_TRANSPOSED_HINTS: dict[CacheHint, CacheHint] = {
    "stream_a": "stream_b",
    "stream_b": "stream_a",
    "stream_ac": "stream_bc",
    "stream_bc": "stream_ac",
}


def neighbours(problem: Problem, config: Sm90WgmmaConfig) -> list[Iterable[Sm90WgmmaConfig]]:
    """Configs near this one, an iterable per idea, what was most often worth it first."""
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
    """The config with edge tiles moved inside; None where none of them reaches past an edge."""
    ragged = (problem.m > config.bm and problem.m % config.bm) or (problem.n > config.bn and problem.n % config.bn)
    return replace(config, shift=True) if ragged else None


def transposed(config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
    """The config that computes C's transpose as this one computes C: tiles, clusters, order and hints swapped."""
    return replace(
        config, bm=config.bn, bn=config.bm, cluster_m=config.cluster_n, cluster_n=config.cluster_m,
        raster="n" if config.raster == "m" else "m", l2=_TRANSPOSED_HINTS.get(config.l2, config.l2),
    )  # fmt: skip


def proof_shapes(config: Sm90WgmmaConfig) -> list[tuple[int, int, int]]:
    """M, N, K of problems for parts of K that meet in a workspace, and for few rows of A."""
    bm, bn, bk = config.bm, config.bn, config.bk
    shapes = []
    if config.split_kind == "workspace":  # each part has one stage or two
        together = bk * config.split_k
        shapes += [(3 * bm + 1, 5 * bn + 8, together + 8), (bm + 1, together + 8, together + 8)]
    if config.a_rows:  # never more rows than that
        rows, deep = config.a_rows, bk * max(config.split_k, config.stages + 1)
        shapes += [
            (rows, 2 * bn, deep),
            (rows - 1, bn + 8, deep + 8),
            (rows // 2 + 1, 19 * bn + 8, 4096 + 8),
            (rows, 256, 256),
        ]
    return shapes


def rows_to_load(problem: Problem) -> int:
    """Rows of A that a tile of wgmma need load: M up to the next multiple of 8, all of its rows at most."""
    return min(-(-problem.m // 8) * 8, WGMMA_ROWS)


def _few_rows(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """No more rows of A than there are, and as many more stages as that leaves room for."""
    rows = rows_to_load(problem)
    if c.bm == WGMMA_ROWS and c.loaded_rows > rows:
        yield replace(c, a_rows=rows, stages=min(16, c.stages * (c.loaded_rows + c.bn) // (rows + c.bn)))
        yield replace(c, a_rows=rows)


def _edges(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    if with_shifted_edges(problem, c) is not None:
        yield replace(c, shift=not c.shift)


def _hints(problem: Problem, c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    # The larger operand is the one that is read once.
    once, again = ("b", "a") if problem.n >= problem.m else ("a", "b")
    for l2 in (f"stream_{once}", f"stream_{once}c", "stream_c", f"stream_{again}", "plain"):
        yield replace(c, l2=l2)  # type: ignore[arg-type]


def _orders(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    yield replace(c, raster="n" if c.raster == "m" else "m")
    for group in sorted(GROUP_CHOICES, key=lambda g: abs(g.bit_length() - c.group.bit_length())):
        yield replace(c, group=group)


def _parts(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
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
    for cm, cn in ((1, 1), (2, 1), (1, 2)):
        yield replace(c, cluster_m=cm, cluster_n=cn)


def _widths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    """Narrower tiles (the stages still fit): another number of them may fill the last wave."""
    for less in (16, 8, 32):
        if c.bn - less >= 32:
            yield replace(c, bn=c.bn - less)


def _depths(c: Sm90WgmmaConfig) -> Iterator[Sm90WgmmaConfig]:
    if c.bk == 64 and c.stages >= 4:
        yield replace(c, bk=128, stages=c.stages // 2)
    if c.bk == 128:
        yield replace(c, bk=64, stages=2 * c.stages)
    yield replace(c, stages=c.stages - 1)
    yield replace(c, stages=c.stages + 1)
