"""Candidates in the order in which a recording measured them: what to try first on the GPU it is of."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.recording import STATUSES, Recording
from outblas.search.agents.base import Agent, group_by_launch, interleave, unexplored

#: Environment variable: name or path of the recording to follow, instead of the GPU's packaged one.
RECORDING_VARIABLE = "OUTBLAS_RECORDING"


class RecordedAgent(Agent):
    """Fastest recorded first, the best without PDL and the best with PDL in turn (and this with early loads of B, where
    they are offered).

    A library row has a winner of each kind, so a budget of 8 looks at the best four of both. Candidates
    that the recording has not measured come after all that it has, in the ranking model's order, and those
    that failed in it come last. A problem that was not recorded goes by the model alone. It is meant for
    tuning on a live GPU: on a replay of its own recording it knows the answers beforehand.

    Args:
        recording: None: the one named by ``OUTBLAS_RECORDING``, else the GPU's packaged one, loaded at the
            first proposal, which raises UsageError where there is none.
    """

    draws = False

    def __init__(self, seed: int, gpu: Gpu, recording: Recording | None = None) -> None:
        super().__init__(seed, gpu)
        self._recording = recording

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        # The whole order first, so that the turns do not depend on how many are asked for at a time.
        return unexplored(self._order(problem, candidates), history)[:n]

    def _order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        measured, unknown, failed = self._sorted_out(problem, candidates)
        # Early loads are younger than recordings: until measured, they go by what the same kernel does without.
        guessed = {c: measured[s] for c in unknown if c.early and (s := c.with_knobs(early=False)) in measured}
        known = {**measured, **guessed}
        fastest = sorted(known, key=known.__getitem__)
        return (
            interleave(*group_by_launch(fastest))
            + self._by_model(problem, [c for c in unknown if c not in guessed])
            + failed
        )

    def _sorted_out(
        self, problem: Problem, candidates: Sequence[KernelConfig]
    ) -> tuple[dict[KernelConfig, float], list[KernelConfig], list[KernelConfig]]:
        """(measured -> microseconds, not in the recording, failed in it), each in the candidates' order."""
        recording = self._load()
        try:
            row = recording.row(problem)
        except UsageError:  # not recorded
            return {}, list(candidates), []
        measured: dict[KernelConfig, float] = {}
        unknown: list[KernelConfig] = []
        failed: list[KernelConfig] = []
        for config in candidates:
            column = recording.catalogue_index(config)
            status = Status.LEFT_OUT if column is None else STATUSES[recording.status[row, column]]
            if status is Status.PASSED:
                measured[config] = float(recording.median_us[row, column])
            else:
                (unknown if status is Status.LEFT_OUT else failed).append(config)
        return measured, unknown, failed

    def _by_model(self, problem: Problem, configs: list[KernelConfig]) -> list[KernelConfig]:
        if not configs:
            return []
        from outblas.kernels.cost.cost_model import rank

        return [configs[i] for i in rank(problem, configs, self.gpu)]

    def _load(self) -> Recording:
        if self._recording is None:
            self._recording = Recording.load(os.environ.get(RECORDING_VARIABLE) or self.gpu.name)
        return self._recording
