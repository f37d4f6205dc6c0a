"""The clock's logic with a false driver and false time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rivals.timed_entries import time_entries

from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.judge import gpu_clock, stream_clock
from outblas.judge.rounds import timing_of_samples
from outblas.runtime import driver


class FalseDriver:
    """Counts what is created and destroyed."""

    def __init__(self, **returns):
        self.returns, self.log = returns, []
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=600)

    def __getattr__(self, name):
        def call(*arguments):
            self.log.append(name)
            value = self.returns.get(name, (0, name))
            return value() if callable(value) else value

        return call


def test_a_failed_capture_ends_it_and_keeps_the_first_error(monkeypatch):
    cu = FalseDriver()
    monkeypatch.setattr(driver, "driver", lambda: cu)

    def refuses(stream):
        raise DeviceError("cudaMalloc under capture", "none", "do not")

    with pytest.raises(DeviceError, match="cudaMalloc"):
        driver.capture_graph([refuses], 5)
    assert cu.log == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy"]


def test_a_capture_calls_each_call_in_order_on_the_stream(monkeypatch):
    cu, seen = FalseDriver(), []
    monkeypatch.setattr(driver, "driver", lambda: cu)
    driver.capture_graph([lambda s: seen.append(("a", s)), lambda s: seen.append(("b", s))], 5)
    assert seen == [("a", 5), ("b", 5)]


def false_bench(monkeypatch, cu):
    for module in (gpu_clock, stream_clock):
        monkeypatch.setattr(module, "driver", lambda: cu)
    bench = gpu_clock.GpuClock.__new__(gpu_clock.GpuClock)
    bench.problem = Problem(64, 64, 64)
    bench._tries, bench._max_plug_us = stream_clock.TRIES, stream_clock.MAX_PLUG_US
    bench._events, bench._plug_us, bench.stream, bench.sets, bench.repeats = [("s", "e")] * 8, 100.0, 5, 2, 4
    monkeypatch.setattr(bench, "synchronize", lambda: None, raising=False)
    return bench


def test_a_round_that_the_host_was_late_for_is_thrown_away(monkeypatch):
    bench = false_bench(monkeypatch, FalseDriver(cuEventElapsedTime=(0, 0.008)))
    queued = iter([False, False, True])
    monkeypatch.setattr(bench, "_queue", lambda works, before: next(queued), raising=False)
    assert bench.timed([lambda: None]) == [8.0]
    assert bench._plug_us == 400.0 and next(queued, "empty") == "empty"


def test_a_host_that_is_always_late_is_an_error_not_a_figure(monkeypatch):
    bench = false_bench(monkeypatch, FalseDriver())
    monkeypatch.setattr(bench, "_queue", lambda works, before: False, raising=False)
    with pytest.raises(DeviceError, match="ahead of the GPU"):
        bench.timed([lambda: None])


def test_times_go_back_to_their_entries_whatever_the_order(monkeypatch):
    bench = false_bench(monkeypatch, FalseDriver())
    entries = [gpu_clock.GraphEntry(str(i), f"graph{i}", [], repeats=4) for i in range(3)]
    monkeypatch.setattr(bench, "timed", lambda works: [40.0, 80.0, 120.0], raising=False)
    assert bench.round(entries, [2, 0, 1]) == [20.0, 30.0, 10.0]


def test_interleaved_orders_are_random_and_seeded(monkeypatch):
    bench = false_bench(monkeypatch, FalseDriver())
    entries = {str(i): gpu_clock.GraphEntry(str(i), f"graph{i}", [], repeats=4) for i in range(4)}

    def orders(seed):
        seen = []
        monkeypatch.setattr(bench, "round", lambda e, o: seen.append(tuple(o)) or [1.0] * 4, raising=False)
        bench.measure(entries, 7, seed)
        return seen

    assert orders(3) == orders(3) != orders(4) and len(set(orders(3))) > 3
    assert all(sorted(o) == [0, 1, 2, 3] for o in orders(3))
    before = orders(3)
    monkeypatch.setattr(bench, "problem", replace(bench.problem, m=128))
    assert orders(3) != before, "an error by place must not be that of all problems"


def test_a_quick_choice_drops_the_hopeless_after_one_timed_round(monkeypatch):
    """Of all: one untimed round and one timed; then those within 1.5 x the fastest only. What fails is left out."""
    cu = FalseDriver()
    bench = false_bench(monkeypatch, cu)
    us = {"slow": [1.0, 151.0], "level": [900.0, 150.0, 80.0, 90.0], "fast": [5.0, 100.0, 110.0, 120.0]}
    rounds = []

    def round_(entries, order):
        assert sorted(order) == list(range(len(entries)))
        rounds.append([entry.name for entry in entries])
        return [us[entry.name].pop(0) for entry in entries]

    def capture(name):
        if name == "broken":
            raise DeviceError("a", "b", "c")
        return gpu_clock.GraphEntry(name, object(), (), 4)

    monkeypatch.setattr(bench, "round", round_)
    monkeypatch.setattr(bench, "capture", capture)
    found = bench.quick({n: n for n in ("slow", "broken", "level", "fast")}, skip=DeviceError)
    assert rounds == [["slow", "level", "fast"]] * 2 + [["level", "fast"]] * 2
    assert {n: t.samples_us for n, t in found.items()} == {"level": (150.0, 80.0, 90.0), "fast": (100.0, 110.0, 120.0)}
    assert found["level"].median_us == 90.0 and found["fast"].repeats == bench.repeats
    assert bench.quick({"broken": "broken"}, skip=DeviceError) == {}


@pytest.mark.parametrize("cold", [False, True])
def test_a_cold_clock_chooses_by_cold_times_among_those_near_with_warm_caches(monkeypatch, cold):
    bench, bound = false_bench(monkeypatch, FalseDriver()), []
    bench.cold = cold
    warm, in_cold = {"a": 100.0, "b": 124.0, "far": 126.0, "broken": 110.0}, {"a": 300.0, "b": 200.0}
    quick = {name: timing_of_samples("offline", [us] * 3) for name, us in warm.items()}
    monkeypatch.setattr(bench, "quick", lambda entries, skip: quick)

    def bind(name):
        bound.append(name)
        if name == "broken":
            raise DeviceError("a", "b", "c")
        return [name]

    def cold_round(calls, rng):
        return [in_cold[name] for (name,) in calls]

    monkeypatch.setattr(bench, "bind", bind)
    monkeypatch.setattr(bench, "cold_round", cold_round)
    found = bench.quick_choice({n: n for n in warm}, skip=DeviceError)
    best = min(found, key=lambda name: found[name].median_us)
    assert (best, bound) == (("b", ["a", "b", "broken"]) if cold else ("a", []))
    assert found["a"].samples_us == ((300.0,) * 7 if cold else (100.0,) * 3)


def test_entries_are_prepared_then_captured_then_timed_and_always_freed(monkeypatch):
    cu, log = FalseDriver(), []
    bench = false_bench(monkeypatch, cu)
    entries = {name: SimpleNamespace(name=name) for name in ("a", "b", "late")}
    entries["b"].prepare = lambda clock: log.append(("prepare", clock is bench))

    def capture(entry):
        log.append(entry.name)
        if entry.name == "late":
            raise DeviceError("cannot be captured", "one that can", "leave it out")
        return gpu_clock.GraphEntry(entry.name, entry.name, (), 4)

    monkeypatch.setattr(bench, "capture", capture)
    monkeypatch.setattr(bench, "round", lambda graphs, order: [3.0 if g.name == "a" else 5.0 for g in graphs])
    with pytest.raises(DeviceError, match="cannot be captured"):
        time_entries(bench, entries)
    assert log == [("prepare", True), "a", "b", "late"] and cu.log == ["cuGraphExecDestroy"] * 2
    del entries["late"]
    found = time_entries(bench, entries, rounds=5, seed=1)
    assert {name: (t.median_us, len(t.samples_us)) for name, t in found.items()} == {"a": (3.0, 5), "b": (5.0, 5)}
    assert cu.log == ["cuGraphExecDestroy"] * 4


def test_freeing_a_graph_twice_is_harmless(monkeypatch):
    cu = FalseDriver()
    for module in (gpu_clock, stream_clock):
        monkeypatch.setattr(module, "driver", lambda: cu)
    graph = gpu_clock.GraphEntry("x", "executable", [], 1)
    graph.free()
    graph.free()
    assert cu.log == ["cuGraphExecDestroy"]


def queueing_bench(monkeypatch, late=(), host_us=10.0):
    """Return (bench, the stream's pieces in order) on a fake GPU.

    The GPU begins pieces ``late`` before they are queued whole. The host takes ``host_us`` to queue a round.
    """
    import contextlib

    torch = pytest.importorskip("torch")
    log = []

    class Device(FalseDriver):
        def __init__(self):
            super().__init__()
            self.cuEventRecord = lambda event, stream: log.append(event) or (0,)
            self.cuEventQuery = lambda event: (0 if int(event[5:]) in late else 600,)

    bench = false_bench(monkeypatch, Device())
    bench._events, bench.torch_stream = [(f"start{i}", f"stop{i}") for i in range(3)], None
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles), raising=False)
    times = iter([0.0, host_us / 1e6])
    monkeypatch.setattr(stream_clock, "perf_counter", lambda: next(times))
    return bench, log


def works_of(log):
    return [lambda i=i: log.append(f"work{i}") for i in range(3)]


@pytest.mark.parametrize(("late", "ahead"), [((), True), ((0,), False), ((1,), False), ((2,), False), ((0, 2), False)])
def test_a_round_counts_only_if_no_work_had_begun_before_it_was_queued(monkeypatch, late, ahead):
    bench, log = queueing_bench(monkeypatch, late)
    assert bench._queue(works_of(log), None) is ahead
    assert (bench._plug_us == 100.0) is not ahead, "only a good round says how long the host takes"


def test_an_event_that_failed_is_not_one_that_is_still_to_come(monkeypatch):
    bench, log = queueing_bench(monkeypatch)
    monkeypatch.setattr(gpu_clock.driver(), "cuEventQuery", lambda event: (700,))
    assert bench._queue(works_of(log), None) is False


@pytest.mark.parametrize("before", [False, True])
def test_each_work_stands_between_its_events_behind_one_plug(monkeypatch, before):
    bench, log = queueing_bench(monkeypatch)
    bench._queue(works_of(log), (lambda: log.append("evict")) if before else None)
    each = [(*["evict"] * before, f"start{i}", f"work{i}", f"stop{i}") for i in range(3)]
    assert log == [200_000, *(step for steps in each for step in steps)]


@pytest.mark.parametrize(("host_us", "plug_us"), [(10.0, 80.0), (100.0, 170.0), (1e6, 50_000.0)])
def test_the_plug_follows_the_host_upwards_at_once_and_slowly_downwards(monkeypatch, host_us, plug_us):
    bench, log = queueing_bench(monkeypatch, host_us=host_us)
    bench._queue(works_of(log), None)
    assert bench._plug_us == pytest.approx(plug_us, rel=1e-9)


def test_a_plug_does_not_grow_for_ever(monkeypatch):
    bench, tries = false_bench(monkeypatch, FalseDriver()), []
    monkeypatch.setattr(bench, "_queue", lambda works, before: tries.append(bench._plug_us) and False, raising=False)
    with pytest.raises(DeviceError, match="in 10 tries"):
        bench.timed([lambda: None])
    assert tries == [min(50_000.0, 100.0 * 2**i) for i in range(10)] and bench._plug_us == 50_000.0


class Numbered:
    """An entry whose calls name their operand set."""

    name = "numbered"

    def __init__(self, log):
        self._log = log

    def bind(self, problem, a, b, c):
        return lambda stream: self._log.append((a, stream))


def test_a_graph_rotates_over_the_operand_sets_and_is_freed_if_it_is_not_made(monkeypatch):
    cu, log = FalseDriver(cuGraphInstantiate=(0, "executable")), []
    bench = false_bench(monkeypatch, cu)
    monkeypatch.setattr(stream_clock, "capture_graph", lambda calls, stream: [call(stream) for call in calls])
    bench.problem, bench.data, bench.sets, bench.repeats = None, [(i, None, None) for i in range(3)], 3, 7
    graph = bench.capture(Numbered(log))
    assert log[:2] == [(0, 5), (1, 5)], "run once before: nothing is loaded under capture"
    assert log[2:] == [(i % 3, 5) for i in range(7)]
    assert (graph.executable, graph.repeats, len(graph.calls)) == ("executable", 7, 3)
    assert cu.log == ["cuGraphInstantiate", "cuGraphDestroy"]


def test_calls_that_share_are_bound_together(monkeypatch):
    log = []
    bench = false_bench(monkeypatch, FalseDriver())
    bench.problem, bench.data, bench.sets = "problem", ["first"], 1
    together = SimpleNamespace(bind_many=lambda problem, sets: [lambda stream: log.append((problem, *sets, stream))])
    (call,) = bench.bind(together)
    assert log == [("problem", "first", 5)] and callable(call)


def test_a_cold_round_is_the_median_of_four_calls_of_each_behind_evictions(monkeypatch):
    import random

    log, evict = [], object()
    bench = false_bench(monkeypatch, FalseDriver())
    monkeypatch.setattr(bench, "evict", evict, raising=False)

    def timed(works, before):
        assert before is evict
        for work in works:
            work()
        seen = {"one": [1.0, 2.0, 4.0, 99.0], "two": [10.0, 30.0, 50.0, 60.0]}
        return [seen[name].pop(0) for name, _ in log]

    monkeypatch.setattr(bench, "timed", timed, raising=False)
    entries = [[lambda s, n=name, i=i: log.append((n, i)) for i in range(2)] for name in ("one", "two")]
    assert bench.cold_round(entries, random.Random(1)) == [3.0, 40.0]
    for name in ("one", "two"):
        assert sorted(i for n, i in log if n == name) == [0, 0, 1, 1], "over the operand sets"
    assert [n for n, _ in log] != sorted(n for n, _ in log), "in a random order"


def test_events_are_made_once_and_given_back_once(monkeypatch):
    cu = FalseDriver()
    bench = false_bench(monkeypatch, cu)
    bench._events = []
    for count in (2, 1, 3):
        bench._more_events(count)
    assert cu.log == ["cuEventCreate"] * 6 and len(bench._events) == 3
    bench.close()
    bench.close()
    assert cu.log[6:] == ["cuEventDestroy"] * 6
