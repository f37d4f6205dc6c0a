"""Server mode's logic with false service times and false time."""

from __future__ import annotations

import contextlib
import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Timing
from outblas.judge.request_clock import RequestTimes
from outblas.judge.rounds import timing_of_samples
from outblas_lab.pool import latency
from outblas_lab.pool.latency import BLOCK_REQUESTS, LEAD_REQUESTS, RequestPlan
from support.gpus.known import H200


@pytest.mark.parametrize("qps", [0, -1.0, float("nan"), float("inf")])
def test_server_wants_a_rate(qps):
    with pytest.raises(UsageError, match="target-qps"):
        latency.time_server({}, None, RequestPlan(qps))


class Server:
    """Serves requests in a given time each, one after the other, and moves the clock to the end of the last one."""

    def __init__(self, service_us):
        self.now_s, self.service_us, self.blocks = 0.0, service_us, []

    def clock(self):
        return self.now_s

    def entry(self, name):
        def serve(arrivals):
            self.blocks.append((name, list(arrivals), gc.isenabled()))
            free, latencies = 0.0, []
            for due in arrivals:
                free = max(free, due / 1e3) + self.service_us[name]
                latencies.append(free - due / 1e3)
            self.now_s += free / 1e6
            return RequestTimes(np.array(latencies), np.full(len(arrivals), self.service_us[name]))

        return serve

    def serve(self, plan, seed=1):
        entries = {name: self.entry(name) for name in self.service_us}
        return latency.serve_blocks(entries, plan, random.Random(seed), self.clock)


def test_every_entry_serves_as_many_requests_in_pairs_of_blocks():
    server = Server({"ours": 10.0, "theirs": 30.0})
    blocks, qps = server.serve(RequestPlan(requests=1000, warmup_seconds=0.0))
    assert {name: [len(block) for block in served] for name, served in blocks.items()} == {
        "ours": [50] * 20, "theirs": [50] * 20,
    }  # fmt: skip
    assert qps == 2000.0 and not any(collecting for _, _, collecting in server.blocks[2:]) and gc.isenabled()
    assert len(Server({"one": 1.0}).serve(RequestPlan(requests=101, warmup_seconds=0.0))[0]["one"]) == 4


def test_a_round_has_every_entry_once_in_random_order_with_the_same_arrivals():
    server = Server({"a": 10.0, "b": 10.0, "c": 10.0})
    server.serve(RequestPlan(requests=1000, warmup_seconds=0.0))
    untimed, timed = server.blocks[:3], server.blocks[3:]
    assert all(arrivals == [0] * BLOCK_REQUESTS for _, arrivals, _ in untimed)
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(sorted(name for name, _, _ in each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(name for name, _, _ in each) for each in rounds}) > 1
    assert all(each[0][1] == each[1][1] == each[2][1] for each in rounds)
    assert len({tuple(each[0][1]) for each in rounds}) == len(rounds) == 20
    assert all(len(arrivals) == LEAD_REQUESTS + BLOCK_REQUESTS for _, arrivals, _ in timed)


@pytest.mark.parametrize(("slowest_us", "qps"), [(30.0, 2000.0), (1000.0, 250.0), (10_000.0, 25.0)])
def test_the_rate_leaves_the_slowest_entry_idle_for_three_quarters_of_the_time(slowest_us, qps):
    server = Server({"ours": 10.0, "theirs": slowest_us})
    blocks, found = server.serve(RequestPlan(requests=2000, warmup_seconds=0.0))
    assert found == pytest.approx(qps)
    gaps = np.concatenate([np.diff(arrivals) for _, arrivals, _ in server.blocks[2:]])
    assert 1e9 / gaps.mean() == pytest.approx(qps, rel=0.1)
    waiting = np.mean([us > slowest_us for block in blocks["theirs"] for us in block])
    assert waiting < 0.35, "requests that find another one in service"


def test_warm_up_and_benchmark_last_at_least_as_long_as_asked():
    server = Server({"one": 10.0})
    kept = server.serve(RequestPlan(requests=100, warmup_seconds=0.5, benchmark_seconds=1.0))[0]["one"]
    assert server.now_s >= 1.5 and len(kept) % 2 == 0 and len(kept) * 52 / 2000 == pytest.approx(1.0, rel=0.3)


def test_nobody_is_served_without_entries():
    with pytest.raises(UsageError, match="nothing to serve"):
        latency.serve_blocks({}, RequestPlan(), random.Random(0))


def test_percentiles_come_from_the_samples():
    t = timing_of_samples("server", [float(i) for i in range(1, 102)])
    assert latency.percentile(t, 50) == 51.0 and latency.percentile(t, 99) == 100.0


class Bench:
    """In place of the clock of GPU time: three operand sets, and a log of what is asked."""

    stream, sets = 5, 3

    def __init__(self, log):
        self.log = log

    def __call__(self, problem, gpu_index, seed, gpu):
        self.problem = problem
        self.log.append(("clock", problem, gpu_index, seed))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("closed")

    @contextlib.contextmanager
    def current(self):
        self.log.append("current")
        yield
        self.log.append("no longer current")

    def operands(self, index):
        return f"a{index}", f"b{index}", f"c{index}"

    def bind(self, entry):
        self.log.append(("bind", entry.name))
        return [f"{entry.name} {i}" for i in range(3)]

    def synchronize(self):
        self.log.append("wait")


@pytest.fixture(name="log")
def log_fixture(monkeypatch):
    """The log of a server without a GPU; what serves a block only notes its calls."""
    log = []

    def serve(calls, stream, arrivals):
        log.append(("serve", list(calls), stream, len(arrivals)))
        times = np.arange(1.0, len(arrivals) + 1)
        return RequestTimes(times, times)

    monkeypatch.setattr(latency, "GpuClock", Bench(log))
    monkeypatch.setattr(latency, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(latency, "serve_requests", serve)
    monkeypatch.setattr(latency, "clock_us", lambda stream, arrivals: 0.5)
    return log


def test_server_mode_prepares_binds_waits_and_serves_in_that_order(log):
    one = SimpleNamespace(name="one", prepare=lambda bench: log.append("chosen"))
    two = SimpleNamespace(name="two")
    plan = RequestPlan(40.0, 200, warmup_seconds=0.0)
    found = latency.time_server({"one": one, "two": two}, "problem", plan, seed=3, gpu_index=2)
    before = [("clock", "problem", 2, 3), "chosen", "current", ("bind", "one"), ("bind", "two"), "wait"]
    assert log[:6] == before and log[-2:] == ["no longer current", "closed"]
    served = log[6:-2]
    assert len(served) == 2 + 2 * 4 and all(stream == 5 for _, _, stream, _ in served)
    assert (found.qps, found.clock_us) == (40.0, 0.5)
    for half in (found.choosing, found.judging):
        assert {name: len(t.samples_us) for name, t in half.items()} == {"one": 100, "two": 100}
        expected = [float(us) for us in range(LEAD_REQUESTS + 1, LEAD_REQUESTS + BLOCK_REQUESTS + 1)]
        assert half["two"] == timing_of_samples("server", 2 * expected, 1, 3)


@pytest.mark.parametrize("wrong", [False, True])
def test_calls_are_checked_before_any_is_served(log, wrong):
    def check(bench, calls):
        log.append(("check", bench.problem, calls))
        if wrong:
            raise DeviceError("a wrong result", "a right one", "report it")

    entries = {name: SimpleNamespace(name=name) for name in ("ours", "theirs")}
    plan = RequestPlan(requests=100, warmup_seconds=0.0)
    with pytest.raises(DeviceError) if wrong else contextlib.nullcontext():
        latency.time_server(entries, "problem", plan, check=check)
    place = log.index(("check", "problem", {name: [f"{name} {i}" for i in range(3)] for name in entries}))
    served = [index for index, entry in enumerate(log) if entry[0] == "serve"]
    assert served == [] if wrong else served[0] > place


def test_halves_are_every_other_block(log, monkeypatch):
    blocks = {"one": [[1.0], [2.0], [3.0], [4.0]]}
    monkeypatch.setattr(latency, "serve_blocks", lambda serve, plan, rng: (blocks, 7.0))
    found = latency.time_server({"one": SimpleNamespace(name="one")}, "problem", RequestPlan())
    assert found.choosing["one"].samples_us == (1.0, 3.0) and found.judging["one"].samples_us == (2.0, 4.0)


def test_calls_rotate_over_the_operand_sets_from_block_to_block(log):
    latency.time_server({"one": SimpleNamespace(name="one")}, "problem", RequestPlan(requests=100, warmup_seconds=0.0))
    starts = [calls[0] for entry in log if entry[0] == "serve" for _, calls, _, _ in [entry]]
    assert starts == ["one 0", "one 2", "one 0"], "blocks of 50, 52 and 52 requests"


def test_an_entry_with_native_calls_is_served_from_c_and_one_that_begins_does_so_before_each_block(log):
    def bind_native(problem, a, b, c, stream):
        return problem, a, b, c, stream

    native = SimpleNamespace(name="native", bind_native=bind_native)
    switching = SimpleNamespace(name="switching", begin=lambda: log.append("begin"))
    plan = RequestPlan(requests=100, warmup_seconds=0.0)
    latency.time_server({"native": native, "switching": switching}, "problem", plan)
    served = [entry for entry in log if entry == "begin" or entry[0] == "serve"]
    of_native = [calls for _, calls, _, _ in (e for e in served if e != "begin") if isinstance(calls[0], tuple)]
    assert of_native[0] == [("problem", f"a{i}", f"b{i}", f"c{i}", 5) for i in range(3)] and len(of_native) == 3
    after = [served[i + 1][1][0] for i, entry in enumerate(served) if entry == "begin"]
    assert len(after) == 3 and all(first.startswith("switching") for first in after)


@pytest.mark.parametrize("qps", [1e-9, 0.5, 1.0, 1e9])
def test_any_rate_above_zero_will_do(qps):
    latency.check_qps(qps)


def test_a_percentile_of_no_samples_is_refused():
    with pytest.raises(UsageError, match="the server timing has no samples"):
        latency.percentile(Timing("server", (), 1.0, 0.0), 50)
