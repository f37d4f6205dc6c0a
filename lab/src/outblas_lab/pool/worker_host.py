"""The content of a worker process: its own evaluator, and the tasks that it receives."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluator import Evaluator
from outblas.core.phase_times import PhaseTimer
from outblas.core.problem import Problem
from outblas.core.version import __version__
from outblas.tune.judged_workers import DEFAULT_JUDGING, Judging
from outblas.workers.sandbox import make_from_name
from outblas_lab.pool.transport import (
    BaselineNotes,
    EvaluateTask,
    EvaluatorSpec,
    EventKind,
    QuestionTask,
    Task,
    WorkerAbout,
)

Message = tuple[EventKind, Any]


def make_live_evaluator(
    gpu_index: int, compile_ahead: bool, judging: Judging = DEFAULT_JUDGING, compilers: int | None = None
) -> Evaluator:
    """Return a live evaluator for a GPU of this machine.

    Args:
        compile_ahead: fill the compile cache with templates' kernels, see
            :class:`outblas.tune.live_evaluator.LiveEvaluator`.
        compilers: compilers of free kernels that run at once; None: one per usable core.
    """
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.jail.jailed_evaluator import FreeOptions

    return LiveEvaluator(
        gpu_index, judging.options(gpu_index), compile_ahead=compile_ahead, free=FreeOptions(compilers=compilers)
    )


def make_replay_evaluator(recording: str) -> Evaluator:
    """Return a replay evaluator for a recording, by name or path."""
    from outblas_lab.recordings.recording import Recording
    from outblas_lab.recordings.replay import ReplayEvaluator

    return ReplayEvaluator(Recording.load(recording))


class WorkerHost:
    """The evaluator of a worker, and the answers to its tasks; used by one process or one Ray actor.

    Call :meth:`hello` first. It makes the evaluator and returns ``("ready", WorkerAbout)``, or ``("error", ...)``. Then
    :meth:`messages` or :meth:`step` answers the tasks, one after the other.

    Args:
        spec: name of a factory and its arguments. The constructor does not call it; :meth:`hello` does.
    """

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._spec = spec
        self._made: Evaluator | None = None
        self._phase_timer = PhaseTimer("waiting")  # where the evaluator keeps none
        self._messages: Iterator[Message] = iter(())

    def hello(self) -> Message:
        """Make and start the evaluator; return the worker's first message.

        Returns:
            ``("ready", WorkerAbout)``, or ``("error", ...)`` if it cannot start.
        """
        try:
            self._made = make_from_name(*self._spec)
            if (start := getattr(self._made, "start", None)) is not None:
                start()
            from outblas.kernels.kernel_hash import kernels_sha

            gpu, source = self._evaluator.gpu, self._evaluator.source
            place = f"{socket.gethostname()}, process {os.getpid()}, {source}"
            return "ready", WorkerAbout(gpu, source, place, f"{__version__}, kernels {kernels_sha()[:12]}")
        except Exception as error:
            return "error", _as_ours(error)

    def step(self, task: Task | None) -> Message:
        """Return the next message on a task.

        Args:
            task: a new task, or None to go on with the one in hand.

        Raises:
            StopIteration: None after the end of the task, or before any task.
        """
        if task is not None:
            self._messages = self.messages(task)
        return next(self._messages)

    def messages(self, task: Task) -> Iterator[Message]:
        """Yield the messages on a task: its answers as they come, then its end with the worker's seconds by phase."""
        phase_timer: PhaseTimer = getattr(self._made, "phase_timer", self._phase_timer)
        try:
            with phase_timer.phase("task"):
                if isinstance(task, QuestionTask):
                    yield "answer", getattr(self, task.method)(*task.args)
                else:
                    yield from (("answer", value) for value in self._evaluated(task))
            accounts = getattr(self._made, "accounts", lambda: {"host": self._phase_timer.totals()})
            yield "end", accounts()
        except Exception as error:
            yield "error", _as_ours(error)

    def candidates(self, problems: tuple[Problem, ...]) -> list[list[KernelConfig]]:
        return [list(self._evaluator.candidates(problem)) for problem in problems]

    def baselines(self, problem: Problem) -> BaselineNotes:
        """Return the baselines of the problem's last rounds in this worker; measure now if it has none."""
        times = dict(self._evaluator.baselines(problem))
        return BaselineNotes(problem, times, {name: self._evaluator.baseline_detail(problem, name) for name in times})

    def provenance(self, command: str) -> dict[str, Any]:
        """Return :func:`outblas.records.provenance.collect_provenance` of the first GPU that this worker sees.

        All GPUs of a pool are of one kind. ``command`` becomes its entry ``command``.
        """
        from outblas.records.provenance import collect_provenance

        return collect_provenance(command)

    def close(self) -> None:
        """End the evaluator's own processes."""
        close = getattr(self._made, "close", None)
        if close is not None:
            close()

    @property
    def _evaluator(self) -> Evaluator:
        assert self._made is not None, "tasks follow a hello"
        return self._made

    def _evaluated(self, task: EvaluateTask) -> Iterator[Any]:
        self._evaluator.expect(task.expected)
        self._evaluator.trust(task.proved)
        known = False
        for evaluation in self._evaluator.evaluate(task.pairs):
            yield evaluation
            known = known or bool(evaluation.baselines_us)
        if known:  # timed with the candidates: what the driver may be asked for later, at no cost
            yield self.baselines(task.pairs[0][0])


def serve_connection(connection: Connection, spec: EvaluatorSpec) -> None:
    """Serve tasks from a pipe, one at a time, until the driver closes it. Runs in the worker process."""
    host = WorkerHost(spec)
    try:
        connection.send(host.hello())
        while True:
            for message in host.messages(connection.recv()):
                connection.send(message)
    except (EOFError, OSError):
        return  # the driver has closed the pipe, or is gone
    finally:
        host.close()


def _as_ours(error: Exception) -> OutblasError:
    """An error that crosses to the driver; anything but ours is a bug of the evaluator."""
    if isinstance(error, OutblasError):
        return error
    return DeviceError(
        f"the evaluator failed: {type(error).__name__}: {error}", "an evaluator without errors", "report this bug"
    )
