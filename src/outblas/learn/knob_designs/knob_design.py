"""The contract of a design: the actions that choose the next kernel of a search, and their observations.

An environment, an agent and a training share it. A design only chooses among offered kernels, all of them legal and
untried, so no action by its mask can name another kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from outblas.kernels.knobs import Knobs
from outblas.learn.features import Features
from outblas.learn.knob_view import KnobView, SearchState, Vectors
from outblas.learn.posterior import Floats

#: Returns scores of all actions, float32[n, actions], for observations, float32[n, size].
Scores = Callable[[Features], Features]
#: The prior's logits are within this of the greatest one. An observation holds them over it, from -1 to 0.
MAX_LOGIT = 12.0


@dataclass(frozen=True)
class Offer:
    """The kernels among which the next one is chosen.

    Attributes:
        state: the search so far.
        vectors: int16[members, knobs], kernels; some may not be offered.
        rows: indices of the offered kernels in ``vectors``; one or more.
        believed: float64[rows], believed log times of the offered kernels over the prior's error. A difference of 1 is
            a logit: before a network learns, the slower kernel is e times less likely. None: a design without a prior.
    """

    state: SearchState
    vectors: Vectors
    rows: NDArray[np.intp]
    believed: Floats | None = None


class KernelChoice(ABC):
    """The choice of one kernel: its actions, one after another, until one names the kernel."""

    @abstractmethod
    def mask(self) -> NDArray[np.bool_]:
        """Return bool[actions]: True for the actions that lead to an offered kernel. One or more are True."""

    @abstractmethod
    def observe(self) -> Features:
        """Return what the network sees now, float32[size]."""

    @abstractmethod
    def take(self, action: int) -> int | None:
        """Take an allowed action; return the row of the kernel to measure, or None if more actions are needed."""

    def chosen(self) -> dict[str, Any]:
        """Return knob -> value of the kernel so far, ``family`` first; knobs that it lacks are left out."""
        return {}


class KnobDesign(ABC):
    """A way to choose kernels by actions.

    A class of it is added in one place, ``knob_designs/design_registry.py``.

    Args:
        knobs: the choices of the kernels.

    Attributes:
        name: its name in the registry.
        prior: True if it begins with believed times. An observation then ends with ``actions`` logits of the prior over
            ``MAX_LOGIT``, to which the network's scores are added.
        view: the kernels as a network sees them.
        actions: number of actions.
        size: length of an observation.
    """

    name: ClassVar[str]
    prior: ClassVar[bool]
    actions: int
    size: int

    def __init__(self, knobs: Knobs) -> None:
        self.view = KnobView(knobs)

    @abstractmethod
    def begin(self, offer: Offer) -> KernelChoice:
        """Begin the choice of a kernel."""

    def order(self, scores: Scores, offer: Offer, n: int) -> list[int]:
        """Return up to ``n`` different rows of the offer, best first.

        Each is the kernel to which the best allowed actions lead, if those before it are no longer offered.

        Args:
            scores: the network.
            offer: the kernels.
            n: number of kernels.
        """
        found: list[int] = []
        while len(found) < n and len(offer.rows):
            choice, row = self.begin(offer), None
            while row is None:
                likely = np.where(choice.mask(), scores(choice.observe()[None])[0], -np.inf)
                row = choice.take(int(likely.argmax()))
            found.append(row)
            left = offer.rows != row
            believed = None if offer.believed is None else offer.believed[left]
            offer = replace(offer, rows=offer.rows[left], believed=believed)
        return found


def prior_logits(believed: Floats, best: float) -> Features:
    """Return the prior's logits over ``MAX_LOGIT``, -1 to 0, of kernels with believed times.

    Args:
        believed: float64[n], as in an offer.
        best: believed time that has the logit 0.
    """
    return np.clip((best - believed) / MAX_LOGIT, -1, 0).astype(np.float32)
