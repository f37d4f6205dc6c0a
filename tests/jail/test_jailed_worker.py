"""The handler of free kernels with everything below it replaced: each failure is a status, none an exception."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, GateFailed, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines, Options
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.workers import handler as plain
from outblas.workers.handler import WorkItem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import jailed_worker
from outblas_lab.jail import jailed_worker as free
from outblas_lab.jail.jailed_evaluator import decode, encode
from support.free_fixture import BODY, device_text, host_text
from support.gpus.known import H200

P = Problem(64, 64, 64)
PASSED = Verdict(Status.PASSED, ("static", "memory", "bound"), "", 0.5)
GOOD, HOST = FreeKernel.parse(device_text()), FreeKernel.parse(host_text(""))


class Kernel:
    def __init__(self, kernel):
        self.name, self.config, self.broken, self.forgotten = kernel.name, kernel, False, 0

    def bind(self, problem, *operands):
        return lambda stream: None

    def broken_workspace(self):
        return self.broken

    def release(self):
        self.forgotten += 1


class Bench:
    repeats, data, torch_stream, stream, problem, gpu_index = 8, None, None, 7, None, 0
    us = 4.0

    def operands(self, index):
        return (None, None, None)


class FakeClock:
    """The clock that judges: every entry takes ``Bench.us``, and fails as the test says."""

    failure, ratio, on_measure = None, 0.5, None

    def __init__(self, bench, operands):
        pass

    def measure(self, rivals, entries, options, rounds, prune):
        for entry in entries.values():
            entry.failure, entry.max_err_ratio = FakeClock.failure, FakeClock.ratio
        if FakeClock.on_measure is not None:
            FakeClock.on_measure()
        return {n: Timing("offline", (Bench.us,) * rounds, Bench.us, 0.0) for n in entries}


class FakeBenchCell(plain.BenchCell):
    def __init__(self, problem, options, baselines, *more):
        self.problem, self.bench = problem, Bench()
        self.prover = SimpleNamespace(
            call=lambda verdict: verdict, graph=lambda executable: PASSED, operands_intact=lambda: True
        )
        self.graphs, self._entries, self._left_out = {}, baselines, {}

    def close(self):
        pass


class Voice:
    def __init__(self):
        self.begun, self.answers = [], {}

    def begin(self, index):
        self.begun.append(index)

    def done(self, index, value):
        self.answers[index] = decode(encode(value))  # as it crosses to the driver


@pytest.fixture
def world(monkeypatch, tmp_path):
    """A handler whose proofs and checks say what ``world`` says."""
    made = SimpleNamespace(proved=[], verdicts={}, offence="", kernels={})
    monkeypatch.setattr(plain, "BenchCell", FakeBenchCell)
    monkeypatch.setattr("outblas.judge.faults.raise_if_context_lost", lambda error: error)

    def load(built, folder, cudart, gpu):
        made.kernels[built.kernel.name] = Kernel(built.kernel)
        made.kernels[built.kernel.name].broken = made.broken
        return made.kernels[built.kernel.name]

    def prove(kernel, problem, reason, level, gpu_index, trials):
        assert trials.seed, "what it draws is no secret"
        made.proved.append(problem)
        return made.verdicts.get(problem, PASSED)

    made.broken, made.launches = False, []
    monkeypatch.setattr(free, "load", load)
    monkeypatch.setattr(free, "check_launches", lambda call, stream: made.launches.append(stream))
    monkeypatch.setattr("outblas.judge.gates.prove", prove)
    monkeypatch.setattr(free, "JudgedClock", FakeClock)
    monkeypatch.setattr(FakeClock, "failure", None)
    monkeypatch.setattr(FakeClock, "on_measure", None)
    monkeypatch.setattr("outblas_lab.jail.fresh_operands.FreshOperands", lambda *a: None)
    monkeypatch.setattr(free, "snapshot", lambda: {"x": 1})
    monkeypatch.setattr(free, "what_changed", lambda before: made.offence)
    handler = free.FreeHandler(Options(0, H200, baselines=(), rounds=3), free.JailedCell(str(tmp_path), None, False))

    def ask(kernel, problem=P):
        voice = Voice()
        built = SimpleNamespace(kernel=kernel, counters=lambda: {"registers": 32.0})
        handler([(0, WorkItem(problem, kernel, None, False, built))], voice)
        made.voice = voice
        return voice.answers[0][0]

    made.ask = ask
    return made


def test_a_right_kernel_is_proved_on_neighbours_and_timed(world):
    found = world.ask(GOOD)
    assert found.status is Status.PASSED and found.timing.median_us == 4.0 and found.detail == ""
    assert world.proved[0] == P and len(world.proved) > 8
    assert world.voice.begun.count(0) > len(world.proved), "a sign of life before each proof"


def test_a_neighbour_that_is_wrong_is_named(world):
    world.verdicts[Problem(64, 64, 65)] = Verdict(Status.WRONG, ("static",), "error 3 times the bound")
    found = world.ask(GOOD)
    assert found.status is Status.WRONG and found.detail == "on 64_64_65: error 3 times the bound"


def test_a_kernel_that_allows_no_small_problem_is_proved_on_the_asked_one(world, monkeypatch):
    monkeypatch.setattr(Bench, "us", 40.0)
    big = Problem(8192, 8192, 64)
    found = world.ask(FreeKernel.parse(device_text(requires=["M == 8192", "N == 8192"])), big)
    assert found.status is Status.PASSED and world.proved == [big]


def test_a_broken_guard_of_the_workspace_is_a_memory_violation(world):
    world.broken = True
    found = world.ask(GOOD)
    assert found.status is Status.MEMORY_VIOLATION and "workspace" in found.detail


def test_a_problem_that_the_kernel_does_not_take_is_illegal(world):
    found = world.ask(FreeKernel.parse(device_text(requires=["K > 64"])))
    assert (found.status, found.detail) == (Status.ILLEGAL, "it requires K > 64")


@pytest.mark.parametrize(("kernel", "status"), [(GOOD, Status.PASSED), (HOST, Status.RULE_BROKEN)])
def test_only_host_code_can_offend_its_process(world, kernel, status):
    world.offence = "it set a timer"
    assert world.ask(kernel).status is status


def test_the_launches_of_host_code_are_checked_on_the_timed_problem(world, monkeypatch):
    assert world.ask(GOOD).status is Status.PASSED and not world.launches
    assert world.ask(HOST).status is Status.PASSED and world.launches == [7]

    def broken(call, stream):
        raise GateFailed(Status.RULE_BROKEN, "it sets an L2 policy")

    monkeypatch.setattr(free, "check_launches", broken)
    found = world.ask(HOST)
    assert (found.status, found.detail, found.timing) == (Status.RULE_BROKEN, "it sets an L2 policy", None)


@pytest.mark.parametrize(("inside", "joined", "kept"), [(0, 0, True), (2, 0, True), (0, 1, False), (2, 1, False)])
def test_host_code_that_does_not_wait_for_its_predecessor_breaks_the_rules(monkeypatch, inside, joined, kept):
    """A fake driver: a graph is its number of calls. Kernels of one call may overlap each other."""
    edges = {1: inside, 2: 2 * inside + joined}
    destroyed = []
    monkeypatch.setattr(jailed_worker, "capture_graph", lambda calls, stream: len(calls))
    monkeypatch.setattr(jailed_worker, "check_nodes", lambda graph: None)
    monkeypatch.setattr(jailed_worker, "count_programmatic_edges", edges.get)
    monkeypatch.setattr(jailed_worker, "driver", lambda: SimpleNamespace(cuGraphDestroy=destroyed.append))
    with contextlib.nullcontext() if kept else pytest.raises(GateFailed, match="programmatic"):
        jailed_worker.check_launches(lambda stream: None, 7)
    assert destroyed == [1, 2]


def test_what_fails_in_a_replay_gets_no_figure(world, monkeypatch):
    monkeypatch.setattr(FakeClock, "failure", Verdict(Status.WRONG, (), "error 9 times the bound in call 3 of 33"))
    found = world.ask(GOOD)
    assert found.status is Status.WRONG and found.timing is None
    assert found.detail == "after timing: error 9 times the bound in call 3 of 33"


def test_free_kernels_are_timed_in_mode_offline_only(world, tmp_path):
    handler = free.FreeHandler(
        Options(0, H200, baselines=(), rounds=3, mode="block"), free.JailedCell(str(tmp_path), None, False)
    )
    item = WorkItem(P, GOOD, None, False, SimpleNamespace(kernel=GOOD, counters=dict))
    with pytest.raises(UsageError, match="mode block does not support free kernels"):
        handler([(0, item)], Voice())


def test_a_time_below_the_floor_is_not_believed(world, monkeypatch):
    monkeypatch.setattr(Bench, "us", 0.5)
    found = world.ask(GOOD)
    assert found.status is Status.RULE_BROKEN and "faster than the floor" in found.detail and found.timing is None
    monkeypatch.setattr(Bench, "us", 0.99)
    found = world.ask(FreeKernel.parse(device_text(BODY + "int x;")))
    assert found.status is Status.PASSED and "within noise of the floor" in found.detail


def test_template_candidates_are_not_run_there(world):
    voice = Voice()
    handler = free.FreeHandler(Options(0, H200, baselines=(), rounds=3), free.JailedCell(".", None, False))
    handler([(0, WorkItem(P, Sm90WgmmaConfig(64, 64)))], voice)
    assert voice.answers[0][0].status is Status.ILLEGAL


def test_a_guard_that_breaks_while_it_is_timed_is_a_memory_violation(world, monkeypatch):
    def breaks():
        world.kernels[GOOD.name].broken = True

    monkeypatch.setattr(FakeClock, "on_measure", breaks)
    found = world.ask(GOOD)
    assert found.status is Status.MEMORY_VIOLATION and "after timing" in found.detail and found.timing is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("baselines_us", "cublas"), float("nan")), (("baselines_us", "cublas"), "4"),
        (("baselines_us", "cublas"), 10**20),
        (("speedup", "ratio"), float("inf")), (("speedup", "low"), None), (("speedup", "baseline"), 3),
        (("timing", "samples_us"), []), (("timing", "samples_us"), [1.0] * 200_000), (("timing", "repeats"), 0),
        (("timing", "repeats"), "8"), (("timing", "spread"), "0"), (("timing", "mode"), {}), (("timing", "more"), 1),
        (("verdict", "status"), "wrong"), (("verdict", "max_err_ratio"), 1.5), (("verdict", "max_err_ratio"), "0"),
        (("verdict", "max_err_ratio"), -1), (("verdict", "detail"), 7), (("verdict",), None), (("detail",), ["x"]),
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_no_answer(path, value):
    told = encode((passed(), Baselines()))
    place = told["evaluation"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((ValueError, TypeError)):
        decode(told)


def test_words_of_an_answer_are_cut_and_errors_beyond_numbers_are_none():
    verdict = Verdict(Status.WRONG, ("g" * 9000,) * 99, "d" * 9000, float("inf"))
    told = Evaluation(P, GOOD, Status.WRONG, "d" * 9000, verdict, counters={"registers": 9.0}, log="x")
    found, _ = decode(encode((told, None)))
    assert found.verdict.max_err_ratio is None and len(found.detail) == len(found.verdict.detail) < 1000
    assert len(found.verdict.gates) < 20 and len(found.verdict.gates[0]) < 1000 and not found.counters and not found.log
    assert decode(encode((passed(), None)))[0].verdict.max_err_ratio == 0.5


def passed():
    timing, speedup = Timing("offline", (1.0,), 1.0, 0.0), Speedup("cublas", 2.0, 1.9, 2.1)
    return Evaluation(P, GOOD, Status.PASSED, "", PASSED, timing, {"cublas": 4.0}, speedup)


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf"), "1", True])
def test_times_that_are_none_are_no_answer(us):
    value = encode((passed(), Baselines()))
    value["evaluation"]["timing"]["median_us"] = us
    with pytest.raises(ValueError):
        decode(value)
