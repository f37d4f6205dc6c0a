"""Whole timings of the clock with a fake driver: its objects, their order, and their release."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rivals import offline_times as time_offline_module  # noqa: E402
from rivals.offline_times import TimingEffort, time_offline  # noqa: E402

from outblas.core.errors import DeviceError, ToolchainMissing  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.core.roofline import floor_us  # noqa: E402
from outblas.judge import gpu_clock, operands, stream_clock  # noqa: E402
from outblas.judge.gpu_clock import (  # noqa: E402
    GpuClock,
    GraphEntry,
)
from outblas.judge.rounds import Prune, RoundOrders, timing_of_samples  # noqa: E402
from support.gpus.known import H200  # noqa: E402

PROBLEM = Problem(64, 64, 64)


def refuse(what):
    raise DeviceError(what, "a GPU that can", "leave it out")


class Session:
    """In place of the class GpuClock; entries whose names begin with "no" cannot do the problem."""

    log: list

    def __init__(self, *arguments, gpu, cold):
        self.log.append(("clock", *arguments))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.log.append("closed")

    def bind(self, entry):
        return refuse(entry.name) if entry.name.startswith("no") else ["call", entry.name]

    def capture(self, entry):
        if entry.name.startswith("no"):
            refuse(entry.name)
        return SimpleNamespace(name=entry.name, free=lambda: self.log.append(("freed", entry.name)))

    def measure(self, graphs, *limits):
        self.log.append(("warm", {name: graph.name for name, graph in graphs.items()}, limits))
        return refuse("lost") if "lost" in graphs else "timings"

    def measure_cold(self, calls, *limits):
        self.log.append(("cold", dict(calls), limits))
        return "cold timings"


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(Session, "log", [], raising=False)
    monkeypatch.setattr(time_offline_module, "GpuClock", Session)
    monkeypatch.setattr(time_offline_module, "gpu_of_device", lambda index: H200)
    return Session.log


def entries(*names):
    return {name: SimpleNamespace(name=name) for name in names}


def test_a_warm_timing_frees_its_graphs_and_closes_the_clock(log):
    asked = entries("one", "two")
    asked["two"].prepare = lambda bench: log.append(("chosen", type(bench)))
    assert time_offline(asked, PROBLEM) == "timings"
    assert log == [
        ("clock", PROBLEM, 0, 0), ("chosen", Session), ("warm", {"one": "one", "two": "two"}, (7, 0, 0.0, 0.0)),
        ("freed", "one"), ("freed", "two"), "closed",
    ]  # fmt: skip


def test_a_cold_timing_is_of_bound_calls_with_the_effort_asked_for(log):
    effort = TimingEffort(9, 1.5, 2.5)
    assert time_offline(entries("one"), PROBLEM, 3, effort, 4, cold=True) == "cold timings"
    assert log == [("clock", PROBLEM, 3, 4), ("cold", {"one": ["call", "one"]}, (9, 4, 1.5, 2.5)), "closed"]


@pytest.mark.parametrize("cold", [False, True])
def test_who_cannot_do_it_is_left_out_with_the_reason_or_ends_it(log, cold):
    left_out: dict[str, str] = {}
    time_offline(entries("one", "no", "two", "none"), PROBLEM, cold=cold, left_out=left_out)
    assert list(log[1][1]) == ["one", "two"] and log[-1] == "closed"
    assert list(left_out) == ["no", "none"] and left_out["none"].startswith("none; expected a GPU that can")
    log.clear()
    with pytest.raises(DeviceError, match="no; expected"):
        time_offline(entries("one", "no", "two"), PROBLEM, cold=cold)
    assert log[1:] == ([] if cold else [("freed", "one")]) + ["closed"]


def test_graphs_are_freed_when_the_timing_fails_and_an_error_of_no_kind_of_ours_is_not_kept(log):
    with pytest.raises(DeviceError, match="lost"):
        time_offline(entries("one", "lost"), PROBLEM, left_out={})
    assert log[2:] == [("freed", "one"), ("freed", "lost"), "closed"]
    asked = entries("one")
    asked["one"].prepare = lambda bench: 1 / 0
    with pytest.raises(ZeroDivisionError):
        time_offline(asked, PROBLEM, left_out={})


def test_the_least_effort_is_seven_rounds_and_the_clocks_numbers_are_those_of_the_text():
    assert TimingEffort() == TimingEffort(7, 0.0, 0.0)
    assert (gpu_clock.MIN_ROUNDS, gpu_clock.QUICK_ROUNDS, gpu_clock.COLD_CALLS_PER_ROUND) == (7, 3, 4)
    assert (gpu_clock.DROP_BEYOND_FASTEST, stream_clock._CYCLES_PER_US) == (1.5, 2000)


@pytest.fixture
def on_host(monkeypatch):
    """A clock whose operands are on the host; returns how it was made."""
    seen = SimpleNamespace(made=[], log=[])

    def false_operands(problem, sets, device, guard_bytes):
        seen.made.append((problem, sets, device, guard_bytes))
        return operands.Operands(problem, sets, "cpu", guard_bytes)

    stream = SimpleNamespace(cuda_stream=9)
    monkeypatch.setattr(gpu_clock, "Operands", false_operands)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.log.append(("set", index)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: seen.log.append(("stream", index)) or stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: seen.log.append(("wait", index)))
    return seen


@pytest.mark.parametrize(("mnk", "repeats", "sets"), [((64, 64, 64), 32, 32), ((4096, 1024, 64), 32, 23)])
@pytest.mark.parametrize("arguments", [{}, {"gpu_index": 2, "seed": 5, "guard_bytes": 512}])
def test_a_clock_has_as_many_operand_sets_as_200_mb_and_its_repeats_allow(on_host, arguments, mnk, repeats, sets):
    problem = Problem(*mnk)
    assert round(300 / floor_us(problem, H200)) >= 32 and -(-200_000_000 // problem.bytes) >= sets
    index, seed = arguments.get("gpu_index", 0), arguments.get("seed", 0)
    with GpuClock(problem, **arguments, gpu=H200) as clock:
        assert on_host.made == [(problem, sets, f"cuda:{index}", arguments.get("guard_bytes", 4096))]
        assert on_host.log == [("set", index), ("stream", index), ("wait", index)]
        assert (clock.repeats, clock.sets, clock.stream, clock.gpu_index) == (repeats, sets, 9, index)
        assert (clock._plug_us, clock._events, clock.problem) == (200.0, [], problem)
        generator = torch.Generator().manual_seed(seed)
        first = torch.empty(problem.m, problem.k, dtype=torch.float16).normal_(generator=generator)
        assert torch.equal(clock.operands(0)[0], first)
        assert clock.operands(sets - 1)[2].shape == (problem.m, problem.n)
    assert clock.data is None


def bare_clock(monkeypatch, **attributes):
    clock = GpuClock.__new__(GpuClock)
    given = {"repeats": 6, "sets": 2, "_events": [], "gpu_index": 1, "_evictor": None, "problem": PROBLEM}
    for name, value in (given | attributes).items():
        setattr(clock, name, value)
    return clock


@pytest.mark.parametrize("count", [1, 2, 3])
def test_binding_runs_the_calls_of_two_sets_at_most(monkeypatch, count):
    log = []
    clock = bare_clock(monkeypatch, data=[(i, -i, 10 * i) for i in range(count)], sets=count, stream=9)
    entry = SimpleNamespace(bind=lambda p, a, b, c: lambda stream: log.append((p, a, b, c, stream)))
    assert len(clock.bind(entry)) == count
    assert log == [(PROBLEM, i, -i, 10 * i, 9) for i in range(min(2, count))]


@pytest.mark.parametrize("cold", [False, True])
def test_a_measurement_is_of_seven_rounds_and_one_untimed_in_the_seeds_order(monkeypatch, cold):
    clock, us, orders = bare_clock(monkeypatch), iter(range(1, 100)), []
    graphs = {name: GraphEntry(name, name, (), 6) for name in "abc"}

    def round_(given, order):
        orders.append(list(order))
        return [(10.0 if entry.name == "a" else 20.0) + next(us) for entry in given]

    def cold_round(calls, rng):
        orders.append(rng.random())
        return [(10.0 if name == "a" else 20.0) + next(us) for name in calls]

    clock.round, clock.cold_round = round_, cold_round
    found = clock.measure_cold({name: name for name in "abc"}) if cold else clock.measure(graphs)
    mode, repeats = ("offline_cold", 1) if cold else ("offline", 6)
    for place, (name, least) in enumerate(zip("abc", (10.0, 20.0, 20.0), strict=True)):
        taken = [least + 3 * turn + place + 1 for turn in range(1, 8)]
        assert found[name] == timing_of_samples(mode, taken, repeats, 2)
    seed = f"0/{PROBLEM.key}"
    rng, drawn = random.Random(seed), RoundOrders(seed)
    assert orders == [rng.random() if cold else drawn.next(3) for _ in range(8)]
    orders.clear()
    pruned = Prune(2, lambda medians: {"b", "c"})
    found = (
        clock.measure_cold({name: name for name in "abc"}, 3, 5, prune=pruned)
        if cold else clock.measure(graphs, 3, 5, prune=pruned)
    )  # fmt: skip
    assert {name: len(t.samples_us) for name, t in found.items()} == {"a": 3, "b": 2, "c": 2} and len(orders) == 4
    assert clock.measure({}) == {}


def test_eviction_reads_twice_the_l2_on_the_clocks_own_stream(monkeypatch):
    import contextlib

    log, zeros, empty, total = [], torch.zeros, torch.empty, torch.sum

    @contextlib.contextmanager
    def on(stream):
        log.append(("on", stream))
        yield
        log.append("off")

    def made(how):
        def make(shape, dtype, device):
            log.append((shape, dtype, str(device)))
            return how(shape, dtype=dtype)

        return make

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(L2_cache_size=i * 2**20))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: log.append(("wait", index)))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "zeros", made(zeros))
    monkeypatch.setattr(torch, "empty", made(empty))
    monkeypatch.setattr(torch, "sum", lambda t, dim, out: log.append((t.nbytes, dim)) or total(t, dim=dim, out=out))
    clock = bare_clock(monkeypatch, torch_stream="own", gpu_index=3)
    clock.evict()
    clock.evict()
    read = [("on", "own"), (2 * 3 * 2**20, 1), "off"]
    assert log == [((4096, 384), torch.float32, "cuda:3"), (4096, torch.float32, "cpu"), ("wait", 3), *read, *read]


@pytest.mark.parametrize(
    ("index", "count", "available", "expected"),
    [(0, 1, True, None), (3, 4, True, None), (-1, 4, True, "an index below 4"), (4, 4, True, "an index below 4"),
        (6, 4, True, "an index below 4"),
     (1, 1, True, "an index below 1"), (0, 4, False, "a CUDA GPU"), (0, 0, True, "a CUDA GPU")],
)  # fmt: skip
def test_a_gpu_must_be_there(monkeypatch, index, count, available, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if expected is None:
        assert gpu_clock._cuda_torch(index) is torch
    else:
        with pytest.raises(DeviceError, match=f"GPU {index} not found; expected {expected}"):
            gpu_clock._cuda_torch(index)


def test_without_torch_there_is_no_clock(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ToolchainMissing, match="torch is not installed"):
        gpu_clock._cuda_torch(0)


def test_skipped_errors_may_be_one_or_several():
    assert gpu_clock._classes(KeyError) == (KeyError,)
    assert gpu_clock._classes((KeyError, OSError)) == (KeyError, OSError) and gpu_clock._classes(()) == ()


def test_graphs_and_events_are_made_without_flags(monkeypatch):
    log = []
    cu = SimpleNamespace(
        cuGraphInstantiate=lambda *arguments: log.append(arguments) or (0, "executable"),
        cuGraphDestroy=lambda graph: (0,),
        cuEventCreate=lambda flags: log.append(flags) or (0, len(log)),
    )
    for module in (gpu_clock, stream_clock):
        monkeypatch.setattr(module, "driver", lambda: cu)
    monkeypatch.setattr(stream_clock, "capture_graph", lambda calls, stream: ("graph", len(calls), stream))
    clock = bare_clock(monkeypatch, data=[(0, 0, 0)] * 2, stream=9)
    graph = clock.capture(SimpleNamespace(name="x", bind=lambda *_: lambda stream: None))
    assert log == [(("graph", 6, 9), 0)] and (graph.name, graph.executable, graph.repeats) == ("x", "executable", 6)
    log.clear()
    clock._more_events(2)
    assert log == [0] * 4 and clock._events == [(1, 2), (3, 4)]


def test_a_time_is_a_part_of_its_graph_and_may_be_a_fraction(monkeypatch):
    clock = bare_clock(monkeypatch, stream=9)
    monkeypatch.setattr(gpu_clock, "driver", lambda: SimpleNamespace(cuGraphLaunch=None))
    clock.timed = lambda works: [1.0, 10.0]
    assert clock.round([GraphEntry("a", "a", (), 4), GraphEntry("b", "b", (), 8)], [1, 0]) == [2.5, 0.125]


@pytest.mark.parametrize("fails", [False, True])
def test_a_quick_choice_frees_all_its_graphs(monkeypatch, fails):
    log = []
    clock = bare_clock(monkeypatch)
    monkeypatch.setattr(gpu_clock, "driver", lambda: SimpleNamespace(cuGraphExecDestroy=log.append))
    clock.capture = lambda entry: refuse(entry) if entry == "no" else GraphEntry(entry, entry, (), 6)
    clock.round = lambda given, order: refuse("lost") if fails else [1.0 for _ in given]
    if fails:
        with pytest.raises(DeviceError, match="lost"):
            clock.quick({"a": "a", "b": "b"})
        with pytest.raises(DeviceError, match="no; expected"):
            clock.quick({"c": "c", "no": "no"})
    else:
        assert [len(t.samples_us) for t in clock.quick({"a": "a", "b": "b"}).values()] == [3, 3]
    assert log == ["a", "b", *["c"] * fails]


@pytest.mark.parametrize("seed", range(6))
def test_cold_calls_of_a_round_are_of_four_operand_sets_in_a_row(monkeypatch, seed):
    clock, log = bare_clock(monkeypatch, sets=6, stream=9), []

    def timed(works, before):
        for work in works:
            work()
        return [1.5] * len(works)

    clock.timed = timed
    calls = [[lambda stream, name=name, i=i: log.append((name, i)) for i in range(6)] for name in "ab"]
    assert clock.cold_round(calls, random.Random(seed)) == [1.5, 1.5] and len(log) == 8
    rng = random.Random(seed)
    rng.shuffle(list(range(8)))
    first = rng.randrange(6)
    for name in "ab":
        assert {i for n, i in log if n == name} == {(first + j) % 6 for j in range(4)}
