"""Candidates in the order of their recorded times, for tuning on the recorded kind of GPU."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import FixedOrder, group_by_launch, interleave
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUSES
from outblas_lab.recordings.recordings_for_search import nearest_recording


class RecordedAgent(FixedOrder):
    """Fastest recorded candidates first, for tuning a live GPU again.

    The launch options take turns: the fastest without PDL, the fastest with PDL, the fastest with early loads, then the
    second of each. So a budget of 6 tries the best two of each if all are offered. An unrecorded candidate with early
    loads counts as fast as the same kernel without, if that one was recorded as passed.

    Other unrecorded candidates come next, in the order of the ranking model; those that failed in the recording come
    last. For an unrecorded problem, the model alone decides, without turns. On a replay of its own recording, this
    agent knows the answers beforehand.

    Args:
        seed: unused, since proposals do not depend on it.
        recording: recording to follow. None: the name or path in ``OUTBLAS_RECORDING``, else the packaged one of the
            most similar GPU. It is loaded at the first proposal, which raises UsageError if it does not exist.
    """

    def __init__(self, seed: int, gpu: Gpu, recording: Recording | None = None) -> None:
        super().__init__(seed, gpu)
        self._recording = recording

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        from outblas.kernels.cost.cost_model import rank

        measured, unknown, failed = self._sorted_out(problem, candidates)
        # Early loads are younger than recordings: until measured, they go by what the same kernel does without.
        guessed = {c: measured[s] for c in unknown if c.early and (s := c.with_knobs(early=False)) in measured}
        known = {**measured, **guessed}
        fastest = sorted(known, key=known.__getitem__)
        rest = [config for config in unknown if config not in guessed]
        ranked = [rest[i] for i in rank(problem, rest, self.gpu)] if rest else []
        return interleave(*group_by_launch(fastest)) + ranked + failed

    def _sorted_out(
        self, problem: Problem, candidates: Sequence[KernelConfig]
    ) -> tuple[dict[KernelConfig, float], list[KernelConfig], list[KernelConfig]]:
        """Return (measured config -> microseconds, configs not recorded, configs that failed), in the candidates'
        order.
        """
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

    def _load(self) -> Recording:
        if self._recording is None:
            self._recording = nearest_recording(self.gpu)
        return self._recording
