"""Learn the products of a program beside its own work, on one thread and one stream.

A product of no library is *seen* until its third call; then it is *queued*, *proving*, *timing* and *settled*. torch
computes its first two calls. While it is learned, it runs as without learning, and its decision is cached: its calls
cost what they always cost. The thread works in slices and pauses after each, so that slices take 1% of the time.

A thread was chosen over work inside calls. A call that the native table answers runs no Python, so it could do none.
No call waits for the thread. It holds a lock only for a few lines of Python.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from time import thread_time

from outblas.adapt.learning.learn_product import Finalist, learn_product, row_of
from outblas.adapt.learning.learned_products import IN_WORK, LearnedProduct, LearningReport, Stage
from outblas.adapt.learning.learning_device import LearningDevice, SliceTimer
from outblas.adapt.learning.slice_limits import (
    HOST_SHARE,
    MAX_PRODUCT_SECONDS,
    RUNNING,
    SEARCH_SHARE,
    SETTLING,
    SETTLING_IN_GRAPHS,
    GpuBudget,
    pause_after,
)
from outblas.core.config import Launch
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.decide import Choose, LeftToTorch, NotWhileCapturing
from outblas.judge.faults import first_line
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow
from outblas.runtime.recent_entries import keep, touch

_LOG = logging.getLogger(__name__)
#: Calls after which a product is queued: one that is called once or twice is not worth the GPU's time.
CALLS_BEFORE_QUEUED = 3
#: Products that are kept, and products that were called too seldom so far.
MAX_PRODUCTS, MAX_SEEN = 1024, 4096

#: (CUDA index, problem, launch option).
_Key = tuple[int, Problem, Launch]


class Learner:
    """Learns products and remembers the results.

    Args:
        make_machine: makes the machine of (CUDA index, the device's own chooser, GPU).
        capturing: returns True if the calling thread captures a CUDA graph.
        clock: returns the seconds that this thread took of a processor. A wait for the interpreter costs the program
            nothing.
    """

    def __init__(
        self, budget: GpuBudget, make_machine: Callable[[int, Choose | None, Gpu], LearningDevice] = LearningDevice,
        capturing: Callable[[], bool] | None = None, clock: Callable[[], float] = thread_time,
    ) -> None:  # fmt: skip
        self.budget, self._clock = budget, clock
        self._make_machine = make_machine
        self._capturing = capturing or _is_capturing
        self._machines: dict[int, LearningDevice] = {}
        self._seen: OrderedDict[_Key, int] = OrderedDict()
        self._products: dict[_Key, LearnedProduct] = {}
        self._queue: deque[LearnedProduct] = deque()
        self._choosers: dict[int, Choose | None] = {}
        self._to_warm: deque[LearningDevice] = deque()
        self._job: tuple[LearnedProduct, Generator[None, None, None]] | None = None
        self._lock = threading.RLock()  # a signal's handler may multiply meanwhile
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._limits = self._job_limits = RUNNING
        self._stopped = False
        self._pid = os.getpid()

    def chooser(self, index: int, own: Choose | None) -> LearningChooser:
        """Return the chooser of a CUDA device that asks this learner, and its own chooser for the rest."""
        self._choosers[index] = own
        return LearningChooser(self, index, own)

    def warm_up(self, index: int, gpu: Gpu) -> None:
        """Load what every product's slices run, on the learning thread; wait for its end.

        Without it the first product's slices load it, beside the program. A failure only costs that.
        Nothing is done for a device that never asked for its chooser: the program has given its library.
        """
        if index not in self._choosers:
            return
        with self._changed:
            self._to_warm.append(self._machine(index, self._choosers[index], gpu))
            self._wake()
            while self._to_warm and self._is_alive():
                self._changed.wait(0.1)

    def row_for(
        self, index: int, own: Choose | None, problem: Problem, gpu: Gpu, launch: Launch
    ) -> LibraryRow | LibraryChoice | AnswerChoice | None:
        """Answer one call of a product that no library lists.

        Returns:
            A row if one was learned; else the answer of the device's own chooser.

        Raises:
            LeftToTorch: torch computes the first calls of a product.
            NotWhileCapturing: a CUDA graph is captured.
        """
        key: _Key = (index, problem, "plain" if launch == "plain" else "pdl")
        record = self._products.get(key)
        if record is None and self._accepts():
            if self._capturing():
                raise NotWhileCapturing("OutBLAS does not learn during CUDA graph capture")
            record = self._notice(key, own, gpu)
        if record is not None and record.stage is Stage.SEEN:
            raise LeftToTorch("too few calls so far to learn it", provisional=True)
        if record is not None and record.row is not None:
            return record.row
        return None if own is None else own(problem, gpu, launch)

    def report(self) -> LearningReport:
        """Return copies of all products and the GPU time spent."""
        with self._lock:
            copies = tuple(replace(one, refused=dict(one.refused)) for one in self._products.values())
        return LearningReport(copies, self.budget.used, self.budget.seconds)

    def rows(self, index: int) -> list[LibraryRow]:
        with self._lock:
            return [one.row for one in self._products.values() if one.index == index and one.row is not None]

    @property
    def _is_settling(self) -> bool:
        return self._limits is not RUNNING

    def settle(self, seconds: float | None = None, graphs: bool = False) -> LearningReport:
        """Learn all that was seen at once, without pauses; wait for the end.

        Args:
            seconds: GPU seconds that it may take; None: the rest of the budget.
            graphs: time in CUDA graphs. No other thread may wait for the device meanwhile.

        Raises:
            UsageError: ``seconds`` is negative or no number, or this thread captures a CUDA graph.
        """
        if self._capturing():
            wrong = "settle() was called during CUDA graph capture"
            raise UsageError(wrong, "a call outside the capture", "call settle() before the capture")
        with self._changed:
            if seconds is not None:
                self.budget.allow(seconds)
            self._limits = SETTLING_IN_GRAPHS if graphs else SETTLING
            self._queue_all()
            self._wake()
            try:
                while self._is_busy() and self._is_alive():
                    self._changed.wait(0.1)
            finally:
                self._limits = RUNNING
        return self.report()

    def stop(self) -> None:
        """End the thread after its present slice. Settled products stay. Do nothing in a forked child."""
        if os.getpid() != self._pid:
            return  # it has no such thread, and the lock may be held by one that only the parent has
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def advance(self) -> float | None:
        """Do one slice of work.

        Returns:
            Seconds to pause after it; None if there is nothing to do.
        """
        if self._to_warm:
            self._warm_one()
            return 0.0
        if self._job is not None and not self._is_settling and self._job_limits is not RUNNING:
            self._abandon(*self._job, "settle() was interrupted")  # its slices are too long beside the program
        if self._job is None and not self._begin_job():
            return None
        assert self._job is not None
        record, steps = self._job
        machine, timer, begin = self._machines[record.index], SliceTimer(), self._clock()
        searching = record.stage is Stage.QUEUED  # before its proof only the host works
        try:
            with machine.slice(timed=not searching) as timer:
                has_ended = next(steps, True)
            self._job = None if has_ended else self._job
        except Exception as error:  # whatever it is, the program goes on as without learning
            steps.close()
            self._end(record, f"{type(error).__name__}: {first_line(error)}")
            _LOG.warning("%s is not learned: %s", record.problem.key, error)
        finally:
            record.gpu_seconds += 1e-6 * timer.us
            record.proof_seconds += 1e-6 * timer.us * (record.stage is Stage.PROVING)
            self.budget.charge(timer.us)
        if self._job is not None and (self.budget.is_used_up or record.gpu_seconds >= MAX_PRODUCT_SECONDS):
            self._abandon(record, steps)
        host_us, share = 1e6 * (self._clock() - begin), SEARCH_SHARE if searching else HOST_SHARE
        return 0.0 if self._is_settling else pause_after(timer.us, host_us, share)

    def _notice(self, key: _Key, own: Choose | None, gpu: Gpu) -> LearnedProduct | None:
        """Count a call of a product; return its record, None if it can never be learned."""
        with self._changed:
            if key in self._products:  # by another thread, meanwhile
                return self._products[key]
            if self._machine(key[0], own, gpu).why_not(key[1]):
                return None
            calls = self._seen.get(key, 0) + 1
            keep(self._seen, key, calls, MAX_SEEN)
            touch(self._seen, key)
            record = LearnedProduct(key[1], key[2], key[0])
            if calls >= CALLS_BEFORE_QUEUED:
                self._admit(key, record)
            return record

    def _machine(self, index: int, own: Choose | None, gpu: Gpu) -> LearningDevice:
        if index not in self._machines:
            self._machines[index] = self._make_machine(index, own, gpu)
        return self._machines[index]

    def _accepts(self) -> bool:
        """Return True if another product may be learned, in the process in which this learner was made."""
        full = len(self._products) >= MAX_PRODUCTS or self.budget.is_used_up
        return not (self._stopped or full or os.getpid() != self._pid)

    def _admit(self, key: _Key, record: LearnedProduct) -> None:
        """Queue a product, or let it wait for ``settle()``. The caller holds the lock."""
        self._seen.pop(key, None)
        self._products[key] = record
        if self._machines[record.index].fits_slice(record.problem):
            self._put(record)
        else:
            record.stage = Stage.WAITING

    def _put(self, record: LearnedProduct) -> None:
        record.stage = Stage.QUEUED
        self._queue.append(record)
        self._wake()

    def _queue_all(self) -> None:
        """Queue whatever was seen, waits or was left alone. The caller holds the lock."""
        for key in list(self._seen):
            if len(self._products) < MAX_PRODUCTS:
                self._admit(key, LearnedProduct(key[1], key[2], key[0]))
        for record in self._products.values():
            if record.stage in (Stage.WAITING, Stage.LEFT_ALONE):
                self._put(record)

    def _wake(self) -> None:
        """Start the thread if need be, and end its pause. The caller holds the lock."""
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="outblas-learning", daemon=True)
            self._thread.start()
            atexit.register(self.stop)  # a thread in a call of CUDA must not outlive the interpreter
        self._changed.notify_all()

    def _is_busy(self) -> bool:
        return bool(self._queue or self._to_warm) or self._job is not None

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            pause = self.advance()
            with self._changed:
                if pause is None:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or self._is_busy())
                else:
                    self._changed.wait_for(lambda: self._stopped or self._is_settling, pause)
        if self._job is not None:
            self._abandon(*self._job)

    def _warm_one(self) -> None:
        machine = self._to_warm[0]
        try:
            with machine.slice(timed=False):
                machine.warm()
        except Exception as error:  # whatever it is, the first product meets it again and says so
            _LOG.debug("the GPU warm-up for learning failed: %s", error)
        with self._changed:
            self._to_warm.popleft()
            self._changed.notify_all()

    def _begin_job(self) -> bool:
        """Take the next product from the queue; return False if it is empty."""
        with self._lock:
            while self._job is None and self._queue:
                record = self._queue.popleft()
                if self._is_settling or self._machines[record.index].fits_slice(record.problem):
                    self._job, self._job_limits = (record, self._steps(record)), self._limits
                else:  # a settle() that queued it was interrupted
                    record.stage = Stage.WAITING
        return self._job is not None

    def _steps(self, record: LearnedProduct) -> Generator[None, None, None]:
        """Learn one product; yield after each slice."""
        machine = self._machines[record.index]
        opened = yield from machine.open(record.problem, record.launch, self._job_limits)
        if opened is None:
            self._leave_alone(record, "no candidate is available without compiling; tune it with outblas tune")
            return
        try:
            record.stage = Stage.PROVING
            yield
            outcome = yield from learn_product(opened.bench, opened.contenders, record, opened.effort)
        finally:
            opened.bench.close()
        if outcome.winner is not None:
            self._install(record, outcome.winner)
        else:
            # Settle a product without a winner: it goes on as before, unless that is wrong or slower than torch.
            best = "" if outcome.nearest is None else f", the nearest is {outcome.nearest}"
            detail = f"none of {record.contenders} is surely faster than torch{best}"
            before = opened.unmeasured
            if before is None:
                self._settled(record, detail, row_of(record, None))
            elif before not in opened.contenders or before in outcome.not_slower:
                self._settled(record, f"{detail}; {before.name} stays", None)
            else:
                self._settled(record, f"{detail}; torch replaces {before.name}", row_of(record, None))
                self._machines[record.index].forget_decisions()

    def _install(self, record: LearnedProduct, winner: Finalist) -> None:
        """Settle a product with a winner, which is saved and served from now on."""
        machine, row, detail = self._machines[record.index], row_of(record, winner), str(winner)
        try:
            detail += f", {machine.save(row)}"
        except RecordError as error:
            detail += f", not saved: {first_line(error)}"
            _LOG.warning("%s was learned but not saved: %s", record.problem.key, error)
        self._settled(record, detail, row)
        machine.forget_decisions()

    def _settled(self, record: LearnedProduct, detail: str, row: LibraryRow | None) -> None:
        with self._lock:
            record.row, record.detail, record.stage = row, detail, Stage.SETTLED
        _LOG.info("%s: %s", record.problem.key, detail)

    def _leave_alone(self, record: LearnedProduct, reason: str) -> None:
        """Give a product up; it goes on as without learning."""
        with self._lock:
            record.stage, record.detail = Stage.LEFT_ALONE, reason
        _LOG.info("%s is not learned: %s", record.problem.key, reason)

    def _abandon(self, record: LearnedProduct, steps: Generator[None, None, None], reason: str = "") -> None:
        """End a product, by default as its time is up, and with the budget all others that are in work."""
        with suppress(OutblasError, RuntimeError), self._machines[record.index].slice():
            steps.close()
        if self._stopped:
            reason = "learning was switched off"
        elif self.budget.is_used_up:
            reason = f"the budget of {self.budget.seconds:g} GPU seconds is used up"
        else:
            spent = f"{record.proof_seconds:.2f} of them for proofs"
            reason = reason or f"it used more than {MAX_PRODUCT_SECONDS} GPU seconds, {spent}"
        self._end(record, reason)
        if self.budget.is_used_up:
            with self._lock:
                left = list(self._queue)
                self._queue.clear()
            for one in left:
                self._leave_alone(one, reason)

    def _end(self, record: LearnedProduct, reason: str) -> None:
        self._job = None
        if record.stage in IN_WORK:
            self._leave_alone(record, reason)


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


class LearningChooser:
    """The chooser of a CUDA device while learning is on; see :meth:`outblas.adapt.learning.learner.Learner.row_for`.

    Args:
        own: the device's own chooser; None: it has none.
    """

    def __init__(self, learner: Learner, index: int, own: Choose | None) -> None:
        self._learner, self._index, self._own = learner, index, own

    def __call__(self, problem: Problem, gpu: Gpu, launch: Launch) -> LibraryRow | LibraryChoice | AnswerChoice | None:
        return self._learner.row_for(self._index, self._own, problem, gpu, launch)

    @property
    def rows_id(self) -> str:
        """Return a text that changes with the rows that were learned."""
        return repr(self._learner.rows(self._index))
