"""An enumerated space of kernels, much wider than the pool, its legal members, neighbours and proof shapes.

The space has every kernel of the pool and of the reference GPU's catalogue. It also has every kernel that differs from
one of them in one knob. The values of a knob are those of :func:`outblas.kernels.knobs.reference_knobs`. So a
new family, a new knob or a new value is in the space as soon as its family has it. Families that are only for GPUs
without wgmma are not in it. Launch options are no part of a member: they are
off, and :meth:`KernelSpace.config` sets them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, Launch, knob_schema
from outblas.core.errors import ProblemError
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import catalogue, even_twin, with_launch
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.knobs import Knobs, all_knobs, reference_knobs
from outblas.kernels.legality import KnobColumns, breaks_extent_rule, knob_columns, never_legal, why_illegal
from outblas.kernels.pool import pool


class KernelSpace:
    """Kernels with launch options off, as vectors of choices, and their legality.

    Args:
        members: configs without launch options and without duplicates.
        knobs: the choices; it must have every value of the members.

    Attributes:
        vectors: int16[members, knobs], rows as from :meth:`Knobs.encode`; columns are contiguous.
    """

    def __init__(self, members: Sequence[KernelConfig], knobs: Knobs) -> None:
        self.members, self.knobs = tuple(members), knobs
        vectors = np.array([knobs.encode(config) for config in members], np.int16).reshape(len(members), -1)
        self.vectors: NDArray[np.int16] = np.asfortranarray(vectors)
        self._place = {config: i for i, config in enumerate(self.members)}
        self._possible: dict[tuple[str, str, str, Gpu, Launch], NDArray[np.bool_]] = {}

    def config(self, place: int, launch: Launch = "plain") -> KernelConfig:
        """Return a member with a launch option."""
        return with_launch(self.members[place], launch)

    def place(self, config: KernelConfig) -> int | None:
        """Return the index of a config's member, launch options aside; None if the space lacks it."""
        return self._place.get(without_launch(config))

    def legal(self, problem: Problem, gpu: Gpu, launch: Launch = "plain") -> NDArray[np.bool_]:
        """Return bool[members]: True for the members that are legal for a problem with a launch option.

        It equals :func:`outblas.kernels.legality.why_illegal` of every member. The rules without M, N and K are asked
        once per layout, dtype, accumulator, GPU and launch option, and are kept.
        """
        found = self._possible_for(problem, gpu, launch).copy()
        for family, rows, columns in self._columns:
            broken, unsure = breaks_extent_rule(problem, family, columns, gpu)
            found[rows[broken]] = False
            for row in rows[unsure]:
                found[row] = found[row] and why_illegal(problem, self.config(int(row), launch), gpu) is None
        return found

    @functools.cached_property
    def _columns(self) -> list[KnobColumns]:
        return knob_columns(self.members)

    def _possible_for(self, problem: Problem, gpu: Gpu, launch: Launch) -> NDArray[np.bool_]:
        key = problem.layout, problem.dtype, problem.acc, gpu, launch
        if key not in self._possible:
            configs = (with_launch(config, launch) for config in self.members)
            self._possible[key] = np.array([not never_legal(problem, config, gpu) for config in configs], np.bool_)
        return self._possible[key]


def without_launch(config: KernelConfig) -> KernelConfig:
    """Return a config with its launch knobs at their defaults; the config itself if they are."""
    names = [knob for knob in knob_schema(type(config)) if knob.launch_option]
    changed = {knob.name: knob.default for knob in names if getattr(config, knob.name) != knob.default}
    return config.with_knobs(**changed) if changed else config


@functools.cache
def kernel_space() -> KernelSpace:
    """Return the space of the module's rule. Every call returns the same object; the first takes some seconds.

    Members that no problem of any layout, dtype and accumulator can use on the reference GPU are left out.
    """
    gpu, knobs = reference_gpu(), reference_knobs()
    kinds = [Problem(1, 1, 1, "TN"), Problem(1, 1, 1, "NN"), Problem(1, 1, 1, "TN", "fp16", "fp16")]
    found = dict.fromkeys(without_launch(config) for config in (*pool(), *catalogue(gpu.name)))
    wide = dict.fromkeys(each for config in found for each in (config, *one_knob_away(config, knobs)))
    return KernelSpace([c for c in wide if not all(never_legal(kind, c, gpu) for kind in kinds)], all_knobs())


def one_knob_away(config: KernelConfig, knobs: Knobs) -> Iterator[KernelConfig]:
    """Yield the configs of the same family that differ from a config in one knob, launch options aside.

    Some may be illegal for every problem.
    """
    options = {knob.name: knob.launch_option for knob in knob_schema(type(config))}
    for knob in knobs.knobs[1:]:
        if options.get(knob.name) is False:
            now = getattr(config, knob.name)
            yield from (config.with_knobs(**{knob.name: value}) for value in knob.values if value != now)


def neighbours(problem: Problem, config: KernelConfig, gpu: Gpu) -> list[KernelConfig]:
    """Return legal configs that differ from a config in one idea, as a list without duplicates and without the config.

    Ideas: early loads of B, evenly spread CTAs, then the ideas of the config's family. The list has the first
    suggestion of each idea, then the second of each, and so on. Illegal suggestions are left out, so the list may be
    empty. Early loads and even spreading are suggested only for a config with ``pdl``.
    """
    ideas = [_early(config), _even(problem, config, gpu), *FAMILIES[config.family].neighbours(problem, config)]
    # The first suggestion of each idea, then the second of each: so a short list has some of every idea.
    mixed = dict.fromkeys(c for turn in zip_longest(*ideas) for c in turn if c is not None)
    return [c for c in mixed if c != config and why_illegal(problem, c, gpu) is None]


def _early(c: KernelConfig) -> Iterator[KernelConfig]:
    """Yield the config with early loads of B if it has PDL and lacks them."""
    if c.pdl and not c.early:
        yield c.with_knobs(early=True)


def _even(problem: Problem, c: KernelConfig, gpu: Gpu) -> Iterator[KernelConfig]:
    """Yield the config with the other value of ``even``, if that changes its launch."""
    twin = even_twin(problem, c, gpu)
    if twin is not None:
        yield twin


def proof_shapes(problem: Problem, config: KernelConfig, gpu: Gpu) -> list[Problem]:
    """Return problems of the same layout, dtype and accumulator on which a config is proved in full.

    They cover whole tiles, ragged M, N and K, and less than one tile. They cover a long K with signed inputs, and N =
    K, where calls can be chained. They cover more tiles than SMs, and rows that are not 16-byte aligned. The family's
    own shapes come last.

    Problems that are illegal for the config are left out, so the list may be empty. The extents do not depend on those
    of ``problem``. The first has M = 2 ``bm``, N = 2 ``bn`` and K = 4 ``bk``, if that is legal.
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
