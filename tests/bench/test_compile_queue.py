"""Kernels compiled ahead on a thread of the driver: the thread ends on request."""

from __future__ import annotations

from typing import Any

from outblas.core.problem import Problem
from outblas_lab.pool.units import CompileQueue, WorkUnit


def test_the_end_may_come_while_units_are_gathered() -> None:
    """With nothing to compile, as for kernels that were compiled before: nothing is said meanwhile."""
    compiling = CompileQueue(lambda pairs: iter(()))
    todo: Any = compiling._todo

    class ClosedMeanwhile:
        put, get = todo.put, todo.get

        def empty(self) -> bool:
            compiling._stop.set()
            todo.put(None)
            return bool(todo.empty())

    compiling._todo = ClosedMeanwhile()  # type: ignore[assignment]
    compiling.put(WorkUnit(Problem(64, 64, 64), []))
    compiling._thread.join(20.0)
    assert not compiling._thread.is_alive()
    compiling.close()
