"""Design ``edit``: begin with the kernel that is believed to be the fastest, and change knobs of it or measure it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.kernels.knobs import Knobs
from outblas.learn.features import Features
from outblas.learn.knob_designs.knob_design import MAX_LOGIT, KernelChoice, KnobDesign, Offer, prior_logits

#: Changes of a kernel before it must be measured.
MAX_CHANGES = 4
#: What the prior takes off the logit of each change: before a network learns, the believed best is measured at once.
CHANGE_LOGIT = 1.0


class EditDesign(KnobDesign):
    """An action gives one knob of the current kernel another value, or measures the kernel.

    The first kernel is the untried one that is believed to be the fastest. A changed knob leads to an offered kernel of
    the same family with that value. It is the one that differs in the fewest knobs; the believed times break ties. A
    change of the family leads to the nearest kernel of that family. After four changes the kernel is measured.

    Observation: :meth:`outblas.learn.knob_view.KnobView.observe` of the current kernel, the share of changes made, and
    the prior's logits. A value's logit is that of the kernel to which it leads.
    """

    name, prior = "edit", True

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        self.actions = self.view.values + 1
        self.size = self.view.size + 1 + self.actions

    def begin(self, offer: Offer) -> KernelChoice:
        return _EditChoice(self, offer)


class _EditChoice(KernelChoice):
    """A current kernel, and the kernels to which each value leads. Kernels are places among the offered ones."""

    def __init__(self, design: EditDesign, offer: Offer) -> None:
        assert offer.believed is not None
        self._design, self._offer, self._believed = design, offer, offer.believed
        self._vectors = offer.vectors[offer.rows]
        self._changes = 0
        self._move(int(self._believed.argmin()))

    def mask(self) -> NDArray[np.bool_]:
        found = np.append(self._leads >= 0, True)
        if self._changes == MAX_CHANGES:
            found[:-1] = False
        return found

    def observe(self) -> Features:
        design, out = self._design, np.zeros(self._design.size, np.float32)
        seen = design.view.observe(self._offer.state, self._vectors[self._at][None], None)[0]
        out[: len(seen)], out[len(seen)] = seen, self._changes / MAX_CHANGES
        prior, usable, least = out[-design.actions :], np.flatnonzero(self._leads >= 0), float(self._believed.min())
        prior[:] = -1
        change = prior_logits(self._believed[self._leads[usable]], least) - np.float32(CHANGE_LOGIT / MAX_LOGIT)
        prior[usable] = np.maximum(change, -1)
        prior[-1] = prior_logits(self._believed[[self._at]], least)[0]
        return out

    def take(self, action: int) -> int | None:
        if action == self._design.actions - 1:
            return int(self._offer.rows[self._at])
        self._changes += 1
        self._move(int(self._leads[action]))
        return None

    def chosen(self) -> dict[str, Any]:
        view, vector = self._design.view, self._vectors[self._at]
        pairs = zip(view.knobs.knobs, vector, view.has[vector[0]], strict=True)
        return {knob.name: knob.values[i] for knob, i, has in pairs if has}

    def _move(self, at: int) -> None:
        """Go to a kernel; find the kernel to which each value leads, int64[values], -1 where none does."""
        view, vectors, current = self._design.view, self._vectors, self._vectors[at]
        differs = vectors != current
        nearest = np.lexsort((self._believed, differs.sum(axis=1)))[::-1]  # the nearest is written last
        usable = differs & view.has[vectors[:, 0]]
        usable[:, 1:] &= (vectors[:, 0] == current[0])[:, None]
        leads = np.full(view.values, -1, np.int64)
        place, knob = np.nonzero(usable[nearest])
        leads[view.starts[knob] + vectors[nearest[place], knob]] = nearest[place]
        self._at, self._leads = at, leads
