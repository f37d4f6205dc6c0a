"""Choose among the answers of cuBLASLt's heuristic, where no kernel is surely faster.

torch.matmul runs the first answer, or an equal one. An ensemble of small perceptrons predicts the speed-up of each
other answer over it. The answer with the highest lower bound is chosen if that bound exceeds a margin. Both were fitted
on unseen problems (``outblas fit any-shape``). The choice is arithmetic on the host.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.gpu_records import data_of_architecture
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.learn.any_shape import answer_features, answer_fields, shape_features
from outblas.learn.features import Features
from outblas.learn.posterior import DAMAGED, Floats, Regressor, read_arrays, single
from outblas.records.library_row import AnswerChoice
from outblas.runtime.cublas import rounds_partial_sums

FORMAT = 2
#: Values of fields of an answer that have an input each (cublasLtMatmulAlgoConfig).
_VALUES = {"custom": range(8), "cluster": range(8)}


@dataclass(frozen=True)
class AnswerModel:
    """A fitted model.

    Attributes:
        nets: predicts the natural logarithm of an answer's speed-up over the first.
        margin: least lower bound of a predicted speed-up for a choice, as a ratio, e.g. 1.01.
        sure: number of standard deviations from the prediction down to that bound, where rows are aligned.
        sure_unaligned: the same for problems with unaligned rows, of which predictions are less exact.
        about: data and date of the fit.
    """

    nets: Regressor
    margin: float
    sure: float
    sure_unaligned: float
    about: str = ""

    @classmethod
    @functools.cache
    def load(cls, gpu_name: str) -> AnswerModel:
        """Load the packaged model of a GPU, or of the nearest one of its architecture.

        Args:
            gpu_name: name of a GPU description, e.g. ``"h200"``.

        Raises:
            UsageError: the package has no model for it.
            RecordError: the file has another version, or is damaged.
        """
        path = data_of_architecture(gpu_name, "answers", ".npz")
        if path is None:
            raise UsageError(f"no choice of answers on {gpu_name}", "a packaged GPU", "fit it: outblas fit any-shape")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, name: str = "the choice of answers") -> AnswerModel:
        """Read a model from the bytes of a file that :meth:`save` wrote.

        Args:
            name: the data's name in an error.

        Raises:
            RecordError: the data have another version, are damaged, or hold nets of other inputs.
        """
        try:
            a = read_arrays(data)
            found = int(single(a, "format"))
            if found != FORMAT:
                raise ValueError(f"format {found}")
            nets = Regressor.from_arrays(a)
            if not len(nets.mean) == len(nets.scale) == nets.weights[0].shape[1] == inputs():
                raise ValueError(f"nets of {len(nets.mean)} inputs, not of {inputs()}")
            margin, sure, unaligned = (float(single(a, name)) for name in ("margin", "sure", "sure_unaligned"))
            return cls(nets, margin, sure, unaligned, str(single(a, "about")))
        except DAMAGED as error:
            raise RecordError(
                f"{name} cannot be read ({error})",
                f"format {FORMAT}",
                "install the package again, or fit it: outblas fit any-shape",
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file that :meth:`parse` reads. A file at ``path`` is replaced as a whole or not at all.

        Raises:
            RecordError: the disk refuses.
        """
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            format=FORMAT,
            margin=self.margin,
            sure=self.sure,
            sure_unaligned=self.sure_unaligned,
            about=self.about,
            **self.nets.to_arrays(),
        )
        write_atomic(Path(path), buffer.getvalue())

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
        low = gain - (self.sure if problem.rows_aligned else self.sure_unaligned) * deviation
        best = int(low.argmax())
        if not low[best] >= math.log(self.margin):  # nor what is no number
            return None
        return AnswerChoice(answers[others[best]], float(np.exp(gain[best])), float(np.exp(low[best])))


def other_answers(answers: Sequence[str]) -> list[int]:
    """Return the indices of answers but the first and those that round partial sums."""
    return [i for i, answer in enumerate(answers) if i and not rounds_partial_sums(answer)]


def network_inputs(problem: Problem, answers: Sequence[str], which: Sequence[int], gpu: Gpu) -> Features:
    """Return the inputs of the nets, float32[len(which), F].

    A row is :func:`outblas.learn.any_shape.shape_features`, then the features of the first answer, of this answer, and
    their difference. Its place in the list and the length of the list come last.

    Args:
        answers: all answers, the first in front.
        which: indices of answers.
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


@functools.cache
def inputs() -> int:
    """Return the number of inputs of the nets."""
    from outblas.core.gpu_records import reference_gpu

    return int(network_inputs(Problem(8, 8, 8), ["", ""], [1], reference_gpu()).shape[1])
