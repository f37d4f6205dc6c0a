"""Candidates in the order in which the analytic model ranks them, launch options in turns."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.recording import Recording
from outblas.search.agents.base import Agent, group_by_launch, interleave, unexplored

#: What a fit leaves: coefficients by family, and the residual's.
Fitted = tuple[dict[str, dict[str, float]], np.ndarray]


class Heuristic(Agent):
    """Fastest predicted first; equal predictions in catalogue order. A library row has a winner of every launch option,
    and PDL is nearly always predicted faster: by one order for all a small budget would hardly see the others.

    Until :meth:`prepare`, by the packaged model, which was fitted on all that was measured.
    """

    draws = False

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self._fitted: Fitted | None = None

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        """Fit the model's coefficients on these problems, about a minute for 800 of them; kept in the cache."""
        from outblas.core.files import write_atomic
        from outblas.learn.train.fit_cost_model import fit, fit_residual, rows_of_recording
        from outblas.learn.train.training_cache import training_cache_folder

        path = training_cache_folder("models", recording, problems) / "model.json"
        if not path.exists():
            rows = [row for row in rows_of_recording(recording, "", set(problems)) if len(row.times)]
            coefficients = fit(rows, self.gpu)
            residual = fit_residual(rows, coefficients, self.gpu)
            write_atomic(path, json.dumps([coefficients, residual.tolist()]).encode())
        coefficients, found = json.loads(path.read_text())
        self._fitted = coefficients, np.array(found)

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        if not candidates:
            return []
        ranked = [candidates[i] for i in self._rank(problem, candidates)]
        return unexplored(interleave(*group_by_launch(ranked)), history)[:n]

    def _rank(self, problem: Problem, candidates: Sequence[KernelConfig]) -> np.ndarray:
        if self._fitted is None:
            from outblas.kernels.cost.cost_model import rank

            return rank(problem, candidates, self.gpu)
        from outblas.kernels.cost.cost_model import predict_with

        return np.argsort(predict_with(*self._fitted, problem, candidates, self.gpu), kind="stable")
