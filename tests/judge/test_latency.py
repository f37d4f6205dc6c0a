"""Server mode's logic with a false driver and false time."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Timing
from outblas.judge import latency
from outblas.judge.rounds import timing_of_samples
from support.gpus.known import H200


@pytest.mark.parametrize("qps", [None, 0, -1.0, float("nan"), float("inf")])
def test_server_wants_a_rate(qps):
    with pytest.raises(UsageError, match="target-qps"):
        latency.time_server({}, None, qps)


class Clock:
    """Moves by ``step`` at every look."""

    def __init__(self, step):
        self.now, self.step = 0, step

    def __call__(self):
        self.now += self.step
        return self.now


def serve_with(duration_ns, qps, seconds, names=("ours", "theirs"), warmup=0.0):
    clock = Clock(1000)
    calls = {name: 0 for name in names}

    def request(name):
        def serve():
            calls[name] += 1
            clock.now += duration_ns[name]

        return serve

    samples = latency.time_server_blocks({n: request(n) for n in names}, qps, warmup, seconds, random.Random(1), clock)
    return samples, calls, clock


def test_server_latency_runs_from_the_call_to_completion():
    samples, calls, _ = serve_with({"ours": 10_000, "theirs": 30_000}, 5000.0, 0.1)
    assert np.median(samples["ours"]) == pytest.approx(11.0) and np.median(samples["theirs"]) == pytest.approx(31.0)
    untimed = latency.SERVER_BLOCK + 1  # a block without waiting, and one request at the rate
    assert calls == {name: len(s) + untimed for name, s in samples.items()}


def test_server_arrivals_have_the_target_rate():
    samples, _, clock = serve_with({"ours": 1000, "theirs": 1000}, 1000.0, 2.0)
    assert sum(map(len, samples.values())) / (clock.now / 1e9) == pytest.approx(1000.0, rel=0.1)


def test_server_warm_up_is_served_and_not_kept():
    samples, calls, _ = serve_with({"ours": 1000, "theirs": 1000}, 1000.0, 0.1, warmup=0.1)
    assert all(samples.values())
    assert all(calls[name] > len(samples[name]) + latency.SERVER_BLOCK + 1 for name in calls)


def test_server_at_a_low_rate_ends_with_a_sample_of_each():
    samples, _, clock = serve_with({"ours": 1000, "theirs": 1000}, 10.0, 0.01)
    assert all(len(s) >= 1 for s in samples.values()) and clock.now < 2e9


def test_requests_rotate_over_the_operand_sets(monkeypatch):
    seen, waits = [], []
    false = SimpleNamespace(cuStreamSynchronize=lambda stream: waits.append(stream) or (0,))
    monkeypatch.setattr(latency, "driver", lambda: false)
    serve = latency._requests([lambda s, i=i: seen.append((i, s)) for i in range(3)], SimpleNamespace(stream=5))
    for _ in range(7):
        serve()
    assert seen == [(i, 5) for i in (0, 1, 2, 0, 1, 2, 0)] and waits == [5] * 7


def test_percentiles_come_from_the_samples():
    t = timing_of_samples("server", [float(i) for i in range(1, 102)])
    assert latency.percentile(t, 50) == 51.0 and latency.percentile(t, 99) == 100.0


class Metronome:
    """In place of a random generator: arrivals one microsecond apart, names in the order given."""

    def __init__(self, qps):
        self.qps = qps

    def sample(self, names, count):
        assert count == len(names)
        return names

    def expovariate(self, rate):
        assert rate == self.qps
        return 1e-6


def trace(duration_ns, warmup_ns, benchmark_ns, names=("one",)):
    """Return the start of each request by a clock that moves 1 ns at every look, and the kept samples."""
    clock, begun = Clock(1), []

    def request(name):
        def serve():
            begun.append((name, clock.now))
            clock.now += duration_ns

        return serve

    samples = latency.time_server_blocks(
        {name: request(name) for name in names}, 50.0, warmup_ns / 1e9, benchmark_ns / 1e9, Metronome(50.0), clock
    )
    return begun, samples


@pytest.mark.parametrize("duration_ns", [400, 5000])
def test_each_request_waits_for_its_arrival_and_counts_from_its_own_call(duration_ns):
    begun, samples = trace(duration_ns, 0, 70_000)
    times = [at for _, at in begun]
    assert times[:16] == [i * duration_ns for i in range(16)], "a block without waiting, without a look at the clock"
    assert times[16] == 16 * duration_ns + 1003, "looks for the end and for the arrival 1,000 ns later, and its own"
    served = times[17:]  # one more was the warm-up
    assert len(served) == len(samples["one"]) and set(samples["one"]) == {(duration_ns + 1) / 1000}
    gaps = [b - a for a, b in zip(served, served[1:], strict=False)]
    within = [gap for i, gap in enumerate(gaps) if i % 16 != 15]
    if duration_ns < 1000:
        assert set(within) == {1000} and len(served) in range(64, 71)
    else:  # late: one look for the sample, one for the end, one for the arrival, one for the beginning
        assert set(within) == {5000 + 4} and len(served) == 14


@pytest.mark.parametrize(
    ("warmup_ns", "benchmark_ns", "kept"), [(0, 0, 1), (2500, 0, 1), (0, 2500, 3), (9500, 4500, 5)]
)
def test_a_block_ends_with_its_time_and_only_timed_requests_are_kept(warmup_ns, benchmark_ns, kept):
    begun, samples = trace(400, warmup_ns, benchmark_ns)
    assert len(samples["one"]) == kept
    assert len(begun) == 16 + max(1, -(-warmup_ns // 1000)) + kept


def test_the_late_of_two_is_served_once_more_after_the_time():
    begun, samples = trace(400, 0, 5500, ("one", "two"))
    assert {name: len(s) for name, s in samples.items()} == {"one": 6, "two": 1}
    assert [name for name, _ in begun] == ["one"] * 16 + ["two"] * 16 + ["one", "two"] + ["one"] * 6 + ["two"]


def test_a_block_is_of_sixteen_requests():
    """Two blocks take 2 x 16.4 us, so that the time of 40.5 us ends before the eighth request of the third does."""
    begun, samples = trace(400, 0, 40_500, ("one", "two"))
    order = ["one"] * 16 + ["two"] * 16 + ["one"] * 8 + ["two"]
    assert [name for name, _ in begun[34:]] == order
    assert {name: len(s) for name, s in samples.items()} == {"one": 24, "two": 17}


@pytest.mark.parametrize(
    "arguments", [{}, {"warmup_seconds": 2.5, "benchmark_seconds": 9.0, "seed": 3, "gpu_index": 2}]
)
def test_server_mode_prepares_binds_waits_and_serves_in_that_order(monkeypatch, arguments):
    log = []

    class Bench:
        stream, sets = 5, 3

        def __init__(self, problem, gpu_index, seed, gpu):
            log.append(("clock", problem, gpu_index, seed))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            log.append("closed")

        @contextlib.contextmanager
        def current(self):
            log.append("current")
            yield
            log.append("no longer current")

        def bind(self, entry):
            log.append(("bind", entry.name))
            return [lambda stream, i=i: log.append((entry.name, i, stream)) for i in range(3)]

        def synchronize(self):
            log.append("wait")

    def blocks(serve, qps, warmup, seconds, rng):
        log.append(("blocks", qps, warmup, seconds, rng.random()))
        for name in serve:
            serve[name]()
        return {name: [1.0, 3.0, 2.0] for name in serve}

    monkeypatch.setattr(latency, "GpuClock", Bench)
    monkeypatch.setattr(latency, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(latency, "time_server_blocks", blocks)
    cu = SimpleNamespace(cuStreamSynchronize=lambda stream: log.append(("done", stream)) or (0,))
    monkeypatch.setattr(latency, "driver", lambda: cu)
    one = SimpleNamespace(name="one", prepare=lambda bench: log.append("chosen"))
    found = latency.time_server({"one": one, "two": SimpleNamespace(name="two")}, "problem", 40.0, **arguments)
    asked = {"warmup_seconds": 1.0, "benchmark_seconds": 5.0, "seed": 0, "gpu_index": 0} | arguments
    first = random.Random(asked["seed"]).random()
    assert log == [
        ("clock", "problem", asked["gpu_index"], asked["seed"]), "chosen", "current", ("bind", "one"), ("bind", "two"),
        "wait", ("blocks", 40.0, asked["warmup_seconds"], asked["benchmark_seconds"], first),
        ("one", 0, 5), ("done", 5), ("two", 0, 5), ("done", 5), "no longer current", "closed",
    ]  # fmt: skip
    assert set(found) == {"one", "two"}
    assert found["two"] == timing_of_samples("server", [1.0, 3.0, 2.0], 1, 3)


@pytest.mark.parametrize("qps", [1e-9, 0.5, 1.0, 1e9])
def test_any_rate_above_zero_will_do(qps):
    latency.check_qps(qps)


SECOND = 10**9


@pytest.mark.parametrize(
    ("nanoseconds", "kept"),
    [(1 + 3 * SECOND, 3), (2 + 3 * SECOND, 4), (1 + 16 * SECOND, 16), (2 + 16 * SECOND, 16), (3 + 16 * SECOND, 17)],
)
def test_the_time_ends_to_the_nanosecond_after_a_request_and_after_a_block(nanoseconds, kept):
    """A request takes a second with the four looks around it; a block has one look before and one behind."""
    clock, rng = Clock(1), Metronome(50.0)
    rng.expovariate = lambda rate: 0.0

    def serve():
        clock.now += SECOND - 4

    samples = latency.time_server_blocks({"one": serve}, 50.0, 0.0, nanoseconds / 1e9, rng, clock)
    assert samples == {"one": [(SECOND - 3) / 1000] * kept}


def test_arrivals_are_in_seconds_to_the_nanosecond():
    clock, rng, begun = Clock(1), Metronome(50.0), []

    def expovariate(rate):
        begun.append(clock.now + 2 * SECOND + 1)  # at the look after the arrival
        clock.now += 2 * SECOND - 5  # the host comes back in time
        return 2.0

    rng.expovariate = expovariate
    served = []
    latency.time_server_blocks({"one": lambda: served.append(clock.now)}, 50.0, 0.0, 0.0, rng, clock)
    assert served[16:] == begun and len(begun) == 2


def test_no_entries_are_not_served():
    with pytest.raises(UsageError, match="no entries to serve; expected at least one"):
        latency.time_server_blocks({}, 50.0, 0.0, 0.1, random.Random(1), Clock(1000))


def test_a_percentile_of_no_samples_is_refused():
    with pytest.raises(UsageError, match="a percentile of a server timing without samples"):
        latency.percentile(Timing("server", (), 1.0, 0.0), 50)
