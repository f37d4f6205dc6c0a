"""Rows of a benchmark measured in a jailed worker process, because the kernels of others run in it.

The module is also the sandbox's codec: the worker's rows come back as JSON and are never unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rivals.cuda_l2_kernels import CudaL2Kernel

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.runtime.cubin import Cubin
from outblas.workers.sandbox import Emit, HostLimits, Sandbox, WorkerLoss
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.confinement import Jail

CUDA_L2 = "cuda_l2"
#: Seconds that a row may take, and that a worker may take to start.
_ROW_S, _START_S = 900.0, 900.0
#: If this many rows are lost at the beginning, the cause is no single kernel.
_LOST_AT_FIRST = 3
#: Host memory of a worker, bytes, and its seconds of processor time.
_MEMORY_BYTES, _CPU_SECONDS = 64 << 30, 4 * 3600


@dataclass(frozen=True)
class RowRequest:
    """A row that a worker measures.

    Attributes:
        ours: our candidates with their machine code, if the row has any.
        theirs: CUDA-L2's kernel with its machine code; None: it takes no part.
        refused: name -> reason of the kernels that take no part.
    """

    problem: Problem
    ours: Sequence[tuple[KernelConfig, Cubin]] = ()
    theirs: tuple[CudaL2Kernel, BuiltKernel] | None = None
    refused: dict[str, str] = field(default_factory=dict)


class RowMaker(Protocol):
    """The measuring part of a worker."""

    def warm(self) -> None:
        """Start all libraries and read all files that a row needs."""

    def measure(self, request: RowRequest) -> dict[str, Any]:
        """Return the row of a request, of JSON types."""


def confined(maker: RowMaker, folder: str) -> Callable[[list[tuple[int, RowRequest]], Emit], None]:
    """Confine this process for good and return its handler for a sandbox.

    Args:
        maker: the measuring part; it is warmed before.
        folder: the worker's own folder, the only writable one.
    """
    jail = Jail(folder, cpu_seconds=_CPU_SECONDS)
    maker.warm()
    jail.environment()
    jail.files()
    jail.calls()
    return serving(maker)


def serving(maker: RowMaker) -> Callable[[list[tuple[int, RowRequest]], Emit], None]:
    """Return the handler of a measuring part, for a sandbox."""

    def handler(batch: list[tuple[int, RowRequest]], emit: Emit) -> None:
        for index, request in batch:
            emit.begin(index)
            emit.done(index, maker.measure(request))

    return handler


def rows_of(requests: Iterator[RowRequest], factory: str, args: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the row of each request. The next request is made while a row is measured.

    If a row costs its worker, it is measured again without CUDA-L2's kernel, whose reason is then the loss. If that
    fails, too, the row has ``problem`` and ``lost``, the reason.

    Args:
        requests: makes the requests, one after the other.
        factory: ``module:function`` that makes the handler in the worker.
        args: its arguments.

    Raises:
        DeviceError: a worker cannot start, or the first three rows are all lost. None of those three is yielded.
    """
    yield from _unless_all_are_lost(_all_rows(requests, factory, args))


def _unless_all_are_lost(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows; hold the first ones back while all are lost. Raise DeviceError at the third of them."""
    held: list[dict[str, Any]] = []
    for row in rows:
        if "lost" in row:
            held.append(row)
            if len(held) == _LOST_AT_FIRST:
                raise DeviceError(
                    f"the first {_LOST_AT_FIRST} problems were lost, the last one because {row['lost']}",
                    "a worker that measures",
                    "mend it and run again; nothing of them is recorded",
                )
        else:
            yield from held
            yield row
            yield from rows
            return
    yield from held


def _all_rows(requests: Iterator[RowRequest], factory: str, args: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield the row of each request, as :func:`rows_of`."""
    with Sandbox(factory, args, _ROW_S, _START_S, codec=__name__, limits=HostLimits(_MEMORY_BYTES)) as sandbox:
        request = next(requests, None)
        while request is not None:
            following: list[RowRequest | None] = []

            def prepare(following: list[RowRequest | None] = following) -> None:
                if not following:
                    following.append(next(requests, None))

            answer = _answer(sandbox, request, prepare)
            if isinstance(answer, WorkerLoss) and request.theirs is not None:
                refused = {**request.refused, CUDA_L2: f"{answer.status}: {answer.detail}"}
                answer = _answer(sandbox, replace(request, theirs=None, refused=refused), prepare)
            if isinstance(answer, WorkerLoss):
                answer = {"problem": request.problem.key, "lost": f"{answer.status}: {answer.detail}"}
            yield answer
            prepare()
            request = following[0]


def _answer(sandbox: Sandbox, request: RowRequest, prepare: Callable[[], None]) -> Any:
    ((_, answer),) = sandbox.run([request], prepare)
    return answer


def encode(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is: it has JSON types only."""
    return row


def decode(data: Any) -> dict[str, Any]:
    """Return a worker's row after a check, because the worker is not trusted.

    Raises:
        ValueError: it is no dict with a problem, or holds a number that is not finite.
    """
    if not isinstance(data, dict) or not isinstance(data.get("problem"), str):
        raise ValueError("a row is a dict with a problem")
    _check_numbers(data)
    return data


def _check_numbers(data: Any) -> None:
    if isinstance(data, dict):
        for value in data.values():
            _check_numbers(value)
    elif isinstance(data, list):
        for value in data:
            _check_numbers(value)
    elif isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"a number is {data}")
