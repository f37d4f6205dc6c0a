"""Candidates by measurements of sister problems: the same M, N, K in another layout, dtype or accumulator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.lab_parts import find_part, part
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.library import Library
from outblas.tune.agents.base import FixedOrder, group_by_launch, interleave
from outblas.tune.neighbour_winners import LibraryNeighbours

#: (layout, dtype, accumulator) of every possible sister.
_KINDS = (*product(("TN", "NN"), ("fp16", "bf16"), ("fp32",)), *product(("TN", "NN"), ("fp16",), ("fp16",)))
#: Weight of each difference: the layout decides memory traffic and legality, the accumulator decides registers.
_LAYOUT, _ACC, _DTYPE = 4, 2, 1
#: Knobs that a translation may change, in the families that have them.
_TRANSLATED = ("bn", "stages", "vec", "even")


class Transfer(FixedOrder):
    """Fastest kernels of the same M, N, K in another layout or dtype.

    A sister is a problem of the same M, N and K, in any layout, dtype and accumulator, that was tuned or recorded. The
    problem itself counts, too, and is first; the others follow in the order of :func:`sister_problems`. Each gives its
    winners, then its recorded candidates that passed, fastest first. The packaged library's winners of shapes nearby
    follow (:class:`outblas.tune.neighbour_winners.LibraryNeighbours`). A config that is not offered becomes the nearest
    offered one (:func:`translate`), or is left out. A config with PDL is followed by its variant with early loads, if
    offered.

    Every second proposal of a launch option is the ranking model's, the first is a sister's. All are the model's
    without a sister. The launch options take turns, as a library row has a winner of each.

    Args:
        seed: unused, since proposals do not depend on it.
        recordings: measurements of sisters. None: the name or path in ``OUTBLAS_RECORDING``, else that of outblas-lab
            for the most similar GPU, if it is installed. It is loaded at the first proposal, which raises UsageError if
            it does not exist.
        winners: problem -> configs that the tables tuned so far would install, and no neighbours. None: those of the
            packaged library, whose intervals count, too; after :meth:`prepare` none.
    """

    def __init__(
        self,
        seed: int,
        gpu: Gpu,
        recordings: Sequence[Any] | None = None,
        winners: Mapping[Problem, Sequence[KernelConfig]] | None = None,
    ) -> None:
        super().__init__(seed, gpu)
        self._recordings, self._winners = recordings, winners
        self._library: Library | None = None
        self._neighbours: LibraryNeighbours | None = None

    def prepare(self, recording: Any, problems: Sequence[Problem]) -> None:
        """Forget the packaged library, which has the winners of held-out problems; return None."""
        self._winners = self._winners or {}

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        from outblas.kernels.cost.cost_model import rank

        ranked = [candidates[i] for i in rank(problem, candidates, self.gpu)]
        measured = self._measured(problem, candidates)
        return interleave(*map(_mixed, group_by_launch(measured), group_by_launch(ranked)))

    def _measured(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        """Return offered candidates by their sisters' measurements, nearest sister first; each once."""
        offered, by_core = dict.fromkeys(candidates), group_by_core(candidates)
        found: dict[KernelConfig, None] = {}
        for config in self._known(problem):
            here = config if config in offered else translate(config, by_core)
            if here is None:
                continue
            found.setdefault(here)
            early = here.with_knobs(early=True)  # a good kernel with PDL may gain by early loads, too
            if here.pdl and early in offered:
                found.setdefault(early)
        return list(found)

    def _known(self, problem: Problem) -> Iterator[KernelConfig]:
        if self._recordings is None:
            self._recordings = nearest_recordings(self.gpu)
        for sister in sister_problems(problem):
            yield from self._won(sister)
            for recording in self._recordings:
                yield from part("recordings", "agent transfer").fastest_recorded(recording, sister)
        if self._winners is None:
            self._neighbours = self._neighbours or LibraryNeighbours(self._packaged())
            yield from self._neighbours.of(problem, self.gpu)

    def _packaged(self) -> Library:
        self._library = self._library or Library.packaged(self.gpu.name, missing_ok=True)
        return self._library

    def _won(self, problem: Problem) -> Iterator[KernelConfig]:
        if self._winners is not None:
            yield from self._winners.get(problem, ())
            return
        row = self._packaged().lookup(problem)
        yield from () if row is None else row.kernels


def nearest_recordings(gpu: Gpu) -> tuple[Any, ...]:
    """Return the recording that ``OUTBLAS_RECORDING`` names, or the most similar GPU's; ``()`` without the lab."""
    found = find_part("recordings")
    return () if found is None else (found.nearest_recording(gpu),)


def sister_problems(problem: Problem) -> list[Problem]:
    """Return six problems of the same M, N and K by ascending difference; the problem itself is first.

    They are TN and NN, each in fp16 with fp32 accumulation, bf16 with fp32, and fp16 with fp16. The layout weighs 4,
    the accumulator 2 and the dtype 1. So for TN, fp16, fp32 they are: itself, TN bf16 fp32, TN fp16 fp16, then the same
    three in NN.
    """

    def distance(p: Problem) -> int:
        return (
            _LAYOUT * (p.layout != problem.layout) + _ACC * (p.acc != problem.acc) + _DTYPE * (p.dtype != problem.dtype)
        )

    made = [replace(problem, layout=layout, dtype=dtype, acc=acc) for layout, dtype, acc in _KINDS]  # type: ignore[arg-type]
    return sorted(made, key=distance)


def translate(config: KernelConfig, by_core: Mapping[KernelConfig, Sequence[KernelConfig]]) -> KernelConfig | None:
    """Return the offered config nearest to ``config`` that differs in ``bn``, ``stages``, ``vec`` or ``even`` only;
    None if none does.

    An equal offered config is the nearest. Otherwise the smallest difference of ``bn`` decides, and the larger ``bn``
    wins a tie. The difference of ``stages``, then ``even``, decides among equal ones.

    Args:
        by_core: offered configs, grouped by their form in which those of the four knobs that the family has are 0.
    """

    def difference(c: KernelConfig) -> tuple[int, ...]:
        return abs(c.bn - config.bn), c.bn < config.bn, abs(_stages(c) - _stages(config)), c.even != config.even

    return min(by_core.get(_core(config), ()), key=difference, default=None)


def group_by_core(candidates: Sequence[KernelConfig]) -> dict[KernelConfig, list[KernelConfig]]:
    """Return the candidates grouped for :func:`translate`: by their form in which four knobs are 0.

    Args:
        candidates: the offered configs; each group keeps their order.
    """
    found: dict[KernelConfig, list[KernelConfig]] = {}
    for config in candidates:
        found.setdefault(_core(config), []).append(config)
    return found


@functools.lru_cache(maxsize=8192)  # searches ask for the same few thousand configs at every problem
def _core(config: KernelConfig) -> KernelConfig:
    return config.with_knobs(**{name: 0 for name in config.knobs() if name in _TRANSLATED})


def _stages(config: KernelConfig) -> int:
    """Return the depth of the pipeline, or 0 if the family has no knob ``stages``."""
    return int(getattr(config, "stages", 0))


def _mixed(measured: list[KernelConfig], ranked: list[KernelConfig]) -> list[KernelConfig]:
    """Return ``measured`` and ``ranked`` in turns, measured first; each config once."""
    order: list[KernelConfig] = []
    taken: set[KernelConfig] = set()
    sources = [iter(measured), iter(ranked)]
    while len(taken) < len(ranked):  # every measured candidate is offered, hence ranked
        for source in sources:
            config = next((c for c in source if c not in taken), None)
            if config is not None:
                taken.add(config)
                order.append(config)
    return order
