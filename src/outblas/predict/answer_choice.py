"""Choose among the answers of cuBLASLt's heuristic, where no kernel is surely faster.

torch.matmul runs the first answer, or an equal one. An ensemble of small perceptrons predicts the speed-up of each
other answer over it. The answer with the highest lower bound is chosen if that bound exceeds a margin. Both were fitted
on unseen problems (``outblas fit any-shape``). The choice is arithmetic on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.any_shape import BoundedNets, answer_features, answer_fields, shape_features
from outblas.predict.features import Features
from outblas.predict.posterior import Floats
from outblas.records.library_row import AnswerChoice
from outblas.runtime.cublas import rounds_partial_sums

FORMAT = 2
#: Values of fields of an answer that have an input each (cublasLtMatmulAlgoConfig).
_VALUES = {"custom": range(8), "cluster": range(8)}


@dataclass(frozen=True)
class AnswerModel(BoundedNets):
    """A fitted model of an answer's speed-up over the first."""

    version, folder, words = FORMAT, "answers", "choice of answers"

    @classmethod
    @functools.cache
    def input_count(cls) -> int:
        return int(network_inputs(Problem(8, 8, 8), ["", ""], [1], reference_gpu()).shape[1])

    def predict(self, problem: Problem, gpu: Gpu, answers: Sequence[str]) -> tuple[list[int], Floats, Floats]:
        """Return the indices of :func:`other_answers`, and natural log and deviation of their speed-ups over the first.

        Args:
            answers: descriptions (:func:`outblas.runtime.cublas.describe`) in the heuristic's order.
        """
        others = other_answers(answers)
        if not others:
            return [], np.empty(0), np.empty(0)
        return others, *self.nets.predict(network_inputs(problem, answers, others, gpu))

    def choose(self, problem: Problem, gpu: Gpu, answers: Sequence[str]) -> AnswerChoice | None:
        """Choose an answer for a problem; None: the first, which torch runs.

        An answer that rounds partial sums is never chosen.

        Args:
            answers: descriptions (:func:`outblas.runtime.cublas.describe`) in the heuristic's order.
        """
        others, gain, deviation = self.predict(problem, gpu, answers)
        if not others:
            return None
        if (surest := self.surest(problem, gain, deviation)) is None:
            return None
        best, low, _ = surest
        return AnswerChoice(answers[others[best]], float(np.exp(gain[best])), float(np.exp(low)))


def other_answers(answers: Sequence[str]) -> list[int]:
    """Return the indices of answers but the first and those that round partial sums."""
    return [i for i, answer in enumerate(answers) if i and not rounds_partial_sums(answer)]


def network_inputs(problem: Problem, answers: Sequence[str], which: Sequence[int], gpu: Gpu) -> Features:
    """Return the inputs of the nets, float32[len(which), F].

    A row is :func:`outblas.predict.any_shape.shape_features`, then the features of the first answer, of this answer,
    and their difference. Its place in the list and the length of the list come last.

    Args:
        answers: all answers, the first in front.
    """
    shape, first = shape_features(problem, gpu), _features(problem, answers[0], gpu)
    rows = []
    for i in which:
        own = _features(problem, answers[i], gpu)
        rows.append(np.concatenate([shape, first, own, own - first, [i / 8, math.log2(len(answers))]]))
    return np.array(rows, dtype=np.float32)


def _features(problem: Problem, answer: str, gpu: Gpu) -> Features:
    """The features of an answer, and its other fields: flags of kinds of kernel, stages, split and order."""
    fields = answer_fields(answer)
    values = [float(fields.get(name, 0) == value) for name, known in _VALUES.items() for value in known]
    values += [float(fields.get("stages", 0) == 0), float(fields.get("reduction", 0) != 0)]
    values += [fields.get("inner", 0) / 4, fields.get("swizzle", 0) / 2]
    return np.concatenate([answer_features(problem, answer, gpu), np.array(values, dtype=np.float32)])
