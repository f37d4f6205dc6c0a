"""Server mode: latency of single requests through the public API, against torch and native calls.

``outblas.matmul`` and torch are called as users call them: one Python call on the current stream, which the server has
made current once. The native calls of cuBLAS receive the stream.
"""

from __future__ import annotations

from typing import Any

from outblas.core.config import config_name
from outblas.core.evaluation import Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, BaselineCall
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.judge.baselines import make_baselines, on_current_stream
from outblas.judge.latency import percentile, time_server
from outblas.judge.rounds import speedup
from outblas.records.averages import launch_columns
from outblas.records.library import Library
from outblas.records.results import Row

#: Baselines of server mode; nvmmh is left out, being our own kernel by another's choice.
SERVER_BASELINES = ("torch", "cublas", "lt_heuristic", "lt_auto")
WARMUP_SECONDS, BENCHMARK_SECONDS = 0.2, 2.0


class PublicApi:
    """The entry ``outblas.matmul(a, b, out=c)`` of a server's clock, named ``ours``.

    It runs on torch's current stream, which must be the one passed to a bound call.

    Args:
        gpu_index: CUDA ordinal.
        library: library of matmul from the first ``bind`` to :meth:`close`; None: unchanged.
    """

    name = "ours"

    def __init__(self, gpu_index: int = 0, library: Library | None = None) -> None:
        self._gpu, self._library = gpu_index, library
        self._in_use = False

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        from outblas.dispatch.matmul import matmul, use_library

        if self._library is not None and not self._in_use:
            use_library(self._library, self._gpu)
            self._in_use = True
        return on_current_stream(matmul, problem, a, b, c)

    def close(self) -> None:
        """Let matmul use the packaged library again, if it was given another."""
        if self._in_use:
            from outblas.dispatch.matmul import use_library

            use_library(None, self._gpu)
            self._in_use = False


def serve(
    problem: Problem,
    gpu_index: int,
    target_qps: float | None,
    warmup_seconds: float = WARMUP_SECONDS,
    benchmark_seconds: float = BENCHMARK_SECONDS,
    library: Library | None = None,
) -> tuple[dict[str, Timing], Speedup, dict[str, str]]:
    """Time ``outblas.matmul`` and the baselines on requests that arrive at a rate.

    Args:
        problem: the product to compute.
        gpu_index: CUDA ordinal.
        target_qps: requests per second; must be given and positive.
        warmup_seconds: seconds of untimed requests, all entries together.
        benchmark_seconds: seconds of timed requests, all entries together.
        library: library for ``outblas.matmul``; None: the library that it uses already.

    Returns:
        Latencies in microseconds by name (``ours`` is ``outblas.matmul``), the speed-up over the fastest baseline, and
        one line per baseline on its choice.

    Raises:
        UsageError: ``target_qps`` is missing or <= 0.
        DeviceError: no GPU, or a call failed.
    """
    baselines = make_baselines(gpu_index, SERVER_BASELINES, current_stream=True)
    ours = PublicApi(gpu_index, library)
    entries = {"ours": ours, **baselines}
    try:
        timings = time_server(entries, problem, target_qps, warmup_seconds, benchmark_seconds, gpu_index=gpu_index)
    finally:
        ours.close()
    details = {name: str(entry.detail(problem)) for name, entry in baselines.items()}
    return timings, speedup(timings, "ours", SERVER_BASELINES), details


def server_rows(problem: Problem, library: Library, gpu_index: int, gpu: Gpu, target_qps: float | None) -> list[Row]:
    """Return a list with the one result row of a problem in server mode.

    Requests come one at a time, so PDL makes no difference and the launch option is ``plain``. A row with ``fallback``
    has latencies, too: ``ours_us`` is the latency of ``outblas.matmul``, by any kernel that it ran.

    Raises:
        UsageError: ``target_qps`` is missing or <= 0.
        DeviceError: no GPU, or a call failed.
    """
    timings, found, details = serve(problem, gpu_index, target_qps, library=library)
    row = library.lookup(problem)
    choice = row.choice("plain") if row else None
    ours, best = timings["ours"], timings[found.baseline]
    return [
        {
            **problem.to_json(),
            "mode": "server",
            **launch_columns("plain"),
            "config": "" if choice is None else config_name(choice.config),
            "status": (Status.LEFT_OUT if choice is None else Status.PASSED).value,
            "fallback": choice is None,
            "ours_us": ours.median_us,
            "ours_spread": ours.spread,
            "ours_p99_us": percentile(ours, 99),
            "speedup": found.ratio,
            "low": found.low,
            "high": found.high,
            "baseline": found.baseline,
            "baseline_us": best.median_us,
            "baseline_detail": details[found.baseline],
            "lt_auto_detail": details[LT_AUTO],
            "baseline_p99_us": percentile(best, 99),
            "torch_p99_us": percentile(timings["torch"], 99),
            "published": found.ratio,
            "floor_us": floor_us(problem, gpu),
            "regime": regime(problem, gpu),
            **{f"{name}_us": t.median_us for name, t in timings.items() if name != "ours"},
            "rounds": len(ours.samples_us),
            "repeats": 1,
            "operand_sets": ours.operand_sets,
        }
    ]
