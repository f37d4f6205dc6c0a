"""The chooser of unlisted products while learning is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.core.config import Launch
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.decide import Choose
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow

if TYPE_CHECKING:
    from outblas.adapt.learning.learner import Learner


class LearningChooser:
    """The chooser of a CUDA device while learning is on; see :meth:`outblas.adapt.learning.learner.Learner.row_for`.

    Args:
        own: the device's own chooser; None: it has none.
    """

    def __init__(self, learner: Learner, index: int, own: Choose | None) -> None:
        self._learner, self._index, self._own = learner, index, own

    def __call__(self, problem: Problem, gpu: Gpu, launch: Launch) -> LibraryRow | LibraryChoice | AnswerChoice | None:
        return self._learner.row_for(self._index, self._own, problem, gpu, launch)

    @property
    def rows_id(self) -> str:
        """Return a text that changes with the rows that were learned."""
        return repr(self._learner.rows(self._index))
