"""The ranking model's order with coefficients that are fitted on training problems alone, for comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.heuristic import Heuristic
from outblas_lab.recordings.recording import Recording

#: Result of a fit: coefficients by family, and those of the residual.
Fitted = tuple[dict[str, dict[str, float]], np.ndarray]


class FittedHeuristic(Heuristic):
    """Analytic cost model: fastest predicted candidate first.

    The agent ``heuristic`` whose model :meth:`prepare` fits. Until then the packaged model ranks.
    """

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._fitted: Fitted | None = None

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Fit the model's coefficients on these problems (about a minute for 800), or read the fit from the cache.

        A recording of another GPU is fitted with that GPU's record. The coefficients are then scaled by the rates of
        both records (:mod:`outblas.kernels.cost.cost_model`).
        """
        from outblas.core.files import write_atomic
        from outblas.kernels.cost.cost_model import scaled
        from outblas_lab.recordings.recording import TrainingPart
        from outblas_lab.train.fit_cost_model import fit, fit_residual, rows_of_recording
        from outblas_lab.train.training_part import training_cache_folder

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

    def rank(self, problem: Problem, candidates: Sequence[KernelConfig]) -> np.ndarray:
        if self._fitted is None:
            return super().rank(problem, candidates)
        from outblas.kernels.cost.cost_model import predict_with

        return np.argsort(predict_with(*self._fitted, problem, candidates, self.gpu), kind="stable")
