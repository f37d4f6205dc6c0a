"""The choice of a kernel among offered ones: an action is a value of its next knob, the family first.

The environment, the agent and the training share it. Offered kernels are legal and untried, and no action by the mask
names another kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.predict.features import Features
from outblas_lab.train.knob_view import KnobView, SearchState, Vectors

#: Returns scores of all values of all knobs, float32[n, values], for observations, float32[n, size].
Scores = Callable[[Features], Features]


@dataclass(frozen=True)
class Offer:
    """The kernels among which the next one is chosen.

    Attributes:
        state: the search so far.
        vectors: int16[members, knobs], kernels; some may not be offered.
        rows: indices of the offered kernels in ``vectors``; one or more.
    """

    state: SearchState
    vectors: Vectors
    rows: NDArray[np.intp]


class KnobChoice:
    """The choice of one kernel: the offered kernels that have the values chosen so far.

    A knob with one possible value is not asked. A lone kernel needs no choice; it is left to an action that allows its
    family alone.

    Args:
        view: the knobs, as a network sees them.
        offer: the kernels.
    """

    def __init__(self, view: KnobView, offer: Offer) -> None:
        self._view, self._offer = view, offer
        self._rows, self._knob = offer.rows, 0
        if len(self._rows) > 1:
            self._next()

    def mask(self) -> NDArray[np.bool_]:
        """Return bool[values]: True for the values that lead to an offered kernel. One or more are True."""
        found = np.zeros(self._view.values, np.bool_)
        start, nvec = int(self._view.starts[self._knob]), self._view.knobs.nvec
        found[start : start + int(nvec[self._knob])] = self._counts() > 0
        return found

    def observe(self) -> Features:
        """Return what the network sees now, float32[size]."""
        row = self._rows[0]
        return self._view.observe(self._offer.state, self._offer.vectors[row : row + 1], self._knob)[0]

    def take(self, action: int) -> int | None:
        """Take an allowed action; return the row of the kernel to measure, or None if more actions are needed."""
        column = self._offer.vectors[self._rows, self._knob]
        self._rows = self._rows[column == action - self._view.starts[self._knob]]
        self._knob += 1
        return None if self._next() else int(self._rows[0])

    def chosen(self) -> dict[str, Any]:
        """Return knob -> value of the kernel so far, ``family`` first; knobs that it lacks are left out."""
        view, vector = self._view, self._offer.vectors[self._rows[0]]
        pairs = zip(view.knobs.knobs[: self._knob], vector, view.has[vector[0]], strict=False)
        return {knob.name: knob.values[i] for knob, i, has in pairs if has}

    def _next(self) -> bool:
        """Go on to the next knob with two values or more; return False if none is left."""
        while self._knob < len(self._view.knobs.nvec):
            if np.count_nonzero(self._counts()) > 1:
                return True
            self._knob += 1
        return False

    def _counts(self) -> NDArray[np.intp]:
        """Return, for each value of the next knob, the number of rows that have it."""
        column = self._offer.vectors[:, self._knob]
        return np.bincount(column[self._rows], minlength=int(self._view.knobs.nvec[self._knob]))


def log_probabilities(view: KnobView, scores: Scores, state: SearchState, vectors: Vectors) -> NDArray[np.float64]:
    """Return float64[n]: log probability of each offered kernel, if the network chooses among these alone.

    A kernel's probability is the product over its knobs, each among the values that some offered kernel has together
    with those before. A knob for which the chosen values leave one value is not chosen and costs nothing.

    Args:
        view: the knobs, as the network sees them.
        scores: the network.
        state: the search.
        vectors: int16[n, knobs], n offered kernels. Equal rows share a probability, which each of them gets.
    """
    found = np.zeros(len(vectors))
    group = np.zeros(len(vectors), np.int64)  # equal for rows whose values before the knob are equal
    for knob in range(vectors.shape[1]):
        values = vectors[:, knob].astype(np.int64)
        if (values == values[0]).all():
            continue
        pairs, first, again = np.unique(group * 4096 + values, return_index=True, return_inverse=True)
        prefix, sizes = np.unique(pairs // 4096, return_counts=True)
        for_choice = prefix[sizes > 1]
        if len(for_choice):
            of_pair = np.searchsorted(for_choice, pairs // 4096)
            chosen = np.isin(pairs // 4096, for_choice)
            rows = first[chosen]
            of_row, value = of_pair[chosen], pairs[chosen] % 4096
            one = np.full(len(for_choice), -1, np.int64)
            one[of_row] = rows
            scored = scores(view.observe(state, vectors[one], knob))
            picked = scored[of_row, view.starts[knob] + value].astype(np.float64)
            top = np.full(len(for_choice), -np.inf)
            np.maximum.at(top, of_row, picked)
            total = np.zeros(len(for_choice))
            np.add.at(total, of_row, np.exp(picked - top[of_row]))
            logs = np.zeros(len(pairs))
            logs[chosen] = picked - top[of_row] - np.log(total[of_row])
            found += logs[again]
        group = again
    return found
