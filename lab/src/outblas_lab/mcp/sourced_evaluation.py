"""An evaluation with the origin of its figures."""

from __future__ import annotations

from dataclasses import dataclass

from outblas.core.evaluation import Evaluation
from outblas.core.roofline import Gpu


@dataclass(frozen=True)
class SourcedEvaluation:
    """An evaluation with the origin of its figures.

    Attributes:
        gpu: GPU of the figures.
        source: ``cuda:0``, ``replay:h200`` or ``recorded:<file>``.
    """

    evaluation: Evaluation
    gpu: Gpu
    source: str
