"""The worker's handler with everything below it replaced: each failure is a status, none an exception."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from outblas import worker as ev
from outblas.errors import CompileError, DeviceError
from outblas.evaluation import Status, Timing, Verdict
from outblas.kernels.families.sm80_direct_gemm import FAMILY as DIRECT
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.problem import Problem
from outblas.sandbox import Faulted
from outblas.trials import Shelf

PROBLEM = Problem(64, 64, 64)
GOOD, SLOW, BAD = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 128), Sm90WgmmaConfig(64, 32)
PASSED = Verdict(Status.PASSED, ("static", "memory", "bound"), "", 0.5)


class Graph:
    freed = 0

    def __init__(self, name):
        self.name, self.executable = name, name

    def free(self):
        Graph.freed += 1


class Bench:
    repeats = 8

    def operands(self, index):
        return (None, None, None)

    def capture(self, kernel):
        return Graph(kernel)

    def measure(self, graphs, rounds, seed, warmup_seconds, benchmark_seconds, prune=None):
        figures = {name: 4.0 if name == "cublas" else 2.0 for name in graphs}
        return {name: Timing("offline", (us,) * rounds, us, 0.0) for name, us in figures.items()}


class Prover:
    after = PASSED

    def call(self, call):
        return call

    def graph(self, executable):
        return self.after

    def whole(self):
        return True


class Desk(ev.Desk):
    def __init__(self, problem, options, baselines, ledger):
        self.problem, self.bench, self.prover = problem, Bench(), Prover()
        self.graphs, self._entries, self._left_out = {"cublas": Graph("cublas")}, baselines, {"nvmmh": "none"}

    def close(self):
        pass


@pytest.fixture
def handler(monkeypatch):
    monkeypatch.setattr(ev, "Desk", Desk)
    monkeypatch.setattr("outblas.kernels.legality.why_illegal", lambda p, c, g: None)
    monkeypatch.setattr("outblas.faults.or_fault", lambda error: error)
    made = ev.Handler(ev.Options(level="cell", rounds=3, baselines=("cublas",)))
    made.kernels = {}
    made._trials = Shelf()

    def kernel(problem, config):
        found = made.kernels.get(config, PASSED)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(bind=lambda *a: found), {"registers": 64.0}

    made._kernel = kernel
    return made


class Emit:
    def __init__(self):
        self.log, self.answers = [], {}

    def begin(self, index):
        self.log.append(index)

    def done(self, index, value):
        assert index not in self.answers
        self.answers[index] = value


def run(handler, *configs, problem=PROBLEM):
    emit = Emit()
    handler([(10 + i, ev.Item(problem, c)) for i, c in enumerate(configs)], emit)
    assert sorted(emit.answers) == list(range(10, 10 + len(configs)))
    return [emit.answers[10 + i] for i in range(len(configs))], emit


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
        raise Faulted("CUDA_ERROR_ILLEGAL_ADDRESS")

    def refuse(self, kernel):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Bench, "capture", refuse)
    monkeypatch.setattr("outblas.faults.or_fault", lost)
    emit = Emit()
    with pytest.raises(Faulted):
        handler([(7, ev.Item(PROBLEM, GOOD))], emit)
    assert emit.log[-1] == 7 and not emit.answers


def test_a_kernel_that_goes_wrong_while_it_is_timed_has_no_figure(handler, monkeypatch):
    monkeypatch.setattr(Prover, "after", Verdict(Status.WRONG, ("static", "memory"), "NaN"))
    ((bad, _),), _ = run(handler, GOOD)
    assert bad.status is Status.WRONG and "after timing" in bad.detail and bad.timing is None


def test_chunks_blame_no_one_and_a_lone_candidate_itself(handler):
    configs = [Sm90WgmmaConfig(64, 8 * i) for i in range(1, ev.CHUNK + 2)]
    _, emit = run(handler, *configs)
    assert emit.log[ev.CHUNK + 1] is None  # the full chunk is timed
    assert emit.log[-2:] == [10 + ev.CHUNK, 10 + ev.CHUNK]  # the last is proved, then timed, alone


def test_a_problem_that_does_not_fit_is_reported_for_each_pair(handler, monkeypatch):
    def refuse(problem, options, baselines, ledger):
        raise DeviceError("needs 99 GB", "that much", "a smaller one")

    monkeypatch.setattr(ev, "Desk", refuse)
    ((one, _), (two, _), (nothing, report)), _ = run(handler, GOOD, SLOW, None)
    assert one.status is two.status is Status.LAUNCH_ERROR and "99 GB" in one.detail
    assert nothing is None and "99 GB" in report.left_out["all"]


def test_baselines_alone_can_be_asked_for(handler):
    ((nothing, report),), _ = run(handler, None)
    assert nothing is None and report.timings["cublas"].median_us == 4.0


def test_a_kernel_that_cannot_be_loaded_is_a_status(handler):
    handler.kernels[BAD] = DeviceError("cuModuleLoadData failed", "a cubin", "do")
    ((bad, _),), _ = run(handler, BAD)
    assert bad.status is Status.LAUNCH_ERROR and "cuModuleLoadData" in bad.detail


def test_architectures():
    from outblas.roofline import H200

    assert ev.architecture(H200) == "sm_90a"


def test_a_full_proof_is_made_once_per_config_and_kind(handler, monkeypatch):
    proved = []
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))

    def prove_each(kernel, problems, gpu, shelf):
        proved.extend(problems)
        return Verdict(Status.PASSED, ("rules",), "", 0.7)

    monkeypatch.setattr("outblas.verify.prove_each", prove_each)
    ((one, _),), _ = run(handler, GOOD)
    count = len(proved)
    assert count > 3 and one.verdict.gates == ("rules",) and one.verdict.max_err_ratio == 0.7
    run(handler, GOOD, problem=Problem(128, 128, 128))
    assert len(proved) == count
    run(handler, GOOD, problem=Problem(128, 128, 128, "NN"))
    assert len(proved) == 2 * count


def test_what_kernels_are_proved_with_is_kept_from_one_to_the_next(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))
    shelves = []
    monkeypatch.setattr("outblas.verify.prove_each", lambda *a: shelves.append(a[-1]) or PASSED)
    run(handler, GOOD)
    run(handler, replace(GOOD, stages=GOOD.stages + 1))
    assert len(shelves) == 2 and shelves[0] is shelves[1]


def test_a_kernel_without_representatives_is_proved_on_the_problem_itself(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))
    monkeypatch.setattr(ev, "representatives", lambda problem, config, gpu: [])
    asked = []
    monkeypatch.setattr("outblas.verify.prove_each", lambda kernel, problems, *rest: asked.extend(problems) or PASSED)
    run(handler, GOOD)
    assert asked == [PROBLEM]


def test_every_proof_has_a_sign_of_life_of_its_own(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))
    log = []

    def prove_each(kernel, problems, gpu, shelf):
        log.extend(len(emit.log) for _ in problems)
        return PASSED

    monkeypatch.setattr("outblas.verify.prove_each", prove_each)
    emit = Emit()
    handler([(7, ev.Item(PROBLEM, GOOD))], emit)
    assert len(log) > 3 and log == list(range(log[0], log[0] + len(log))) and emit.log[log[0] - 1] == 7


def test_what_another_worker_proved_in_full_is_proved_on_the_timed_operands_only(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))
    full = []
    monkeypatch.setattr("outblas.verify.prove_each", lambda *a: full.append(a) or PASSED)
    cells = []
    monkeypatch.setattr(Prover, "call", lambda self, call: cells.append(call) or call)
    emit = Emit()
    handler([(0, ev.Item(PROBLEM, GOOD, None, True))], emit)
    assert emit.answers[0][0].status is Status.PASSED and not full and len(cells) == 1
    handler([(1, ev.Item(PROBLEM, GOOD))], emit)
    assert full


def test_a_long_problem_has_rounds_of_its_own(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="cell", rounds=4, long_rounds=3, baselines=("cublas",)))
    ((one, _),), _ = run(handler, GOOD)
    assert len(one.timing.samples_us) == 4
    monkeypatch.setattr(Bench, "repeats", 1)
    ((one, _),), _ = run(handler, GOOD)
    assert len(one.timing.samples_us) == 3


def test_a_config_that_fails_the_full_proof_fails_everywhere(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",)))
    failed = Verdict(Status.NOT_REPEATABLE, ("static",), "on 1_8_8: differs")
    monkeypatch.setattr("outblas.verify.prove_each", lambda *a: failed)
    ((one, _),), _ = run(handler, GOOD)
    assert one.status is Status.NOT_REPEATABLE and one.detail == "on 1_8_8: differs"
    ((again, _),), _ = run(handler, GOOD, problem=Problem(128, 128, 128))
    assert again.status is Status.NOT_REPEATABLE


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_the_direct_family_is_proved_at_every_edge(layout):
    """Tails of M, of N and of K, K of less than a chunk, and K past the first round of all warps."""
    for config in [*DIRECT.pool(), Sm80DirectConfig(64, 64, 2, 2, 4, 1)]:
        found = ev.representatives(Problem(64, 64, 64, layout), config)
        together = config.wk * config.unroll * config.bk
        assert any(p.m % config.bm and p.n % config.bn and p.k % config.bk for p in found) or config.bn == 8, (
            "N is a multiple of 8"
        )
        assert any(p.m < config.bm and p.k < config.bk for p in found), "less than a tile and a chunk"
        assert any(p.k == together + 8 for p in found), "a second round of one warp"
        assert any(together < p.k < 2 * together and p.k % config.bk for p in found) or together == config.bk
        assert any(p.m > 8 * config.bm for p in found), "more than a band of tiles"
        assert not any(p.n % 8 or p.k % 8 for p in found)


def test_multicast_is_proved_with_less_k_than_the_ring_holds():
    """A CTA leaves only when its peers have given its stages back, those that nobody filled, too."""
    config = Sm90WgmmaConfig(64, 64, stages=6, cluster_m=2, persistent=True)
    found = ev.representatives(Problem(64, 64, 64), config)
    assert any(p.k <= config.bk * (config.stages - 1) and p.m > config.bm for p in found)


def test_a_worker_is_warm_before_it_is_asked(monkeypatch):
    """What a process does once (torch's import, CUDA's context, cuBLAS) is in no candidate's time."""
    done = []

    class Small(Desk):
        def __init__(self, problem, options, baselines, ledger):
            super().__init__(problem, options, baselines, ledger)
            done.append(("made", problem.flops < 1e9, options.benchmark_seconds))

        def measure_baselines(self, options):
            done.append(("timed", options.warmup_seconds))

        def close(self):
            done.append("closed")

    monkeypatch.setattr(ev, "Desk", Small)
    handler = ev.make_handler(ev.Options(baselines=("cublas", "nvmmh"), warmup_seconds=5.0, benchmark_seconds=5.0))
    assert done == [("made", True, 0.0), ("timed", 0.0), "closed"]
    account = handler.ledger.read()
    assert account.seconds["start"] > 0 and not account.counts, "and counts as no work"
    assert handler._baselines["nvmmh"].detail(ev._WARM_UP) == "", "nobody is asked for a choice"


def test_a_gpu_that_cannot_be_used_is_told_at_the_start(monkeypatch):
    def refuse(*parts):
        raise DeviceError("no CUDA device", "one", "do")

    monkeypatch.setattr(ev, "Desk", refuse)
    with pytest.raises(DeviceError, match="no CUDA device"):
        ev.make_handler(ev.Options(baselines=()))


def test_a_candidate_that_wrote_elsewhere_leaves_no_trials_behind(handler):
    kept = handler._shelf()
    for found, left in ((Verdict(Status.WRONG, ("static",)), 8), (Verdict(Status.MEMORY_VIOLATION, ("static",)), 0)):
        kept.at(PROBLEM).get("x", lambda: SimpleNamespace(nbytes=8))
        handler.kernels[BAD] = found
        run(handler, BAD)
        assert kept.bytes == left


def test_operands_overwritten_while_they_are_timed_cost_all_that_were_timed(handler, monkeypatch):
    monkeypatch.setattr(Prover, "whole", lambda self: False)
    found, _ = run(handler, GOOD, SLOW)
    for one, _ in found:
        assert one.status is Status.MEMORY_VIOLATION and one.timing is None and "after timing" in one.detail


def test_kept_trials_make_room_for_a_problem_that_needs_it(handler, monkeypatch):
    class Large(Desk):
        def __init__(self, *arguments):
            if handler._trials.bytes:
                raise DeviceError("1 operand sets need 9 bytes", "that much free memory", "use a smaller problem")
            super().__init__(*arguments)

    monkeypatch.setattr(ev, "Desk", Large)
    handler._shelf().at(PROBLEM).get("x", lambda: SimpleNamespace(nbytes=8))
    ((good, _),), _ = run(handler, GOOD)
    assert good.status is Status.PASSED and not handler._trials.bytes


def test_the_ledger_counts_what_was_done(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", ev.Options(level="full", rounds=3, baselines=("cublas",), chunk=2))
    monkeypatch.setattr("outblas.verify.prove_each", lambda *a: PASSED)
    run(handler, GOOD, SLOW, BAD)
    run(handler, GOOD)
    run(handler, GOOD, problem=Problem(128, 64, 64))
    account = handler.ledger.read()
    assert account.counts == {"desks": 2, "candidates": 5, "kernels proved": 3, "chunks": 4}
    assert {"idle", "batch", "load", "prove", "cell", "capture", "time", "recheck"} == account.seconds.keys()


def test_the_desk_accounts_for_its_parts(monkeypatch):
    """lt_auto chooses once per problem, however often the problem comes back."""
    from outblas.ledger import Ledger

    class Auto:
        name, chosen = "lt_auto", ""

        def prepare(self, bench):
            self.chosen = "index=0"

        def detail(self, problem):
            return self.chosen

    monkeypatch.setattr("outblas.timing.Bench", lambda *a, **b: SimpleNamespace(data=0, torch_stream=0, capture=Graph))
    monkeypatch.setattr("outblas.verify.CellProver", lambda *a: Prover())
    ledger, auto = Ledger("idle"), Auto()
    for _ in range(2):
        assert ev.Desk(PROBLEM, ev.Options(), {"lt_auto": auto}, ledger).graphs.keys() == {"lt_auto"}
    account = ledger.read()
    assert account.counts == {"algorithms chosen": 1}
    assert {"idle", "operands", "autotune", "baselines"} == account.seconds.keys()
