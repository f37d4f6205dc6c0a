"""An evaluator over several workers. Each pair is answered once, in the order in which the workers finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outblas.core.config import KernelConfig, KernelKind, kernel_kind
from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.phase_times import PhaseTimer, PhaseTotals, sum_totals
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.workers.sandbox import START_TIMEOUT_S
from outblas_lab.pool.transport import BaselineNotes, EvaluateTask, Event, Pair, QuestionTask, Transport, WorkerAbout
from outblas_lab.pool.units import Compile, CompileQueue, WorkUnit, WorkUnits

#: Workers that one unit may cost before its candidates are given up.
MAX_WORKERS_PER_UNIT = 3
#: Workers lost one after another, with no unit finished in between, before their place is given up.
MAX_LOSSES_IN_A_ROW = MAX_WORKERS_PER_UNIT + 1
#: Seconds without a message after which a worker counts as hung: its machine or its process is stuck.
#: The sandbox notices a candidate that hangs much earlier.
MAX_SILENCE_S = 900.0
_LOOK_S, _SOON_S = 1.0, 0.01
#: Problems per request for candidates.
_LISTED = 8


@dataclass
class WorkerSlot:
    """A place for a worker; if its worker is lost, a new one takes the place.

    Attributes:
        state: ``stopped``, ``starting``, ``idle``, ``busy``, or ``gone``: given up.
        since: time of its last message, or of its task, in seconds of ``time.monotonic``.
        kernels: template kernels that its worker was given.
    """

    state: str = "stopped"
    unit: WorkUnit | None = None
    since: float = 0.0
    losses: int = 0
    expected: int = 0
    proved: int = 0
    kernels: set[KernelKind] = field(default_factory=set)

    def is_overdue(self, now: float, limits: Mapping[str, float]) -> bool:
        """Return True if the worker's next message is overdue.

        Args:
            now: time, in seconds of ``time.monotonic``.
            limits: state -> seconds of silence. A unit of free kernels may be silent for longer. Other states may be
                silent for ever.
        """
        more = 0.0 if self.unit is None else self.unit.silence_s
        return self.state in limits and now - self.since > limits[self.state] + more


class PoolEvaluator(Evaluator):
    """Evaluate on all workers of a transport (the contract of outblas.core.evaluator), one call at a time.

    Consecutive pairs of one problem form a unit, which one worker times together. A worker is lost if its process died,
    its machine is gone, or it was silent for ``quiet_s`` seconds. It is replaced, and the unanswered pairs of its unit
    go to another worker. If a unit has cost ``MAX_WORKERS_PER_UNIT`` workers, its pairs get the sandbox's status:
    EXITED or HANG. A place that lost ``MAX_LOSSES_IN_A_ROW`` workers in a row, or whose evaluator raises DeviceError,
    is given up. The other places continue.

    Free kernels are shared out in batches of the jail. Workers do not tell each other of their proofs.

    Args:
        transport: carries tasks; the pool starts and closes it. Use the pool as a context manager.
        compiler: for a GPU, makes the queue that fills the workers' shared compile cache (see :class:`CompileQueue`).
            None: workers compile for themselves.
        quiet_s: seconds without a message after which a busy worker is lost.
    """

    #: ``evaluate`` draws further pairs while workers are busy, and takes None for "not known yet".
    draws_while_busy = True

    def __init__(
        self, transport: Transport, compiler: Callable[[Gpu], Compile] | None = None,
        quiet_s: float = MAX_SILENCE_S, start_s: float = START_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._transport, self._quiet_s, self._start_s = transport, quiet_s, start_s
        self._compiler = compiler
        self._compile: Compile | None = None
        self._slots = [WorkerSlot() for _ in range(transport.size)]
        self._about: dict[int, WorkerAbout] = {}
        self._expected: list[Problem] = []
        self._proved: dict[KernelKind, None] = {}
        self._homes: dict[Problem, int] = {}
        self._notes: dict[Problem, BaselineNotes] = {}
        self._reasons: list[str] = []
        self._phase_timer = PhaseTimer("other")
        self._accounts: list[list[dict[str, PhaseTotals]]] = [[] for _ in self._slots]  # of the workers of every place
        self._starting, self._closed = threading.Lock(), False
        #: Workers lost so far.
        self.lost = 0

    def __enter__(self) -> PoolEvaluator:
        try:
            self._open()
        except BaseException:
            self._transport.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers. A second call does nothing. Another thread's :meth:`evaluate` then raises UsageError."""
        with self._starting:
            self._closed = True
            self._transport.close()

    @property
    def gpu(self) -> Gpu:
        return self._about[0].gpu

    @property
    def source(self) -> str:
        """Return ``replay:NAME``, or ``cuda`` for GPUs; the indices are left out, so a run may resume on other GPUs."""
        source = self._about[0].source
        return "cuda" if source.startswith("cuda") else source

    @property
    def workers(self) -> list[str]:
        """Return one line per worker: its host, process and device."""
        return [self._about[index].place for index in sorted(self._about)]

    def accounts(self) -> dict[str, PhaseTotals]:
        """Return the seconds spent so far, per process and phase.

        ``driver`` is this process: ``agent`` is the agent's thinking, ``waiting`` is waiting for workers, and ``other``
        is the caller and the store. ``worker 0: gpu``, ``worker 0: host`` and so on are sums over all workers of one
        place, as of their last task (:meth:`outblas.tune.live_evaluator.LiveEvaluator.accounts`).
        """
        found = {"driver": self._phase_timer.totals() + PhaseTotals({}, {"workers lost": self.lost})}
        for index, lives in enumerate(self._accounts):
            for process in dict.fromkeys(name for life in lives for name in life):
                found[f"worker {index}: {process}"] = sum_totals(life[process] for life in lives if process in life)
        return found

    def trust(self, kinds: Iterable[KernelKind]) -> None:
        self._proved.update(dict.fromkeys(kinds))

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return the configs that the workers' evaluators offer for a problem.

        Raises:
            DeviceError: no worker is left.
            UsageError: the problem was not recorded.
        """
        return self.candidates_of([problem])[problem]

    def candidates_of(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[KernelConfig]]:
        """Return problem -> its :meth:`candidates`, in the order of ``problems``; the workers share the listing.

        Raises:
            DeviceError: no worker is left.
            UsageError: the workers replay a recording that lacks a problem.
        """
        parts = [tuple(problems[first : first + _LISTED]) for first in range(0, len(problems), _LISTED)]
        found = self._ask("candidates", parts)
        return {
            p: configs for part, lists in zip(parts, found, strict=True) for p, configs in zip(part, lists, strict=True)
        }

    def expect(self, problems: Iterable[Problem]) -> None:
        """Announce problems that come next; each worker receives them with its next unit.

        A further call adds to the problems of earlier ones. Nothing is sent at once.
        """
        self._expected += problems

    def evaluate(self, pairs: Iterable[Pair | None]) -> Generator[Evaluation, None, None]:
        """Yield one evaluation per pair as they finish. Closing the iterator early kills the busy workers.

        Args:
            pairs: (problem, candidate) pairs. None in place of a pair says that the next one is not known yet; it is
                asked for again soon.

        Raises:
            DeviceError: no worker is left; earlier results stay valid. Other errors of an evaluator are raised, too.
        """
        compiling = None if self._compile is None else CompileQueue(self._compile)
        units = WorkUnits(pairs, compiling, self._homes, len(self._slots))
        try:
            more = True
            self._start_stopped()
            while more or units.pending or any(slot.unit is not None for slot in self._slots):
                self._hand_out(units)
                # The agent may think for long before it yields a pair, so never draw while a message waits.
                soon = units.dry or units.compiling
                events = self._heard(0.0 if more and not units.dry else _SOON_S if soon else _LOOK_S)
                for event in events:
                    yield from self._done(event, units)
                if more and not events:
                    with self._phase_timer.phase("agent"):
                        more = units.draw()
        finally:
            self._abandon()
            if compiling is not None:
                compiling.close()

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        """Return baseline name -> microseconds from the problem's last rounds; measure now if it has none."""
        return self._notes_of(problem).times

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return self._notes_of(problem).details.get(name, "")

    def provenance(self, command: str) -> dict[str, Any]:
        """Return the provenance of one worker's machine; the key ``workers`` has one line per worker."""
        return {**self._ask("provenance", [command])[0], "workers": self.workers}

    def _open(self) -> None:
        """Start all workers; none may fail, and all must be of one kind."""
        self._start_stopped()
        while any(slot.state == "starting" for slot in self._slots):
            for event in self._transport.wait(_LOOK_S):
                if event.kind != "ready":
                    raise event.value if event.kind == "error" else _cannot_start(event.worker, event.value)
                self._ready(event)
            for index in self._silent():
                raise _cannot_start(index, f"it did not start within {self._start_s:g} s")
        if self._compiler is not None:
            self._compile = self._compiler(self.gpu)

    def _start_stopped(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot.state == "stopped":
                self._start(index)

    def _start(self, index: int) -> None:
        slot = self._slots[index]
        slot.state, slot.since, slot.expected, slot.proved = "starting", time.monotonic(), 0, 0
        slot.kernels.clear()
        self._accounts[index].append({})
        with self._starting:  # a worker that starts after close() would never end
            self._check_open()
            self._transport.start(index)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the pool is closed", "an open pool", "open a new pool")

    def _ready(self, event: Event) -> None:
        about: WorkerAbout = event.value
        for other in self._about.values():
            if (other.gpu, other.build) != (about.gpu, about.build):
                raise UsageError(
                    f"the workers differ: {other.gpu.name} with OutBLAS {other.build} at {other.place}, "
                    f"{about.gpu.name} with OutBLAS {about.build} at {about.place}",
                    "the same GPU model and the same OutBLAS everywhere, so that figures are comparable",
                    "use GPUs of one model, and install the same OutBLAS on every host",
                )
        self._about[event.worker] = about
        self._slots[event.worker].state = "idle"

    def _hand_out(self, units: WorkUnits) -> None:
        for index, slot in enumerate(self._slots):
            if slot.state == "idle":
                others = [i for i, p in enumerate(self._slots) if i != index and p.state != "gone"]
                elsewhere = set().union(*(self._slots[i].kernels for i in others)) - slot.kernels
                unit = units.take(index, others, elsewhere)
                if unit is not None:
                    slot.kernels |= unit.kinds
                    new, slot.expected = self._expected[slot.expected :], len(self._expected)
                    proved, slot.proved = [*self._proved][slot.proved :], len(self._proved)
                    self._send(index, EvaluateTask(tuple(unit.pairs), tuple(new), tuple(proved)), unit)

    def _send(self, index: int, task: EvaluateTask | QuestionTask, unit: WorkUnit | None = None) -> None:
        slot = self._slots[index]
        slot.state, slot.unit, slot.since = "busy", unit, time.monotonic()
        self._phase_timer.count("questions" if unit is None else "units")
        self._transport.send(index, task)

    def _heard(self, timeout_s: float) -> list[Event]:
        """Return the workers' events of the next ``timeout_s`` seconds; a hang counts as an event.

        Raises:
            DeviceError: no worker is left.
            UsageError: the pool was closed.
        """
        self._check_open()
        if all(slot.state == "gone" for slot in self._slots):
            raise DeviceError(
                f"no worker is left ({'; '.join(self._reasons[-len(self._slots) :])})",
                "at least one responding worker",
                "recorded results are kept: fix the workers and rerun the command; it resumes",
            )
        with self._phase_timer.phase("waiting"):
            events = self._transport.wait(timeout_s)
        for event in events:
            self._slots[event.worker].since = time.monotonic()
        for index in self._silent():
            self._transport.stop(index)
            events.append(_hang(index))
        return events

    def _silent(self) -> list[int]:
        """Return the workers whose next message is overdue."""
        limits, now = {"starting": self._start_s, "busy": self._quiet_s}, time.monotonic()
        return [index for index, slot in enumerate(self._slots) if slot.is_overdue(now, limits)]

    def _done(self, event: Event, units: WorkUnits) -> Iterator[Evaluation]:
        """Take up what a worker said of its unit."""
        slot = self._slots[event.worker]
        unit = slot.unit
        if event.kind == "answer" and isinstance(event.value, BaselineNotes):
            if unit is None or unit.form != "host":  # which could falsify the baselines
                self._notes[event.value.problem] = event.value
            self._notes.setdefault(event.value.problem, event.value)
        elif event.kind == "answer" and unit is not None:
            pair = event.value.problem, event.value.config
            unit.pairs.remove(pair)
            if event.value.status is Status.PASSED and isinstance(pair[1], KernelConfig):
                self._proved[kernel_kind(*pair)] = None  # workers prove in full: what passed once did so too
            yield event.value
        self._settle(event)
        if unit is None or slot.unit is not None or not unit.pairs:
            return
        if event.kind != "error":  # an evaluator that raises is no fault of its candidates
            unit.lost_by.append(event.worker)
        if len(unit.lost_by) < MAX_WORKERS_PER_UNIT:
            units.put_back(unit)
            return
        status = Status.HANG if event == _hang(event.worker) else Status.EXITED
        detail = f"{len(unit.lost_by)} workers were lost while running it, the last one: {self._reasons[-1]}"
        for problem, config in unit.pairs:
            yield Evaluation(problem, config, status, detail, Verdict(status, (), detail))

    def _settle(self, event: Event) -> None:
        """Update the state of a worker's place by an event; its unit becomes None when the place is free."""
        slot = self._slots[event.worker]
        if event.kind == "ready":
            self._ready(event)
        elif event.kind == "end":
            if slot.unit is not None and slot.unit.pairs:
                self._reasons.append(f"worker {event.worker}: it did not evaluate all candidates")
            slot.state, slot.unit, slot.losses = "idle", None, 0
            self._accounts[event.worker][-1] = event.value or {}
        elif event.kind == "error":
            slot.state, slot.unit = "idle", None
            if not isinstance(event.value, DeviceError):
                raise event.value
            self._reasons.append(f"worker {event.worker}: {event.value}")
            self._transport.stop(event.worker)
            slot.state = "gone"
        elif event.kind == "lost":
            self._reasons.append(f"worker {event.worker}: {event.value}")
            self.lost += 1
            slot.losses += 1
            slot.state, slot.unit = "gone", None
            if slot.losses < MAX_LOSSES_IN_A_ROW:
                self._start(event.worker)

    def _abandon(self) -> None:
        """Kill the busy workers; the next call that needs their places starts new ones."""
        for index, slot in enumerate(self._slots):
            if slot.state == "busy":
                self._transport.stop(index)
                slot.state, slot.unit = "stopped", None

    def _ask(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Return the answer to each argument, from any worker; if a worker is lost, another gets its argument."""
        answers, todo = [None] * len(arguments), list(reversed(range(len(arguments))))
        asked: dict[int, int] = {}  # worker -> which argument it has
        try:
            self._start_stopped()
            while todo or asked:
                for worker, slot in enumerate(self._slots):
                    if todo and slot.state == "idle":
                        asked[worker] = todo.pop()
                        self._send(worker, QuestionTask(method, (arguments[asked[worker]],)))
                for event in self._heard(_LOOK_S):
                    if event.kind == "answer" and event.worker in asked:
                        answers[asked[event.worker]] = event.value
                    self._settle(event)
                    if event.kind == "end":
                        asked.pop(event.worker, None)
                    elif event.kind in ("lost", "error") and event.worker in asked:
                        todo.append(asked.pop(event.worker))
            return answers
        finally:
            self._abandon()

    def _notes_of(self, problem: Problem) -> BaselineNotes:
        if problem not in self._notes:
            (self._notes[problem],) = self._ask("baselines", [problem])
        return self._notes[problem]


def _hang(index: int) -> Event:
    return Event(index, "lost", "it stopped responding")


def _cannot_start(index: int, why: str) -> DeviceError:
    return DeviceError(
        f"worker {index} cannot start: {why}", "a worker process with a free GPU", "run outblas doctor on its host"
    )
