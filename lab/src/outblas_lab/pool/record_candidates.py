"""Candidates of each problem's own, for recordings from which agents learn: drawn, ranked, or a grid of main knobs.

A grid is the product of a few values of the knobs that published recipes tune. These are tile, depth and number of
stages, cluster (or swizzle) and parts of K. So an agent that changes one knob at a time stays on recorded cells. Its
kernels are launched plainly, as those recipes launch theirs. With PDL, each point would only occur a second time.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from typing import Any

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, knob_schema, launch_of
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool, unaligned_pool
from outblas_lab.pool.knobs import all_knobs

#: Name of the catalogue of :func:`wide_kernels`.
WIDE = "wide"
#: Values of bm, bn, bk and stages in a grid.
_TILES = ((64, 128, 256), (64, 128, 256), (64, 128), (2, 4))
#: Values of split_k, of cluster_m for aligned rows, and of group for others, which have no clusters.
_SPLITS, _CLUSTERS, _GROUPS = (1, 4), (1, 2), (1, 8)


@dataclass(frozen=True)
class CandidateDraw:
    """Number and kind of each problem's candidates.

    Attributes:
        count: candidates of a problem; all legal ones if they are fewer.
        random: number of them that are drawn from all legal ones, each as likely. Unused with ``grid``.
        grid: the legal kernels of :func:`grid_kernels` come first, and all others are drawn.
        drawn_from: the draw is from this many legal kernels, the first in one random order of the catalogue. Problems
            then share kernels, which are compiled and proved once. 0: from all.

    Raises:
        UsageError: ``count`` is below 1, ``random`` is not from 0 to ``count``, or ``drawn_from`` is too small.
    """

    count: int
    random: int
    seed: int
    grid: bool = False
    drawn_from: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"--candidates is {self.count}", "1 or more", "pass a larger --candidates")
        if not 0 <= self.random <= self.count:
            raise UsageError(f"--random is {self.random}", f"0 to {self.count} (--candidates)", "correct --random")
        if self.grid and self.random:
            raise UsageError("--random conflicts with --grid", "only --grid, which draws the rest", "omit --random")
        if self.drawn_from and self.drawn_from < self.count:
            wrong = f"--random-from is {self.drawn_from}"
            raise UsageError(wrong, f"{self.count} (--candidates) or more", "pass a larger --random-from")

    def to_json(self) -> dict[str, Any]:
        """Return the settings; ``grid`` and ``drawn_from`` only if they are not at their defaults."""
        return {name: value for name, value in asdict(self).items() if value or name in ("count", "random", "seed")}


def choose_candidates(
    problem: Problem, listed: Sequence[KernelConfig], gpu: Gpu, draw: CandidateDraw
) -> dict[KernelConfig, str]:
    """Return candidate -> ``grid``, ``random`` or ``model``, the way in which it was chosen; in this order.

    The draw depends on the seed, the problem and the legal candidates alone. The model's part has the candidates that
    it predicts to be fastest, without those that were drawn. Launch options take turns in it, because each has a best
    kernel of its own. With a grid there is no model's part: the draw fills up what rules leave of the grid.

    Args:
        listed: kernels to draw from, without duplicates; with a grid, its kernels are among them.

    Raises:
        UsageError: no kernel of the grid is legal, or more of them than ``draw.count``.
    """
    points = grid_of(problem, gpu, draw) if draw.grid else []
    known, most = set(points), draw.drawn_from or len(listed)
    ordered = random.Random(str(draw.seed)).sample(listed, len(listed)) if draw.drawn_from else listed
    found = (c for c in ordered if c not in known and why_illegal(problem, c, gpu) is None)
    legal = list(islice(found, most) if draw.grid else found)  # the model ranks all, a grid needs no more than these
    wanted, likely = draw.count - len(points) if draw.grid else draw.random, legal[:most]
    drawn = random.Random(f"{draw.seed}/{problem.key}").sample(likely, min(wanted, len(likely)))
    chosen = dict.fromkeys(points, "grid") | dict.fromkeys(drawn, "random")
    if draw.grid or len(chosen) == draw.count:
        return chosen
    others = [config for config in legal if config not in chosen]
    ranked = _ranked_in_turns(problem, others, gpu)[: draw.count - len(drawn)]
    return chosen | dict.fromkeys(ranked, "model")


def grid_of(problem: Problem, gpu: Gpu, draw: CandidateDraw) -> list[KernelConfig]:
    """Return the kernels of the grid that are legal for a problem.

    Raises:
        UsageError: no kernel is legal, or more than ``draw.count`` are.
    """
    own = [c for c in grid_kernels() if FAMILIES[c.family].for_unaligned_rows != problem.rows_aligned]
    points = [c for c in own if why_illegal(problem, c, gpu) is None]
    if not points:
        wrong = f"no kernel of the grid can run {problem.key} on {gpu.name}"
        raise UsageError(wrong, "a GPU with wgmma, and extents of 8 or more for unaligned rows", "omit --grid")
    if len(points) > draw.count:
        wrong = f"--candidates is {draw.count}, but {len(points)} kernels of the grid can run {problem.key}"
        raise UsageError(wrong, f"{len(points)} or more", "pass a larger --candidates")
    return points


@functools.cache
def grid_kernels() -> tuple[KernelConfig, ...]:
    """Return the points of both grids, those for aligned rows first; some are illegal for a problem.

    Aligned rows (``sm90_wgmma_gemm``) have 144 points: bm, bn, bk, stages, split_k and cluster_m. Of these, 100 are
    legal for a long K. Other rows (``sm90_oddrows_gemm``) have 144 with ``group`` in place of ``cluster_m``. Two more
    knobs follow from these: a tile of 64 rows has one consumer, a larger one two. A split K stores directly.
    """
    wgmma: Iterator[KernelConfig] = (
        Sm90WgmmaConfig(
            bm, bn, bk, stages, _consumers(bm), cluster_m=cluster, split_k=split, store="direct" if split > 1 else "tma"
        )
        for bm, bn, bk, stages, split, cluster in product(*_TILES, _SPLITS, _CLUSTERS)
    )
    odd = (
        Sm90OddrowsConfig(bm, bn, bk, stages, _consumers(bm), split, group)
        for bm, bn, bk, stages, split, group in product(*_TILES, _SPLITS, _GROUPS)
    )
    return (*wgmma, *odd)


def _consumers(bm: int) -> int:
    return 1 if bm == 64 else 2


@functools.cache
def wide_kernels() -> tuple[KernelConfig, ...]:
    """Return a space of kernels that no model and no measurement chose, in a fixed order, launched plainly.

    It has each kernel of the pools, and those that differ from one of them in one knob. No GPU's catalogue is in it, as
    measurements chose that. :func:`outblas_lab.pool.knobs.all_knobs` has the values. The grids are in it, too. Of its
    about 100,000 kernels, the H200 can run 14,000 to 28,000 on a problem with aligned rows, and 500 to 2,200 on others.
    """
    near = (each for config in (*pool(), *unaligned_pool()) for each in (config, *_one_knob_away(config)))
    return tuple(dict.fromkeys((*grid_kernels(), *near)))


def _one_knob_away(config: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the configs that differ from one in a knob that is no launch option; many can never run."""
    choices = {knob.name: knob.values for knob in all_knobs()}
    for knob in knob_schema(type(config)):
        if not knob.launch_option:
            now = getattr(config, knob.name)
            yield from (config.with_knobs(**{knob.name: value}) for value in choices[knob.name] if value != now)


def _ranked_in_turns(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the configs by their place among those of their launch option, fastest prediction first."""
    times = predict_many(problem, configs, gpu) if configs else np.empty(0)
    seen: Counter[str] = Counter()
    places: dict[KernelConfig, tuple[int, int]] = {}
    for config in (configs[i] for i in np.argsort(times, kind="stable")):
        launch = launch_of(config)
        places[config] = seen[launch], LAUNCHES.index(launch)
        seen[launch] += 1
    return sorted(places, key=places.__getitem__)
