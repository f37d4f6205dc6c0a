"""Design ``rank``: one action a kernel; it names a place in the order of the believed times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outblas.kernels.knobs import Knobs
from outblas.learn.features import Features
from outblas.learn.knob_designs.knob_design import KernelChoice, KnobDesign, Offer, prior_logits

#: Kernels, believed to be the fastest, from which an action chooses.
PLACES = 32


class RankDesign(KnobDesign):
    """An action is a place among the 32 untried kernels that are believed to be the fastest.

    Observation: the state of the search, the amounts of the best kernel so far, those of the 32 kernels in order, and
    the prior's logits.
    """

    name, prior = "rank", True

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        self.actions = PLACES
        self.size = self.view.state_size + (1 + PLACES) * len(knobs.nvec) + PLACES

    def begin(self, offer: Offer) -> KernelChoice:
        return _RankChoice(self, offer)


class _RankChoice(KernelChoice):
    """The choice of one place."""

    def __init__(self, design: RankDesign, offer: Offer) -> None:
        assert offer.believed is not None
        self._design, self._offer = design, offer
        order = np.argsort(offer.believed, kind="stable")[:PLACES]
        self._rows, self._believed = offer.rows[order], offer.believed[order]

    def mask(self) -> NDArray[np.bool_]:
        return np.arange(PLACES) < len(self._rows)

    def observe(self) -> Features:
        design, view, state = self._design, self._design.view, self._offer.state
        out = np.zeros(design.size, np.float32)
        table = out[view.state_size : -PLACES].reshape(1 + PLACES, -1)
        out[: view.state_size] = view.state_inputs(state)
        if state.best is not None:
            table[0] = view.amounts(state.best[None])[0]
        table[1 : 1 + len(self._rows)] = view.amounts(self._offer.vectors[self._rows])
        out[-PLACES:] = -1
        out[len(out) - PLACES :][: len(self._rows)] = prior_logits(self._believed, float(self._believed[0]))
        return out

    def take(self, action: int) -> int | None:
        return int(self._rows[action])
