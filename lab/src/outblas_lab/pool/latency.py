"""Server mode: latency of single requests, as a user of a lightly loaded service sees it.

Requests of a Poisson process make one call each. A request's latency runs from its arrival to the completion of its
product, by the clock of :mod:`outblas.judge.request_clock`. Entries take turns in random order, a block of requests
at a time, and all blocks of a round have the same arrivals. The stream is made torch's current one once for all of
them, as it is for a user: no entry pays for that.

The rate is at most :attr:`RequestPlan.max_qps`. It is lower where an entry would be busy for more than
:data:`MAX_LOAD` of the time, so that few requests wait for the one before.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from outblas.core.errors import UsageError
from outblas.core.evaluation import Timing
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable, CallFromC
from outblas.judge.gpu_clock import GpuClock, choose_algorithm
from outblas.judge.integrity import watch
from outblas.judge.request_clock import RequestTimes, clock_us, serve_requests
from outblas.judge.rounds import timing_of_samples
from outblas.runtime.device import gpu_of_device

#: Timed requests of one entry before another has its turn, and untimed ones before them. The first requests after
#: another entry find that entry's code in the host's caches.
BLOCK_REQUESTS, LEAD_REQUESTS = 50, 2
#: Requests an entry, at least, in figures that are published.
PUBLISHED_REQUESTS = 1000
#: Requests per second, at most, and the share of the time that the slowest entry may be busy.
MAX_QPS, MAX_LOAD = 2000.0, 0.25
watch(__name__)

#: Serves requests that arrive at these nanoseconds after now, and returns their times.
ServeBlock = Callable[[Sequence[int]], RequestTimes]
#: Called with the clock, and name -> the calls of each operand set.
CheckCalls = Callable[[GpuClock, Mapping[str, Sequence[BaselineCall | CallFromC]]], None]


@dataclass(frozen=True)
class RequestPlan:
    """The number of requests and their rate.

    Attributes:
        max_qps: requests per second offered to an entry while it is served, at most.
        requests: timed requests of each entry, at least; a whole number of pairs of blocks is served.
        warmup_seconds: seconds of requests that do not count, of all entries together.
        benchmark_seconds: seconds of requests that count, at least, of all entries together.
    """

    max_qps: float = MAX_QPS
    requests: int = PUBLISHED_REQUESTS
    warmup_seconds: float = 0.2
    benchmark_seconds: float = 0.0


@dataclass(frozen=True)
class ServerTimes:
    """Latencies of all entries, in two halves of as many requests: every other block.

    Attributes:
        choosing: name -> Timing of mode ``server``; the half that chooses the rival.
        clock_us: the clock's own share of a latency, microseconds; None: not measured.
    """

    choosing: dict[str, Timing]
    judging: dict[str, Timing]
    qps: float
    clock_us: float | None = None


def time_server(
    entries: Mapping[str, Bindable], problem: Problem, plan: RequestPlan, seed: int = 0, gpu_index: int = 0,
    check: CheckCalls | None = None,
) -> ServerTimes:  # fmt: skip
    """Measure the latency per request at Poisson arrivals; see the module's text.

    An entry may have ``bind_native``: its calls are then made from C, without Python. An entry may have ``begin``,
    which is called before each of its blocks.

    Args:
        check: called with the clock and the bound calls of all entries before any is served; it raises an error to
            refuse them. None: they are not checked.

    Raises:
        UsageError: the plan's rate is not finite or not above 0, or there are no entries.
        DeviceError: no GPU, or a call failed. Errors of ``check`` are raised, too.
        ToolchainMissing: torch is not installed, or the C extension is not built.
    """
    check_qps(plan.max_qps)
    with GpuClock(problem, gpu_index, seed, gpu=gpu_of_device(gpu_index)) as bench:
        for entry in entries.values():
            choose_algorithm(entry, bench)
        with bench.current():
            calls = {name: _calls(entry, bench) for name, entry in entries.items()}
            if check is not None:
                check(bench, calls)
            bench.synchronize()
            own = clock_us(bench.stream, _arrivals(BLOCK_REQUESTS, MAX_QPS, random.Random(seed)))
            serve = {name: _server(entries[name], calls[name], bench.stream) for name in entries}
            blocks, qps = serve_blocks(serve, plan, random.Random(seed))
        choosing, judging = (
            {
                name: timing_of_samples("server", [us for block in served[first::2] for us in block], 1, bench.sets)
                for name, served in blocks.items()
            }
            for first in range(2)
        )
        return ServerTimes(choosing, judging, qps, own)


def serve_blocks(
    serve: Mapping[str, ServeBlock], plan: RequestPlan, rng: random.Random, clock: Callable[[], float] = monotonic
) -> tuple[dict[str, list[list[float]]], float]:
    """Serve requests in blocks and return (name -> latencies of each block in microseconds, requests per second).

    First, every entry serves a block without waiting, which does not count and gives the rate. Then come rounds of
    warm-up and rounds that count: in each, every entry serves one block, in a random order, with the same arrivals.

    Args:
        clock: function that returns seconds.

    Raises:
        UsageError: ``serve`` is empty.
    """
    if not serve:
        raise UsageError("there is nothing to serve", "at least one kernel or baseline", "pass one to time")
    service_us = [float(np.median(one([0] * BLOCK_REQUESTS).service_us)) for one in serve.values()]
    qps = min(plan.max_qps, 1e6 * MAX_LOAD / max(service_us))

    def one_round() -> dict[str, list[float]]:
        arrivals = _arrivals(LEAD_REQUESTS + BLOCK_REQUESTS, qps, rng)
        order = rng.sample(list(serve), len(serve))
        return {name: serve[name](arrivals).latency_us[LEAD_REQUESTS:].tolist() for name in order}

    blocks: dict[str, list[list[float]]] = {name: [] for name in serve}
    collecting = gc.isenabled()
    gc.disable()  # a collection would fall on the requests of any entry
    try:
        begin = clock()
        while clock() - begin < plan.warmup_seconds:
            one_round()
        begin, rounds = clock(), 2 * math.ceil(plan.requests / (2 * BLOCK_REQUESTS))
        done = 0
        while done < rounds or done % 2 or clock() - begin < plan.benchmark_seconds:
            for name, latencies in one_round().items():
                blocks[name].append(latencies)
            done += 1
    finally:
        if collecting:
            gc.enable()
    return blocks, qps


def check_qps(target_qps: float | None) -> None:
    """Return None if the rate, in requests per second, is a finite number above 0.

    Raises:
        UsageError: it is None, 0, negative, infinite or NaN.
    """
    if target_qps is None or not math.isfinite(target_qps) or target_qps <= 0:
        raise UsageError(
            f"target-qps is {target_qps}", "a positive number of requests per second", "pass e.g. --target-qps 100"
        )


def percentile(timing: Timing, q: float) -> float:
    """Return the q-th percentile of a timing's samples, microseconds, with linear interpolation between samples.

    Samples 1, 2, 3 and 4 have the 50th percentile 2.5.

    Args:
        q: 0 to 100, e.g. 50 for the median or 99; another number raises ValueError.

    Raises:
        UsageError: the timing has no samples.
    """
    if not timing.samples_us:
        raise UsageError(f"the {timing.mode} timing has no samples", "at least one sample", "time it again")
    return float(np.percentile(np.asarray(timing.samples_us), q))


def _arrivals(count: int, qps: float, rng: random.Random) -> list[int]:
    """Return the arrivals of a Poisson process, nanoseconds after now."""
    return np.cumsum([int(1e9 * rng.expovariate(qps)) for _ in range(count)]).tolist()


def _calls(entry: Any, bench: GpuClock) -> list[BaselineCall | CallFromC]:
    """Return a call of the entry for each operand set, made from C if the entry has such calls."""
    bound = bench.bind(entry)  # in any case: it loads what the first calls need
    native = getattr(entry, "bind_native", None)
    if native is None:
        return list(bound)
    return [native(bench.problem, *bench.operands(i), bench.stream) for i in range(bench.sets)]


def _server(entry: Any, calls: Sequence[BaselineCall | CallFromC], stream: int) -> ServeBlock:
    """Return a function that serves blocks of an entry, rotating over the operand sets from block to block."""
    begin, turn = getattr(entry, "begin", None), 0

    def serve(arrivals: Sequence[int]) -> RequestTimes:
        nonlocal turn
        if begin is not None:
            begin()
        rotated = (*calls[turn:], *calls[:turn])
        turn = (turn + len(arrivals)) % len(calls)
        return serve_requests(rotated, stream, arrivals)

    return serve
