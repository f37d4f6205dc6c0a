"""Server mode: latency of single requests through the public API, against torch and native calls.

``outblas.matmul`` and torch are called as users call them: one Python call on the current stream, which the server has
made current once. The native calls of cuBLAS are made from C. One half of the requests chooses the rival, the other
half judges it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, fastest_baseline
from outblas.core.workload import Workload
from outblas.judge.baselines import make_baselines
from outblas.judge.rounds import speedup
from outblas.judge.torch_baselines import on_current_stream
from outblas.records.library import Library
from outblas_lab.pool.latency import RequestPlan, ServerTimes, time_server

#: Baselines of server mode; nvmmh is left out, being our own kernel by another's choice.
SERVER_BASELINES = ("torch", "cublas", "lt_heuristic", "lt_auto")
#: Names of ``outblas.matmul`` under workload ``single``, and of the same with the row's plain choice.
OURS, PLAIN = "ours", "plain"


class PublicApi:
    """The entry ``outblas.matmul(a, b, out=c)`` of a server's clock.

    It runs on torch's current stream, which must be the one passed to a bound call.

    Args:
        library: library of matmul during the blocks of this entry; None: the one that matmul uses already.
        workload: workload of the process during the blocks of this entry.
    """

    name = OURS

    def __init__(self, gpu_index: int = 0, library: Library | None = None, workload: Workload = "single") -> None:
        self._gpu, self._library, self._workload = gpu_index, library, workload
        self._decisions: Any = None

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        from outblas.dispatch.matmul import matmul

        self.begin()
        return on_current_stream(matmul, problem, a, b, c)

    @property
    def failures(self) -> list[str]:
        """Return why kernels of this entry could not be loaded, one line each; torch served their requests."""
        return [] if self._decisions is None else sorted(self._decisions.state.failed.values())

    def has_kernel(self, problem: Problem) -> bool:
        """Return True if the entry's own library has a kernel for a problem under the entry's workload."""
        row = None if self._library is None else self._library.lookup(problem)
        return row is not None and row.kernel("plain", self._workload) is not None

    def begin(self) -> None:
        """Let matmul decide by this entry's library and workload, and repeat this entry's own earlier decisions."""
        from outblas.dispatch.device_registry import new_decisions, use_decisions

        if self._decisions is None:
            self._decisions = new_decisions(self._gpu, self._library, self._workload)
        use_decisions(self._decisions, self._gpu)


@dataclass(frozen=True)
class Served:
    """The figures of one problem in server mode.

    Attributes:
        times: latencies of both halves of the requests.
        speedup: speed-up of ``outblas.matmul`` over the rival, on the half that judges.
        details: name of a baseline -> one line on its choice.
        failures: name of an entry of ``outblas.matmul`` -> why its kernel could not be loaded, if so. torch served it.
    """

    times: ServerTimes
    speedup: Speedup
    details: dict[str, str]
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def timings(self) -> dict[str, Timing]:
        """Return name -> latencies of the half that judges."""
        return self.times.judging


def serve(
    problem: Problem, gpu_index: int, plan: RequestPlan, library: Library | None = None, with_plain: bool = False
) -> Served:
    """Time ``outblas.matmul`` and the baselines on requests that arrive at a rate.

    Args:
        library: library for ``outblas.matmul``; None: the library that it uses already.
        with_plain: also time the library's plain choice, as entry ``plain``.

    Raises:
        UsageError: the rate of the plan is not above 0.
        DeviceError: no GPU, or a call failed.
        ToolchainMissing: the C extension is not built.
    """
    baselines = make_baselines(gpu_index, SERVER_BASELINES, current_stream=True)
    ours = {OURS: PublicApi(gpu_index, library)}
    if with_plain:
        ours[PLAIN] = PublicApi(gpu_index, library, "stream")
    times = time_public_api({**ours, **baselines}, problem, plan, gpu_index)
    details = {name: str(entry.detail(problem)) for name, entry in baselines.items()}
    failures = {name: "; ".join(entry.failures) for name, entry in ours.items() if entry.failures}
    return Served(times, over_chosen_rival(times, OURS), details, failures)


def time_public_api(entries: Mapping[str, Any], problem: Problem, plan: RequestPlan, gpu_index: int) -> ServerTimes:
    """Return :func:`outblas_lab.pool.latency.time_server` of entries with some of :class:`PublicApi`.

    One call of each of these is proved before, if a kernel computes it: torch may round more by itself than a proof
    allows. ``outblas.matmul`` decides afterwards as it did before.

    Raises:
        DeviceError: a result of a kernel is wrong.
    """
    from outblas.dispatch.device_registry import current_decisions, use_decisions

    before = current_decisions(gpu_index)
    try:
        ours = {name: e for name, e in entries.items() if isinstance(e, PublicApi) and e.has_kernel(problem)}
        return time_server(entries, problem, plan, gpu_index=gpu_index, check=functools.partial(prove_calls, ours))
    finally:
        use_decisions(before, gpu_index)


def prove_calls(ours: Mapping[str, PublicApi], clock: Any, calls: Mapping[str, Sequence[Any]]) -> None:
    """Prove one call of each entry on operand set 0, as cells of a recording are proved; return None.

    Args:
        calls: name -> bound calls of each operand set, of these entries and possibly of others.

    Raises:
        DeviceError: a result is wrong.
    """
    from outblas.judge.gates import CellProver

    if not ours:
        return
    prover = CellProver(clock.data, clock.torch_stream)
    for name, entry in ours.items():
        entry.begin()
        verdict = prover.call(calls[name][0])
        if verdict.status is not Status.PASSED:
            raise DeviceError(
                f"{name} fails on {clock.problem.key}: {verdict.status}, {verdict.detail}",
                "a call that computes the product",
                "report this bug; the timing does not count",
            )


def over_chosen_rival(times: ServerTimes, name: str) -> Speedup:
    """Return the speed-up of an entry over the baseline of the least median on the half that chooses.

    The figures are of the half that judges: no luck of the choice is in them.
    """
    medians = {each: times.choosing[each].median_us for each in SERVER_BASELINES if each in times.choosing}
    return speedup(times.judging, name, (fastest_baseline(medians),))
