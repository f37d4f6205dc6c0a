"""Measurements that all agents of a live comparison share: each kernel of a problem is measured once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from outblas.core.config import Candidate, KernelConfig
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.records.store import Store


class SharedMeasurements:
    """An evaluator behind a store: it measures what the store lacks, and keeps every answer before it is used.

    An agent that asks for a kernel that was measured before costs no GPU time.

    Args:
        evaluator: measures.
        store: keeps the measurements. Threads of other GPUs may use it, too.
        turn: lock of the store; all its users share it.
        run_id: name of the measurements in the store.

    Attributes:
        seconds: seconds for which this object had the GPU.
    """

    def __init__(self, evaluator: Evaluator, store: Store, turn: threading.Lock, run_id: str) -> None:
        self._evaluator, self._store, self._turn, self._run_id = evaluator, store, turn, run_id
        self._known: dict[Candidate, Evaluation] = {}
        self._problem: Problem | None = None
        self.seconds = 0.0

    def of(self, problem: Problem, configs: Iterable[KernelConfig]) -> dict[KernelConfig, Evaluation]:
        """Return config -> its evaluation. Those that were never measured are measured now, together.

        Args:
            problem: the problem.
            configs: legal kernels; repeats count once.

        Raises:
            RecordError: the store cannot be read or written; earlier measurements are kept.
            DeviceError: the GPU cannot be used.
        """
        if problem != self._problem:
            with self._turn:
                self._known, self._problem = self._store.recorded(self._run_id, problem), problem
        wanted = list(dict.fromkeys(configs))
        new = [config for config in wanted if config not in self._known]
        if new:
            begin = time.monotonic()
            for evaluation in self._evaluator.evaluate([(problem, config) for config in new]):
                with self._turn:
                    self._store.append(self._run_id, evaluation)
                self._known[evaluation.config] = evaluation
            self.seconds += time.monotonic() - begin
        return {config: self._known[config] for config in wanted}
