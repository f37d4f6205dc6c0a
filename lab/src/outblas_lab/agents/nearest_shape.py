"""Kernels of the most similar shapes that were measured, fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.extents import problem_distance
from outblas.tune.agents.base import FixedOrder, group_by_launch, interleave
from outblas.tune.agents.transfer import group_by_core, translate
from outblas_lab.agents.launch_turns import LearnsAcross
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recordings_for_search import fastest_recorded, nearest_recording

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import TrainingPart

#: Similar shapes whose kernels take turns.
NEIGHBOURS = 8


class MeasuredShape(NamedTuple):
    """A problem with recorded times.

    Attributes:
        recording: its measurements, among others.
        foreign: True if another GPU than the agent's was measured.
    """

    problem: Problem
    recording: Recording
    foreign: bool


class NearestShape(LearnsAcross, FixedOrder):
    """Fastest kernels of the nearest measured shapes; nothing is predicted.

    The distance of two problems is the sum of |log2| of the ratios of their extents. An equal layout, dtype and
    accumulator come first; a shape of the GPU itself goes before one of another GPU. The 8 nearest shapes take turns:
    the fastest kernel of each, then the second of each. A kernel that is not offered becomes the nearest offered one
    (:func:`outblas.tune.agents.transfer.translate`), or is left out. All others follow in the order of the
    candidates. Launch options take turns.

    Until :meth:`prepare`, the shapes are those of the recording in ``OUTBLAS_RECORDING``, or of the packaged one of
    the most similar GPU. There the problem itself may be its own nearest shape.
    """

    across = True

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._shapes: list[MeasuredShape] | None = None
        self._near: dict[Problem, list[list[KernelConfig]]] = {}

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        """Keep the problems of all parts and their recorded times; return None."""
        found = (_shapes_of(part.recording, part.problems, self.gpu) for part in parts)
        self._shapes, self._near = list(chain.from_iterable(found)), {}

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        offered, by_core = set(candidates), group_by_core(candidates)
        if problem not in self._near:
            self._near[problem] = [fastest_recorded(shape.recording, shape.problem) for shape in self._nearest(problem)]
        near = (c if c in offered else translate(c, by_core) for c in interleave(*self._near[problem]))
        known = list(dict.fromkeys((*(c for c in near if c is not None), *candidates)))
        return interleave(*group_by_launch(known))

    def _nearest(self, problem: Problem) -> list[MeasuredShape]:
        if self._shapes is None:
            recording = nearest_recording(self.gpu)
            self._shapes = _shapes_of(recording, recording.problems, self.gpu)

        def distance(shape: MeasuredShape) -> tuple[int, float, bool]:
            return *problem_distance(shape.problem, problem), shape.foreign

        return sorted(self._shapes, key=distance)[:NEIGHBOURS]


def _shapes_of(recording: Recording, problems: Sequence[Problem], gpu: Gpu) -> list[MeasuredShape]:
    foreign = recording.gpu != gpu
    return [MeasuredShape(problem, recording, foreign) for problem in problems]
