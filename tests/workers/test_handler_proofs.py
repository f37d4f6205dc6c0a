"""Proofs of the worker's handler: once per kernel, on which problems, and from which kept state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.kernels.families.sm80_direct_gemm import FAMILY as DIRECT
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.workers import handler as ev
from support.gpus.known import H200
from support.handler_fixture import BAD, GOOD, PASSED, PROBLEM, Bench, Emit, FakeBenchCell, Prover, handler_fixture, run  # noqa: F401


def test_a_full_proof_is_made_once_per_config_and_kind(handler, monkeypatch):
    proved = []
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))

    def prove_each(kernel, problems, gpu, trial_cache):
        proved.extend(problems)
        return Verdict(Status.PASSED, ("rules",), "", 0.7)

    monkeypatch.setattr("outblas.judge.gates.prove_on_all", prove_each)
    ((one, _),), _ = run(handler, GOOD)
    count = len(proved)
    assert count > 3 and one.verdict.gates == ("rules",) and one.verdict.max_err_ratio == 0.7
    run(handler, GOOD, problem=Problem(128, 128, 128))
    assert len(proved) == count
    run(handler, GOOD, problem=Problem(128, 128, 128, "NN"))
    assert len(proved) == 2 * count


def test_what_kernels_are_proved_with_is_kept_from_one_to_the_next(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    shelves = []
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: shelves.append(a[-1]) or PASSED)
    run(handler, GOOD)
    run(handler, replace(GOOD, stages=GOOD.stages + 1))
    assert len(shelves) == 2 and shelves[0] is shelves[1]


def test_a_kernel_without_representatives_is_proved_on_the_problem_itself(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    monkeypatch.setattr(ev, "proof_shapes", lambda problem, config, gpu: [])
    asked = []
    monkeypatch.setattr(
        "outblas.judge.gates.prove_on_all", lambda kernel, problems, *rest: asked.extend(problems) or PASSED
    )
    run(handler, GOOD)
    assert asked == [PROBLEM]


def test_every_proof_has_a_sign_of_life_of_its_own(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    log = []

    def prove_each(kernel, problems, gpu, trial_cache):
        log.extend(len(emit.log) for _ in problems)
        return PASSED

    monkeypatch.setattr("outblas.judge.gates.prove_on_all", prove_each)
    emit = Emit()
    handler([(7, ev.WorkItem(PROBLEM, GOOD))], emit)
    assert len(log) > 3 and log == list(range(log[0], log[0] + len(log))) and emit.log[log[0] - 1] == 7


def test_what_another_worker_proved_in_full_is_proved_on_the_timed_operands_only(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    full = []
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: full.append(a) or PASSED)
    cells = []
    monkeypatch.setattr(Prover, "call", lambda self, call: cells.append(call) or call)
    emit = Emit()
    handler([(0, ev.WorkItem(PROBLEM, GOOD, None, True))], emit)
    assert emit.answers[0][0].status is Status.PASSED and not full and len(cells) == 1
    handler([(1, ev.WorkItem(PROBLEM, GOOD))], emit)
    assert full


def test_a_long_problem_has_rounds_of_its_own(handler, monkeypatch):
    monkeypatch.setattr(
        handler, "_options", Options(0, H200, level="cell", rounds=4, long_rounds=3, baselines=("cublas",))
    )
    ((one, _),), _ = run(handler, GOOD)
    assert len(one.timing.samples_us) == 4
    monkeypatch.setattr(Bench, "repeats", 1)
    ((one, _),), _ = run(handler, GOOD)
    assert len(one.timing.samples_us) == 3


def test_a_config_that_fails_the_full_proof_fails_everywhere(handler, monkeypatch):
    monkeypatch.setattr(handler, "_options", Options(0, H200, level="full", rounds=3, baselines=("cublas",)))
    failed = Verdict(Status.NOT_REPEATABLE, ("static",), "on 1_8_8: differs")
    monkeypatch.setattr("outblas.judge.gates.prove_on_all", lambda *a: failed)
    ((one, _),), _ = run(handler, GOOD)
    assert one.status is Status.NOT_REPEATABLE and one.detail == "on 1_8_8: differs"
    ((again, _),), _ = run(handler, GOOD, problem=Problem(128, 128, 128))
    assert again.status is Status.NOT_REPEATABLE


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_the_direct_family_is_proved_at_every_edge(layout):
    """Tails of M, of N and of K, K of less than a chunk, and K past the first round of all warps."""
    for config in [*DIRECT.pool(), Sm80DirectConfig(64, 64, 2, 2, 4, 1)]:
        found = ev.proof_shapes(Problem(64, 64, 64, layout), config, H200)
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
    found = ev.proof_shapes(Problem(64, 64, 64), config, H200)
    assert any(p.k <= config.bk * (config.stages - 1) and p.m > config.bm for p in found)


def test_a_candidate_that_wrote_elsewhere_leaves_no_trials_behind(handler):
    kept = handler._trial_cache()
    for found, left in ((Verdict(Status.WRONG, ("static",)), 8), (Verdict(Status.MEMORY_VIOLATION, ("static",)), 0)):
        kept.at(PROBLEM).get("x", lambda: SimpleNamespace(nbytes=8))
        handler.kernels[BAD] = found
        run(handler, BAD)
        assert kept.bytes == left


def test_kept_trials_make_room_for_a_problem_that_needs_it(handler, monkeypatch):
    class Large(FakeBenchCell):
        def __init__(self, *arguments):
            if handler._trials.bytes:
                raise DeviceError("1 operand sets need 9 bytes", "that much free memory", "use a smaller problem")
            super().__init__(*arguments)

    monkeypatch.setattr(ev, "BenchCell", Large)
    handler._trial_cache().at(PROBLEM).get("x", lambda: SimpleNamespace(nbytes=8))
    ((good, _),), _ = run(handler, GOOD)
    assert good.status is Status.PASSED and not handler._trials.bytes
