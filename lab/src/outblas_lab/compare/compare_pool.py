"""Processes that work off the units of a comparison and send what they finish."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from outblas.core.child_process import ChildProcess
from outblas.core.errors import DeviceError, OutblasError
from outblas_lab.compare.held_out import CompareUnit, Plan, run_unit
from outblas_lab.recordings.recording import Recording

#: Seconds without an answer after which a watcher hears of it.
HEARTBEAT_S = 30.0


class Watch(NamedTuple):
    """Callbacks on units at work.

    Attributes:
        begun: called with a unit when a process begins it.
        waiting: called after each 30 s (:data:`HEARTBEAT_S`) without an answer. It gets the list of units at work and
            the seconds since the start.
    """

    begun: Callable[[CompareUnit], None]
    waiting: Callable[[Sequence[CompareUnit], float], None]


def run_units(
    units: Sequence[CompareUnit], plan: Plan, jobs: int, watch: Watch | None = None
) -> Iterator[dict[str, Any]]:
    """Yield entries of :func:`outblas_lab.compare.held_out.run_unit` as they finish, in any order of units.

    A generator: it starts processes at the first ``next``, and ends them when it is closed. The answers do not depend
    on ``jobs``: packages that use threads of their own get one.

    Args:
        units: the work.
        plan: the recording and what is held out.
        jobs: processes, one unit each at a time; at most one a unit is started.
        watch: hears of begun units and of silence; None: nobody does.

    Raises:
        OutblasError: as a unit raised it.
        RuntimeError: a unit failed otherwise; its traceback is on stderr.
        DeviceError: a process died.
    """
    waiting, workers = deque(units), dict[Connection, ChildProcess]()
    at_work: dict[Connection, CompareUnit] = {}
    begin = time.monotonic()

    def send(connection: Connection) -> None:
        at_work[connection] = unit = waiting.popleft()
        connection.send(unit)
        if watch is not None:
            watch.begun(unit)

    try:
        for _ in range(min(jobs, len(waiting))):
            child = ChildProcess(_work, (plan,))
            workers[child.connection] = child
            send(child.connection)
        while workers:
            ready = wait(list(workers), HEARTBEAT_S)
            if not ready and watch is not None:
                watch.waiting(list(at_work.values()), time.monotonic() - begin)
            for connection in ready:
                assert isinstance(connection, Connection)
                message = _receive(connection, workers[connection], at_work[connection])
                if message is not None:
                    yield message
                elif waiting:
                    send(connection)
                else:
                    at_work.pop(connection)
                    workers.pop(connection).end(kill=False)
    finally:
        for child in workers.values():
            child.end(kill=True)


def _receive(connection: Connection, child: ChildProcess, unit: CompareUnit) -> dict[str, Any] | None:
    """An entry, or None at a unit's end; what the unit raised is raised."""
    try:
        message = connection.recv()
    except (EOFError, OSError):
        raise DeviceError(
            f"a process of the comparison died with exit code {child.exit_code()}, at agent {unit.agent}",
            "enough memory for every job, and an agent that does not end its process",
            "run the same command again with fewer --jobs: it resumes",
        ) from None
    if isinstance(message, BaseException):
        raise message
    assert message is None or isinstance(message, dict)
    return message


def _work(connection: Connection, plan: Plan) -> None:
    """A process's life."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported
    recording = other = None
    with contextlib.suppress(EOFError, OSError):  # the parent has nothing more, or is gone
        while True:
            unit: CompareUnit = connection.recv()
            try:
                recording = recording or Recording.load(plan.recording)
                other = other or (None if plan.across is None else Recording.load(plan.across))
                for entry in run_unit(unit, plan, recording, other):
                    connection.send(entry)
                connection.send(None)
            except OutblasError as error:
                connection.send(error)
                return
            except (EOFError, BrokenPipeError):
                return
            except Exception as error:
                traceback.print_exc()
                connection.send(RuntimeError(f"agent {unit.agent} failed: {type(error).__name__}: {error}"))
                return
