"""Messages between the pool and its workers, and the contract of a transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Union

from outblas.core.config import Candidate, KernelKind
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu

Pair = tuple[Problem, Candidate]


class EvaluatorSpec(NamedTuple):
    """The evaluator of a worker, which the worker makes itself.

    Attributes:
        factory: function that returns it, as ``module:callable``.
    """

    factory: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class EvaluateTask:
    """A task: evaluate pairs of one problem, timed together.

    Attributes:
        pairs: (problem, candidate) pairs of one problem: configs of templates, or free kernels of one form.
        expected: problems that come next, at this worker or at another.
        proved: kernels, by :func:`outblas.core.config.kernel_kind`, that workers have proved in full since the
            worker's last task of this kind.
    """

    pairs: tuple[Pair, ...]
    expected: tuple[Problem, ...] = ()
    proved: tuple[KernelKind, ...] = ()


@dataclass(frozen=True)
class QuestionTask:
    """A task: call a method of :class:`outblas_lab.pool.worker_host.WorkerHost` and send its result."""

    method: str
    args: tuple[Any, ...] = ()


Task = Union[EvaluateTask, QuestionTask]


@dataclass(frozen=True)
class WorkerAbout:
    """The content of a worker's first message.

    Attributes:
        build: its build of OutBLAS; workers of one run must agree in it.
    """

    gpu: Gpu
    source: str
    place: str
    build: str


@dataclass(frozen=True)
class BaselineNotes:
    """The baselines of one problem.

    Attributes:
        times: name -> microseconds.
        details: name -> one line on it.
    """

    problem: Problem
    times: Mapping[str, float]
    details: Mapping[str, str]


#: Kinds of events, and their contents:
#:
#: - ``ready``: an :class:`About`;
#: - ``answer``: an answer to the current task; several may follow;
#: - ``end``: the task is over; process -> :class:`outblas.core.phase_times.PhaseTotals` of its seconds so far;
#: - ``error``: an exception of the evaluator; the task is over;
#: - ``lost``: one line; the process or its machine is gone.
EventKind = Literal["ready", "answer", "end", "error", "lost"]


class Event(NamedTuple):
    """A message of a worker, or the news that it was lost.

    Attributes:
        value: what belongs to the kind; None if nothing does.
    """

    worker: int
    kind: EventKind
    value: Any = None


class Transport(Protocol):
    """Send tasks to numbered workers and receive their messages; each worker's messages keep their order."""

    @property
    def size(self) -> int:
        """Return the number of workers; they are numbered 0 to ``size - 1``."""

    def start(self, worker: int) -> None:
        """Begin to start a worker, in the place of an earlier one; ``ready``, ``error`` or ``lost`` follows."""

    def send(self, worker: int, task: Task) -> None:
        """Give a task to a worker that has none. If it is gone, ``lost`` follows."""

    def wait(self, timeout_s: float) -> list[Event]:
        """Return some events, at most one per worker, as soon as there is one; later calls return the rest.

        An empty list means that nothing happened within ``timeout_s`` seconds. The loss of a worker is an event of kind
        ``lost``.
        """

    def stop(self, worker: int) -> None:
        """Kill a worker, even a busy one; :meth:`wait` returns no more of its events, nor its loss.

        A worker that does not run is no error.
        """

    def close(self) -> None:
        """End all workers: idle ones may end by themselves, busy ones are killed. A second call does nothing."""
