"""Server mode's logic with a false driver and false time."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.judge import latency
from outblas.judge.rounds import timing_of_samples


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


def test_a_server_is_timed_on_the_first_gpu_with_seed_0_and_each_request_is_a_sample(monkeypatch):
    made, served = [], []

    class FakeClock:
        sets = 3

        def __init__(self, problem, gpu_index, seed):
            made.append((gpu_index, seed))

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        current = contextlib.nullcontext

        def bind(self, entry):
            return entry

        def synchronize(self): ...

    def blocks(serve, qps, warmup, seconds, rng):
        served.append((sorted(serve), qps, warmup, seconds, rng.random()))
        return {name: [1.0, 2.0, 3.0] for name in serve}

    monkeypatch.setattr(latency, "GpuClock", FakeClock)
    monkeypatch.setattr(latency, "choose_algorithm", lambda entry, bench: None)
    monkeypatch.setattr(latency, "_requests", lambda calls, bench: calls)
    monkeypatch.setattr(latency, "time_server_blocks", blocks)
    found = latency.time_server({"ours": None, "theirs": None}, Problem(16, 16, 16), 100.0)
    assert made == [(0, 0)] and served == [(["ours", "theirs"], 100.0, 1.0, 5.0, random.Random(0).random())]
    assert {(t.mode, t.repeats, t.operand_sets, len(t.samples_us)) for t in found.values()} == {("server", 1, 3, 3)}


def test_sixteen_requests_of_one_entry_come_before_another_has_its_turn():
    turns = []
    clock = Clock(1000)

    def request(name):
        def serve():
            turns.append(name)
            clock.now += 1000

        return serve

    class InTurn:
        """Every entry by turns, and requests without a gap."""

        sample = staticmethod(lambda names, count: names)
        expovariate = staticmethod(lambda rate: 0.0)

    latency.time_server_blocks({n: request(n) for n in ("a", "b")}, 1e6, 0.0, 1e-3, InTurn(), clock)
    blocks = [(name, len(list(group))) for name, group in itertools.groupby(turns)]
    assert blocks[:2] == [("a", 16), ("b", 16)], "warm, without waiting"
    timed = blocks[4:-2]  # the warm-up of no seconds is one request each; the last block ends with the time
    assert len(timed) >= 4 and {length for _, length in timed} == {16}
