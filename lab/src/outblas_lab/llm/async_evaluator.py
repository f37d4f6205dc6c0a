"""An evaluator behind asyncio: one thread asks it, in batches of whatever waits; each pair once.

A pool takes further pairs into a batch that is under way, so that no GPU waits for the slowest kernel of a batch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Union

from outblas.core.config import Candidate, config_name
from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FAMILY as FREE

Pair = tuple[str, str]
#: A pair that was asked for, a function to call, or None: the end.
Job = Union[tuple[Problem, Candidate], Callable[[], None], None]


class AsyncEvaluator:
    """Answer (problem, candidate) pairs in the running event loop, by an evaluator in one background thread.

    Make it inside a running event loop; elsewhere RuntimeError is raised. The constructor starts the thread. Await
    ``evaluate(problem, candidate)`` and ``call(function)``. Then call ``close()``, which is not awaited. It is no
    context manager.

    Args:
        record: called in the event loop's thread with every new evaluation, before anybody else sees it. If it raises,
            those who wait for the evaluation get its error.
        known: evaluations recorded before; they are not asked for again.
    """

    def __init__(
        self, evaluator: Evaluator, record: Callable[[Evaluation], None], known: Iterable[Evaluation] = ()
    ) -> None:
        self._evaluator, self._record = evaluator, record
        self._known = {(e.problem.key, config_name(e.config)): e for e in known}
        self._waiting: dict[Pair, asyncio.Future[Evaluation]] = {}
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._put_off: deque[Job] = deque()  # of the background thread alone
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # A daemon: what hangs in a compiler or on a GPU must not keep an interrupted program alive.
        self._thread = threading.Thread(target=self._work, name="judge", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> int:
        """Number of pairs that were asked for and have no answer yet."""
        return len(self._waiting)

    async def evaluate(self, problem: Problem, candidate: Candidate) -> Evaluation:
        """Return the evaluation of a pair; a known or waiting pair is not evaluated twice. After an error it is.

        Args:
            candidate: the candidate; equal ones have equal names (``config_name``).

        Raises:
            UsageError: the pair is new, and :meth:`close` was called before.
            DeviceError: the evaluator yields no evaluation of this pair.
            Exception: whatever the evaluator or ``record`` raises.
        """
        pair = (problem.key, config_name(candidate))
        if pair in self._known:
            return self._known[pair]
        if pair not in self._waiting:
            self._check_open()
            self._waiting[pair] = self._loop.create_future()
            self._jobs.put((problem, candidate))
        return await asyncio.shield(self._waiting[pair])

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function without arguments in the evaluator's thread and return its result, or raise its exception.

        The thread calls it between two batches of pairs, so that it never runs beside an evaluation. Example: ``await
        async_evaluator.call(lambda: 3)`` returns 3.

        Raises:
            UsageError: :meth:`close` was called before.
        """
        self._check_open()
        future: asyncio.Future[Any] = self._loop.create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:
                self._tell(_fail, future, error)
            else:
                self._tell(_set, future, result)

        self._jobs.put(job)
        return await future

    def close(self) -> None:
        """End the thread after what was asked for before. Return at once, without waiting for it.

        Later questions are answered only if the answer is known or under way. A second call does nothing.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)

    def _check_open(self) -> None:
        """Raise UsageError after :meth:`close`: nobody would answer."""
        if self._closed:
            wrong = "the evaluator is closed"
            raise UsageError(wrong, "an open evaluator", "evaluate before close(), or create a new evaluator")

    def _work(self) -> None:
        while True:
            jobs = [self._put_off.popleft() if self._put_off else self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            for job in jobs:
                if callable(job):
                    job()
            pairs = [job for job in jobs if isinstance(job, tuple)]
            if pairs:
                # Of one problem and kind: an evaluator sets these up once, and times them together.
                self._answer(sorted(pairs, key=lambda pair: (pair[1].family == FREE, pair[0].key)))
            if None in jobs:
                return

    def _answer(self, pairs: list[tuple[Problem, Candidate]]) -> None:
        left = {(problem.key, config_name(candidate)): (problem, candidate) for problem, candidate in pairs}
        error: BaseException
        try:
            asked: Iterable[Any] = self._with_later(left) if self._evaluator.draws_while_busy else pairs
            for evaluation in self._evaluator.evaluate(asked):
                left.pop((evaluation.problem.key, config_name(evaluation.config)), None)
                self._tell(self._done, evaluation)
            error = DeviceError("the evaluator skipped a candidate", "one evaluation per candidate", "report this bug")
        except BaseException as raised:
            error = raised
        if isinstance(error, ToolchainMissing) and len(left) > 1:  # of one of them: the others may need less
            for pair in list(left.values()):
                self._answer([pair])
            return
        for name in sorted(left):
            self._tell(self._failed, name, error)

    def _with_later(self, left: dict[Pair, tuple[Problem, Candidate]]) -> Iterator[tuple[Problem, Candidate] | None]:
        """Yield the pairs of ``left``, then those that are asked for meanwhile, which join ``left``; None if none is.

        It ends when all are answered, or at a job of another kind, which must wait until then.
        """
        yield from list(left.values())
        while left and not self._put_off:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                yield None
                continue
            if isinstance(job, tuple):
                left[job[0].key, config_name(job[1])] = job
                yield job
            else:
                self._put_off.append(job)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the loop was closed by an interrupt: nobody waits any more

    def _done(self, evaluation: Evaluation) -> None:
        pair = (evaluation.problem.key, config_name(evaluation.config))
        try:
            if pair not in self._known:
                self._record(evaluation)
                self._known[pair] = evaluation
        except BaseException as error:
            self._failed(pair, error)
            return
        waiting = self._waiting.pop(pair, None)
        if waiting is not None:
            _set(waiting, evaluation)

    def _failed(self, pair: Pair, error: BaseException) -> None:
        waiting = self._waiting.pop(pair, None)
        if waiting is not None:
            _fail(waiting, error)


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
