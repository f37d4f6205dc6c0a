"""Server mode: latency of single requests, the clock of the host (outblas.judge.gpu_clock has that of the GPU).

Requests of a Poisson process, one call each; host time from the call to its completion
(a stream synchronise). Entries alternate in random order, a block of requests at a time. The stream
is made torch's current one once for all of them, as it is for a user: no entry pays for that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns

import numpy as np

from outblas.core.errors import UsageError
from outblas.core.evaluation import Timing
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.judge.gpu_clock import GpuClock, choose_algorithm
from outblas.judge.rounds import timing_of_samples
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import check, driver

#: Requests of one entry before another has its turn.
SERVER_BLOCK = 16


def time_server(
    entries: Mapping[str, Bindable], problem: Problem, target_qps: float | None, warmup_seconds: float = 1.0,
    benchmark_seconds: float = 5.0, seed: int = 0, gpu_index: int = 0,
) -> dict[str, Timing]:  # fmt: skip
    """Measure the latency per request at a Poisson arrival rate; see the module's text.

    Args:
        entries: name -> kernel or baseline.
        problem: the problem that they compute.
        target_qps: requests per second offered to each entry while it is served.
        warmup_seconds: seconds of requests that do not count, of all entries together.
        benchmark_seconds: seconds of requests that count, of all entries together. Every entry gets at least one
            request.
        seed: seed of the operands, of the arrivals and of the order.
        gpu_index: CUDA ordinal.

    Returns:
        Name -> Timing of mode ``server``, with one sample per request, in microseconds.

    Raises:
        UsageError: ``target_qps`` is None, not finite or not above 0, or there are no entries.
        DeviceError: no GPU, or a call failed.
        ToolchainMissing: torch is not installed.
    """
    check_qps(target_qps)
    assert target_qps is not None
    with GpuClock(problem, gpu_index, seed, gpu=gpu_of_device(gpu_index)) as bench:
        for entry in entries.values():
            choose_algorithm(entry, bench)
        with bench.current():
            bound = {name: bench.bind(entry) for name, entry in entries.items()}
            bench.synchronize()
            serve = {name: _requests(calls, bench) for name, calls in bound.items()}
            blocks = time_server_blocks(serve, target_qps, warmup_seconds, benchmark_seconds, random.Random(seed))
        return {name: timing_of_samples("server", samples, 1, bench.sets) for name, samples in blocks.items()}


def time_server_blocks(
    serve: Mapping[str, Callable[[], None]], target_qps: float, warmup_seconds: float, benchmark_seconds: float,
    rng: random.Random, clock_ns: Callable[[], int] = perf_counter_ns,
) -> dict[str, list[float]]:  # fmt: skip
    """Serve requests in blocks of 16 per entry and return name -> latencies in microseconds, in the order of serving.

    First, every entry serves a block without waiting, which does not count. Then come the warm-up and the benchmark:
    entries take turns, in a random order. The host waits for each arrival in a busy loop. A request that arrives while
    another is served starts late; its latency counts from its own call.

    Args:
        serve: name -> function that serves one request to its completion.
        target_qps: requests per second, above 0; the times between arrivals are exponentially distributed.
        warmup_seconds: seconds of requests that do not count; at least one request per entry.
        benchmark_seconds: seconds of requests that count; at least one request per entry.
        rng: source of the order and of the arrivals.
        clock_ns: function that returns nanoseconds.

    Raises:
        UsageError: ``serve`` is empty.
    """
    if not serve:
        raise UsageError("no entries to serve", "at least one kernel or baseline", "pass one")
    for one in serve.values():
        for _ in range(SERVER_BLOCK):
            one()
    samples: dict[str, list[float]] = {name: [] for name in serve}
    for seconds, keep in ((warmup_seconds, False), (benchmark_seconds, True)):
        end = clock_ns() + int(1e9 * seconds)
        while True:
            for name in rng.sample(list(serve), len(serve)):
                arrival = clock_ns()
                for _ in range(SERVER_BLOCK):
                    arrival += int(1e9 * rng.expovariate(target_qps))
                    while clock_ns() < arrival:
                        pass
                    begin = clock_ns()
                    serve[name]()
                    if keep:
                        samples[name].append((clock_ns() - begin) / 1e3)
                    if clock_ns() >= end and (samples[name] or not keep):
                        break  # at a low rate a block may outlast the time
            if clock_ns() >= end:
                break
    return samples


def check_qps(target_qps: float | None) -> None:
    """Return None if the rate, in requests per second, is a finite number above 0.

    Raises:
        UsageError: it is None, 0, negative, infinite or NaN.
    """
    if target_qps is None or not math.isfinite(target_qps) or target_qps <= 0:
        raise UsageError(
            f"target-qps is {target_qps}", "requests per second, a number above 0", "pass e.g. --target-qps 100"
        )


def percentile(timing: Timing, q: float) -> float:
    """Return the q-th percentile of a timing's samples, microseconds, with linear interpolation between samples.

    Samples 1, 2, 3 and 4 have the 50th percentile 2.5.

    Args:
        timing: at least one sample.
        q: 0 to 100, e.g. 50 for the median or 99; another number raises ValueError.

    Raises:
        UsageError: the timing has no samples.
    """
    if not timing.samples_us:
        raise UsageError(f"a percentile of a {timing.mode} timing without samples", "at least one", "time it again")
    return float(np.percentile(np.asarray(timing.samples_us), q))


def _requests(calls: Sequence[BaselineCall], bench: GpuClock) -> Callable[[], None]:
    """Serves one request after the other, rotating over the operand sets."""
    turn: Iterator[int] = iter(())
    stream, wait = bench.stream, driver().cuStreamSynchronize

    def serve() -> None:
        nonlocal turn
        index = next(turn, None)
        if index is None:
            turn = iter(range(len(calls)))
            index = next(turn)
        calls[index](stream)
        check("cuStreamSynchronize", wait(stream))

    return serve
