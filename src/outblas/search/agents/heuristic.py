"""Candidates in the order in which the analytic model ranks them, launch options in turns."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.recording import Recording
from outblas.search.agents.base import FixedOrder, group_by_launch, interleave

#: Result of a fit: coefficients by family, and those of the residual.
Fitted = tuple[dict[str, dict[str, float]], np.ndarray]


class Heuristic(FixedOrder):
    """Analytic cost model: fastest predicted candidate first.

    Launch options take turns (``plain``, ``pdl``, ``weights``), since a library row needs a winner of each. PDL is
    nearly always predicted faster; a single order would hide the others under a small budget. Equal predictions keep
    the order of the candidates. The measurements of the problem change nothing. Until :meth:`prepare`, the packaged
    model ranks; it was fitted on all measurements.
    """

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._fitted: Fitted | None = None

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Fit the model's coefficients on these problems (about a minute for 800), or read the fit from the cache.

        A recording of another GPU is fitted with that GPU's record. The coefficients are then scaled by the rates of
        both records (:mod:`outblas.kernels.cost.cost_model`).

        Args:
            recording: measurements of ``problems``; other problems in it are not used.
        """
        from outblas.core.files import write_atomic
        from outblas.kernels.cost.cost_model import scaled
        from outblas.learn.train.fit_cost_model import fit, fit_residual, rows_of_recording
        from outblas.learn.train.training_part import TrainingPart, training_cache_folder

        measured = recording.gpu
        path = training_cache_folder("models", [TrainingPart(recording, tuple(problems))]) / "model.json"
        if not path.exists():
            rows = [row for row in rows_of_recording(recording, "", set(problems)) if len(row.times)]
            coefficients = fit(rows, measured)
            residual = fit_residual(rows, coefficients, measured)
            write_atomic(path, json.dumps([coefficients, residual.tolist()]).encode())
        coefficients, found = json.loads(path.read_text())
        if measured != self.gpu:
            coefficients = {family: scaled(family, own, self.gpu, measured) for family, own in coefficients.items()}
        self._fitted = coefficients, np.array(found)

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        ranked = [candidates[i] for i in self._rank(problem, candidates)]
        return interleave(*group_by_launch(ranked))

    def _rank(self, problem: Problem, candidates: Sequence[KernelConfig]) -> np.ndarray:
        if self._fitted is None:
            from outblas.kernels.cost.cost_model import rank

            return rank(problem, candidates, self.gpu)
        from outblas.kernels.cost.cost_model import predict_with

        return np.argsort(predict_with(*self._fitted, problem, candidates, self.gpu), kind="stable")
