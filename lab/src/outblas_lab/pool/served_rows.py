"""Rows of a bench, and of ``outblas eval``, in server mode."""

from __future__ import annotations

from outblas.core.config import config_name
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.records.library import Library
from outblas.records.result_rows import launch_columns
from outblas.records.results import Row
from outblas_lab.pool.latency import RequestPlan, check_qps, percentile
from outblas_lab.pool.serving import OURS, PLAIN, SERVER_BASELINES, over_chosen_rival, serve

#: Timed requests of each entry of an evaluation, at least; its seconds ask for more.
MIN_REQUESTS = 100


def server_rows(problem: Problem, library: Library, gpu_index: int, gpu: Gpu, target_qps: float | None) -> list[Row]:
    """Return a list with the one result row of a problem in server mode.

    Requests come one at a time, so PDL makes no difference and the launch option is ``plain``. The workload is
    ``single``: if the library has a second winner for it, columns ``plain_...`` have the row's plain choice. A row with
    ``fallback`` has latencies, too: ``ours_us`` is the latency of ``outblas.matmul``, by any kernel that it ran. A row
    whose kernel could not be loaded falls back, with status ``launch_error``.

    Args:
        target_qps: requests per second, at most; must be given.

    Raises:
        UsageError: ``target_qps`` is missing or <= 0.
        DeviceError: no GPU, or a call failed.
        ToolchainMissing: the C extension is not built.
    """
    check_qps(target_qps)
    row = library.lookup(problem)
    config = row.kernel("plain", "single") if row else None
    second = row.second_winner("plain", "single") if row else None
    served = serve(problem, gpu_index, RequestPlan(target_qps or 0.0), library, with_plain=second is not None)
    timings, found = served.timings, served.speedup
    status = Status.LEFT_OUT if config is None else Status.LAUNCH_ERROR if OURS in served.failures else Status.PASSED
    if status is not Status.PASSED:
        config = None
    ours, best, names = timings[OURS], timings[found.baseline], [n for n in SERVER_BASELINES if n in timings]
    beside: Row = {}
    if PLAIN in timings:  # the row's plain choice, which was served beside its second winner
        plain = None if row is None or PLAIN in served.failures else row.kernel("plain")
        beside = {
            "plain_config": "" if plain is None else config_name(plain),
            "plain_us": timings[PLAIN].median_us,
            "plain_p99_us": percentile(timings[PLAIN], 99),
            "plain_speedup": over_chosen_rival(served.times, PLAIN).ratio,
        }
    return [
        {
            **problem.to_json(),
            "mode": "server",
            **launch_columns("plain"),
            "config": "" if config is None else config_name(config),
            "status": status.value,
            "fallback": config is None,
            "ours_us": ours.median_us,
            "ours_spread": ours.spread,
            "ours_p99_us": percentile(ours, 99),
            "speedup": found.ratio,
            "low": found.low,
            "high": found.high,
            "baseline": found.baseline,
            "baseline_us": best.median_us,
            "baseline_detail": served.details[found.baseline],
            "lt_auto_detail": served.details[LT_AUTO],
            "baseline_p99_us": percentile(best, 99),
            "published": found.ratio,
            "floor_us": floor_us(problem, gpu),
            "regime": regime(problem, gpu),
            **{f"{name}_us": timings[name].median_us for name in names},
            **{f"{name}_p99_us": percentile(timings[name], 99) for name in names},
            "rounds": len(ours.samples_us),
            "repeats": 1,
            "operand_sets": ours.operand_sets,
            "chosen_on": len(served.times.choosing[OURS].samples_us),
            "judged_on": len(ours.samples_us),
            "qps": served.times.qps,
            "clock_us": served.times.clock_us,
            **beside,
        }
    ]


def eval_rows(problem: Problem, gpu_index: int, target_qps: float, warmup: float, seconds: float) -> list[Row]:
    """Return the rows of ``outblas eval`` in server mode: one per entry, with latencies in microseconds.

    Args:
        warmup: seconds of untimed requests.
        seconds: least seconds of timed ones.
    """
    plan = RequestPlan(target_qps, MIN_REQUESTS, warmup, seconds)
    served = serve(problem, gpu_index, plan)
    found, details = served.speedup, served.details
    rows = []
    for name, timing in served.timings.items():
        row: Row = {
            "name": name,
            "p50_us": percentile(timing, 50),
            "p99_us": percentile(timing, 99),
            "rounds": len(timing.samples_us),
            "detail": details.get(name, "outblas.matmul"),
        }
        if name == "ours":
            row |= {"speedup": found.ratio, "low": found.low, "high": found.high}
            row["detail"] = f"outblas.matmul, vs {found.baseline}"
        rows.append(row)
    return rows
