"""The worker's handler with everything below it replaced: each failure is a status, none an exception."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outblas.core.errors import CompileError, DeviceError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import CANDIDATES_PER_ROUNDS, Options
from outblas.judge.faults import ContextLost
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.workers import handler as ev
from support.gpus.known import H200
from support.handler_fixture import (  # noqa: F401
    BAD,
    GOOD,
    PASSED,
    PROBLEM,
    SLOW,
    Bench,
    Emit,
    FakeBenchCell,
    Graph,
    Prover,
    handler_fixture,
    run,
)


def test_a_passed_candidate_carries_its_figures_and_the_baselines(handler):
    before = Graph.freed
    ((one, baselines),), emit = run(handler, GOOD)
    assert one.status is Status.PASSED and one.timing.median_us == 2.0 and len(one.timing.samples_us) == 3
    assert one.baselines_us == {"cublas": 4.0} and one.counters == {"registers": 64.0}
    assert (one.speedup.baseline, one.speedup.ratio) == ("cublas", 2.0)
    assert baselines.left_out == {"nvmmh": "none"} and baselines.details["cublas"]
    assert Graph.freed == before + 1 and emit.log == [None, 10, 10]


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (CompileError("no", "yes", "do"), Status.COMPILE_ERROR),
        (ev._Static("accumulates in fp16"), Status.STATIC_REJECTED),
        (Verdict(Status.WRONG, ("static",), "error 9 times the bound", 9.0), Status.WRONG),
        (Verdict(Status.MEMORY_VIOLATION, ("static",), "behind C"), Status.MEMORY_VIOLATION),
    ],
)
def test_a_failure_is_a_status_and_the_others_are_timed(handler, found, status):
    handler.kernels[BAD] = found
    ((good, _), (bad, _), (also, _)), _ = run(handler, GOOD, BAD, SLOW)
    assert bad.status is status and bad.detail and bad.timing is None and bad.verdict.status is status
    assert good.status is also.status is Status.PASSED


def test_an_illegal_config_is_not_compiled(handler, monkeypatch):
    monkeypatch.setattr("outblas.kernels.legality.why_illegal", lambda p, c, g: "too large" if c == BAD else None)
    handler.kernels[BAD] = AssertionError("compiled")
    ((bad, _),), _ = run(handler, BAD)
    assert (bad.status, bad.detail) == (Status.ILLEGAL, "too large")


@pytest.mark.parametrize("error", [DeviceError("no", "yes", "do"), ValueError("odd"), RuntimeError("torch")])
def test_whatever_binding_raises_is_the_candidates_failure(handler, error, monkeypatch):
    def refuse(self, kernel):
        raise error

    monkeypatch.setattr(Bench, "capture", refuse)
    ((bad, _),), _ = run(handler, GOOD)
    assert bad.status is Status.LAUNCH_ERROR and str(error) in bad.detail


def test_a_lost_context_is_a_fault_of_the_candidate_in_hand(handler, monkeypatch):
    def lost(error):
        raise ContextLost("CUDA_ERROR_ILLEGAL_ADDRESS")

    def refuse(self, kernel):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Bench, "capture", refuse)
    monkeypatch.setattr("outblas.judge.faults.raise_if_context_lost", lost)
    emit = Emit()
    with pytest.raises(ContextLost):
        handler([(7, ev.WorkItem(PROBLEM, GOOD))], emit)
    assert emit.log[-1] == 7 and not emit.answers


def test_a_kernel_that_goes_wrong_while_it_is_timed_has_no_figure(handler, monkeypatch):
    monkeypatch.setattr(Prover, "after", Verdict(Status.WRONG, ("static", "memory"), "NaN"))
    ((bad, _),), _ = run(handler, GOOD)
    assert bad.status is Status.WRONG and "after timing" in bad.detail and bad.timing is None


def test_chunks_blame_no_one_and_a_lone_candidate_itself(handler):
    configs = [Sm90WgmmaConfig(64, 8 * i) for i in range(1, CANDIDATES_PER_ROUNDS + 2)]
    _, emit = run(handler, *configs)
    assert emit.log[CANDIDATES_PER_ROUNDS + 1] is None  # the full chunk is timed
    assert emit.log[-2:] == [
        10 + CANDIDATES_PER_ROUNDS,
        10 + CANDIDATES_PER_ROUNDS,
    ]  # the last is proved, then timed, alone


def test_a_problem_that_does_not_fit_is_reported_for_each_pair(handler, monkeypatch):
    def refuse(problem, options, baselines, phase_timer):
        raise DeviceError("needs 99 GB", "that much", "a smaller one")

    monkeypatch.setattr(ev, "BenchCell", refuse)
    ((one, _), (two, _), (nothing, report)), _ = run(handler, GOOD, SLOW, None)
    assert one.status is two.status is Status.LAUNCH_ERROR and "99 GB" in one.detail
    assert nothing is None and "99 GB" in report.left_out["all"]


def test_baselines_alone_can_be_asked_for(handler):
    ((nothing, report),), _ = run(handler, None)
    assert nothing is None and report.timings["cublas"].median_us == 4.0


def test_baselines_that_are_asked_for_first_keep_no_candidate_waiting(handler):
    ((nothing, report), (one, _), (two, _)), emit = run(handler, None, GOOD, SLOW)
    assert nothing is None and report.timings["cublas"].median_us == 4.0
    assert one.status is two.status is Status.PASSED and emit.log == [None, 11, 12, None]


def test_a_candidate_is_proved_on_the_operands_whose_result_is_judged(handler, monkeypatch):
    """The prover judges the first set."""
    bound = []
    monkeypatch.setattr(Bench, "operands", lambda self, index: (f"a{index}", f"b{index}", f"c{index}"))

    def kernel(problem, config):
        return SimpleNamespace(bind=lambda *given: bound.append(given) or PASSED), {}

    handler._kernel = kernel
    run(handler, GOOD)
    assert bound == [(PROBLEM, "a0", "b0", "c0")]


def test_a_full_chunk_is_timed_at_once_and_the_rest_together(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="cell", rounds=3, baselines=("cublas",), chunk=2))
    timed = []
    measure = Bench.measure
    monkeypatch.setattr(
        Bench, "measure", lambda self, graphs, *rest: timed.append(list(graphs)) or measure(self, graphs, *rest)
    )
    configs = [Sm90WgmmaConfig(64, 8 * i) for i in range(1, 6)]
    _, emit = run(handler, *configs)
    assert timed == [["cublas", "10", "11"], ["cublas", "12", "13"], ["cublas", "14"]]
    assert emit.log == [None, 10, 11, None, 12, 13, None, 14, 14]


@pytest.mark.parametrize(
    ("change", "timed"), [({"rounds": 3}, True), ({"rounds": 2}, False), ({"rounds": 3, "speedups": False}, False)]
)
def test_a_speed_up_needs_three_rounds_and_the_wish(handler, monkeypatch, change, timed):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="cell", baselines=("cublas",), **change))
    ((one, _),), _ = run(handler, GOOD)
    assert one.status is Status.PASSED and (one.speedup is not None) is timed


@pytest.mark.parametrize("recheck", [True, False])
def test_without_a_second_look_the_first_verdict_counts(handler, monkeypatch, recheck):
    options = Options(0, H200, level="cell", rounds=3, baselines=("cublas",), recheck=recheck)
    monkeypatch.setattr(handler, "_options", options)
    monkeypatch.setattr(Prover, "after", Verdict(Status.WRONG, ("static",), "NaN"))
    monkeypatch.setattr(Prover, "operands_intact", lambda self: recheck)
    ((one, _),), _ = run(handler, GOOD)
    assert one.status is (Status.WRONG if recheck else Status.PASSED)


@pytest.mark.parametrize(
    ("full", "cell", "worst"), [(0.7, 0.5, 0.7), (0.3, 0.5, 0.5), (None, 0.5, 0.5), (0.3, None, 0.3)]
)
def test_the_larger_error_of_both_proofs_is_reported(handler, monkeypatch, full, cell, worst):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: Verdict(Status.PASSED, ("rules",), "", full))
    handler.kernels[GOOD] = Verdict(Status.PASSED, ("static",), "", cell)
    ((one, _),), _ = run(handler, GOOD)
    assert (one.verdict.gates, one.verdict.max_err_ratio, one.verdict.detail) == (("rules",), worst, "")


def test_a_problem_is_set_up_once_with_what_its_first_item_names(handler, monkeypatch):
    made, named = [], []

    class Named(FakeBenchCell):
        def __init__(self, problem, options, baselines, phase_timer):
            super().__init__(problem, options, baselines, phase_timer)
            made.append((problem, sorted(baselines)))

        def close(self):
            made.append("closed")

    monkeypatch.setattr(ev, "BenchCell", Named)
    handler._baselines["nvmmh"] = SimpleNamespace(set_configs=named.append)
    for name, fallback in handler._fallbacks.items():
        monkeypatch.setattr(fallback, "name_algorithm", lambda *given, name=name: named.append((name, *given)))
    other, emit = Problem(128, 64, 64), Emit()
    handler([
        (0, ev.WorkItem(PROBLEM, GOOD, SLOW)), (1, ev.WorkItem(PROBLEM, SLOW, BAD)),
        (2, ev.WorkItem(other, GOOD, None, fallback="", second="id=66")),
    ], emit)  # fmt: skip
    handler([(3, ev.WorkItem(other, SLOW))], emit)
    first = ["cublas", "nvmmh"]
    assert made == [(PROBLEM, first), "closed", (other, sorted([*first, "fallback", "second_algorithm"]))]
    assert named == [{PROBLEM: SLOW}, {other: None}, ("fallback", other, ""), ("second_algorithm", other, "id=66")]
    assert sorted(emit.answers) == [0, 1, 2, 3]


def test_a_kernel_that_another_worker_proved_by_name_is_not_proved_in_full(handler, monkeypatch):
    from outblas.core.config import config_name

    options = Options(0, H200, level="full", rounds=3, baselines=("cublas",), proved=frozenset({config_name(GOOD)}))
    monkeypatch.setattr(handler, "_options", options)
    full = []
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: full.append(a) or PASSED)
    run(handler, GOOD)
    assert not full
    run(handler, SLOW)
    assert len(full) == 1


def test_a_kernel_that_cannot_be_loaded_is_a_status(handler):
    handler.kernels[BAD] = DeviceError("cuModuleLoadData failed", "a cubin", "do")
    ((bad, _),), _ = run(handler, BAD)
    assert bad.status is Status.LAUNCH_ERROR and "cuModuleLoadData" in bad.detail


def test_architectures():
    from outblas.core.roofline import architecture
    from support.gpus.known import H200

    assert architecture(H200) == "sm_90a"


def test_a_worker_is_warm_before_it_is_asked(monkeypatch):
    """Costs that a process pays once (torch's import, CUDA's context, cuBLAS) are in no candidate's time."""
    done = []

    class Small(FakeBenchCell):
        def __init__(self, problem, options, baselines, phase_timer):
            super().__init__(problem, options, baselines, phase_timer)
            done.append(("made", problem.flops < 1e9, options.benchmark_seconds))

        def measure_baselines(self, options):
            done.append(("timed", options.warmup_seconds))

        def close(self):
            done.append("closed")

    monkeypatch.setattr(ev, "BenchCell", Small)
    handler = ev.make_handler(
        Options(0, H200, baselines=("cublas", "nvmmh"), warmup_seconds=5.0, benchmark_seconds=5.0)
    )
    assert done == [("made", True, 0.0), ("timed", 0.0), "closed"]
    account = handler.phase_timer.totals()
    assert account.seconds["start"] > 0 and not account.counts, "and counts as no work"
    assert handler._baselines["nvmmh"].detail(ev._WARM_UP) == "", "nobody is asked for a choice"


def test_a_gpu_that_cannot_be_used_is_told_at_the_start(monkeypatch):
    def refuse(*parts):
        raise DeviceError("no CUDA device", "one", "do")

    monkeypatch.setattr(ev, "BenchCell", refuse)
    with pytest.raises(DeviceError, match="no CUDA device"):
        ev.make_handler(Options(0, H200, baselines=()))


def test_operands_overwritten_while_they_are_timed_cost_all_that_were_timed(handler, monkeypatch):
    monkeypatch.setattr(Prover, "operands_intact", lambda self: False)
    found, _ = run(handler, GOOD, SLOW)
    for one, _ in found:
        assert one.status is Status.MEMORY_VIOLATION and one.timing is None and "after timing" in one.detail


def test_the_ledger_counts_what_was_done(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",), chunk=2))
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: PASSED)
    run(handler, GOOD, SLOW, BAD)
    run(handler, GOOD)
    run(handler, GOOD, problem=Problem(128, 64, 64))
    account = handler.phase_timer.totals()
    assert account.counts == {"desks": 2, "candidates": 5, "kernels proved": 3, "chunks": 4}
    assert {"idle", "batch", "load", "prove", "cell", "capture", "time", "recheck"} == account.seconds.keys()


def test_the_desk_accounts_for_its_parts(monkeypatch):
    """lt_auto chooses once per problem, however often the problem comes back."""
    from outblas.core.phase_times import PhaseTimer

    class Auto:
        name, chosen = "lt_auto", ""

        def prepare(self, bench):
            self.chosen = "index=0"

        def detail(self, problem):
            return self.chosen

    monkeypatch.setattr(
        "outblas.judge.gpu_clock.GpuClock", lambda *a, **b: SimpleNamespace(data=0, torch_stream=0, capture=Graph)
    )
    monkeypatch.setattr("outblas.judge.gates.CellProver", lambda *a: Prover())
    phase_timer, auto = PhaseTimer("idle"), Auto()
    for _ in range(2):
        assert ev.BenchCell(PROBLEM, Options(0, H200), {"lt_auto": auto}, phase_timer).graphs.keys() == {"lt_auto"}
    account = phase_timer.totals()
    assert account.counts == {"algorithms chosen": 1}
    assert {"idle", "operands", "autotune", "baselines"} == account.seconds.keys()
