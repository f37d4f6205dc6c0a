"""Design ``build``: a kernel is built from nothing, the family first and then one knob after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.kernels.knobs import Knobs
from outblas.learn.features import Features
from outblas.learn.knob_designs.knob_design import KernelChoice, KnobDesign, Offer, Scores
from outblas.learn.knob_view import SearchState, Vectors


class BuildDesign(KnobDesign):
    """An action is a value of the next knob, the family first. A knob with one possible value is not asked.

    Actions are the values of all knobs, knob after knob. Observation: :meth:`outblas.learn.knob_view.KnobView.observe`.

    A kernel's probability is the product over its knobs, each among the values that some offered kernel has together
    with those before. So offered kernels alone have a probability above 0, and the likeliest kernels come first.
    """

    name, prior = "build", False

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        self.actions, self.size = self.view.values, self.view.size

    def begin(self, offer: Offer) -> KernelChoice:
        return _BuildChoice(self, offer)

    def order(self, scores: Scores, offer: Offer, n: int) -> list[int]:
        likely = self.log_probabilities(scores, offer.state, offer.vectors[offer.rows])
        return [int(offer.rows[i]) for i in np.argsort(-likely, kind="stable")[:n]]

    def log_probabilities(self, scores: Scores, state: SearchState, vectors: Vectors) -> NDArray[np.float64]:
        """Return float64[n]: log probability of each offered kernel, if the network chooses among these alone.

        A knob for which the chosen values leave one value is not chosen and costs nothing.

        Args:
            scores: the network.
            state: the search.
            vectors: int16[n, knobs], n offered kernels. Equal rows share a probability, which each of them gets.
        """
        view, found = self.view, np.zeros(len(vectors))
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


class _BuildChoice(KernelChoice):
    """The offered kernels that have the values chosen so far.

    A lone kernel needs no choice; it is left to an action that allows its family alone.
    """

    def __init__(self, design: BuildDesign, offer: Offer) -> None:
        self._design, self._offer = design, offer
        self._rows, self._knob = offer.rows, 0
        if len(self._rows) > 1:
            self._next()

    def mask(self) -> NDArray[np.bool_]:
        found = np.zeros(self._design.actions, np.bool_)
        start, nvec = int(self._design.view.starts[self._knob]), self._design.view.knobs.nvec
        found[start : start + int(nvec[self._knob])] = self._counts() > 0
        return found

    def observe(self) -> Features:
        row = self._rows[0]
        return self._design.view.observe(self._offer.state, self._offer.vectors[row : row + 1], self._knob)[0]

    def take(self, action: int) -> int | None:
        column = self._offer.vectors[self._rows, self._knob]
        self._rows = self._rows[column == action - self._design.view.starts[self._knob]]
        self._knob += 1
        return None if self._next() else int(self._rows[0])

    def chosen(self) -> dict[str, Any]:
        view, vector = self._design.view, self._offer.vectors[self._rows[0]]
        pairs = zip(view.knobs.knobs[: self._knob], vector, view.has[vector[0]], strict=False)
        return {knob.name: knob.values[i] for knob, i, has in pairs if has}

    def _next(self) -> bool:
        """Go on to the next knob with two values or more; return False if none is left."""
        while self._knob < len(self._design.view.knobs.nvec):
            if np.count_nonzero(self._counts()) > 1:
                return True
            self._knob += 1
        return False

    def _counts(self) -> NDArray[np.intp]:
        """Return, for each value of the next knob, the number of rows that have it."""
        column = self._offer.vectors[:, self._knob]
        return np.bincount(column[self._rows], minlength=int(self._design.view.knobs.nvec[self._knob]))
