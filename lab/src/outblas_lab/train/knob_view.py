"""Inputs of a network on a search over knobs: the state of the search, and kernels as vectors of choices."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.kernels.knobs import Knobs, all_knobs
from outblas.predict.features import PROBLEM_FEATURES, Features

#: The last measured time is shown as a log ratio to the best, within this.
MAX_LOG_GAP = 1.0
#: Measurements that count as many.
MEASUREMENTS_SCALE = 16.0
Vectors = NDArray[np.int16]


@dataclass(frozen=True)
class SearchState:
    """The state of a search before the next kernel is chosen.

    Attributes:
        problem: ``problem_features``, float32[19].
        launch: the launch option.
        made: number of measurements so far.
        best: vector of the fastest proven kernel, int16[knobs]; None if none is proven yet.
        gap: log of (last time / best time), 0 or more; 0 if unknown.
    """

    problem: Features
    launch: Launch
    made: int = 0
    best: Vectors | None = None
    gap: float = 0.0


class KnobView:
    """The inputs of the network for a list of knobs.

    Args:
        knobs: the choices.

    Attributes:
        knobs: the choices.
        values: number of all values of all knobs, V.
        starts: int64[knobs], index of each knob's first value among all V.
        size: length of an observation.
        has: bool[families, knobs]: True if a family has a knob.
    """

    def __init__(self, knobs: Knobs) -> None:
        self.knobs, self.values = knobs, int(knobs.nvec.sum())
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(knobs.nvec)[:-1]))
        count = len(knobs.nvec)
        self._state_size = len(PROBLEM_FEATURES) + len(LAUNCHES) + 2
        self.size = self._state_size + 2 * count + 2 * self.values
        families = knobs.knobs[0].values
        self.has = np.array([[name in knob.families for knob in knobs.knobs] for name in families])
        self._amount = np.zeros((count, int(knobs.nvec.max())), np.float32)
        for i, knob in enumerate(knobs.knobs):
            for j, value in enumerate(knob.values):
                self._amount[i, j] = j if isinstance(value, str) else math.log2(1 + int(value)) / 4

    @property
    def text(self) -> str:
        """Return all knobs and values as one text: a policy of others is not read."""
        return ";".join(f"{k.name}={','.join(map(str, k.values))}" for k in self.knobs.knobs)

    def observe(self, state: SearchState, vectors: Vectors, knob: int) -> Features:
        """Return what the network sees before it chooses a knob, float32[n, size].

        - problem [19], launch option one-hot [3], measurements made and the gap [2];
        - the next knob, one-hot [knobs];
        - amounts of the chosen values [knobs]: log2(1 + value) / 4, or the index of a word;
        - the chosen values, one-hot [V], and those of the best kernel, one-hot [V].

        Args:
            state: the search.
            vectors: int16[n, knobs]; the entries before ``knob`` are the chosen values, and the others do not count.
            knob: index of the next knob.
        """
        n, count = len(vectors), len(self.knobs.nvec)
        out = np.zeros((n, self.size), np.float32)
        made = math.log1p(state.made) / math.log1p(MEASUREMENTS_SCALE)
        launch = [float(state.launch == each) for each in LAUNCHES]
        at = self._state_size
        out[:, :at] = np.array([*state.problem, *launch, made, min(MAX_LOG_GAP, state.gap)], np.float32)
        out[:, at + knob] = 1
        has = self.has[vectors[:, 0]] & (np.arange(count) < knob) if knob else np.zeros((n, count), np.bool_)
        amounts, hot = out[:, at + count : at + 2 * count], out[:, at + 2 * count : at + 2 * count + self.values]
        row, column = np.nonzero(has)
        index = vectors[row, column]
        amounts[row, column] = self._amount[column, index]
        hot[row, self.starts[column] + index] = 1
        if state.best is not None:
            out[:, at + 2 * count + self.values :][:, self._hot(state.best)] = 1
        return out

    def encode(self, config: KernelConfig) -> Vectors:
        """Return the vector of a config, int16[knobs], as :meth:`Knobs.encode`.

        A number that the knob lacks becomes the nearest one. A word that it lacks raises UsageError.
        """
        near = {}
        for knob in self.knobs.knobs[1:]:
            if config.family in knob.families:
                value = getattr(config, knob.name)
                if value not in knob.values and isinstance(value, int):
                    near[knob.name] = min(knob.values, key=lambda known: (abs(known - value), known))
        return self.knobs.encode(config.with_knobs(**near) if near else config).astype(np.int16)

    def _hot(self, vector: Vectors) -> NDArray[np.int64]:
        """Return the indices among all V of the values of one whole vector."""
        has = self.has[vector[0]]
        return (self.starts + vector)[has]


@functools.cache
def every_knob() -> KnobView:
    """Return the view of :func:`outblas.kernels.knobs.all_knobs`, one object for all calls."""
    return KnobView(all_knobs())
