"""The jailed evaluator with a sandbox that records: batches, limits, and the check of answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines, Options
from outblas.workers.sandbox import HostLimits, WorkerLoss
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import jailed_evaluator
from outblas_lab.jail.jailed_evaluator import FreeOptions, JailedEvaluator
from outblas_lab.jail.jailed_worker import JailedCell
from support.free_fixture import BODY, device_text, host_text
from support.gpus.known import H200

P = Problem(64, 64, 64)
PASSED = Verdict(Status.PASSED, ("static",), "", 0.5)


def device(number):
    return FreeKernel.parse(device_text(BODY + f"int x{number};"))


def host(number):
    return FreeKernel.parse(host_text(f"int x{number};\n"))


class Box:
    """Answers by ``Box.answers``, in the order of the items."""

    made, answers = [], {}

    def __init__(self, factory, args, step_s, **keys):
        Box.made.append(SimpleNamespace(factory=factory, options=args[0], cell=args[1], step_s=step_s, **keys))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, items, meanwhile):
        Box.made[-1].items = items
        meanwhile()
        for index, item in enumerate(items):
            yield index, Box.answers.get(item.config, (Evaluation(P, item.config, Status.WRONG, "no"), None))


@pytest.fixture(name="evaluated")
def evaluated_fixture(monkeypatch):
    monkeypatch.setattr(jailed_evaluator, "Sandbox", Box)
    monkeypatch.setattr(jailed_evaluator, "_cudart", lambda: "/cuda/libcudart.so.13")
    monkeypatch.setattr(Box, "made", [])
    monkeypatch.setattr(Box, "answers", {})

    def examine(problem, kernel, gpu):
        if "bad" in kernel.text:
            return Evaluation(problem, kernel, Status.COMPILE_ERROR, "no")
        return SimpleNamespace(kernel=kernel, counters=lambda: {"registers": 32.0}, log="ptxas")

    monkeypatch.setattr(jailed_evaluator, "examine", examine)

    def ask(kernels, **free):
        evaluator = JailedEvaluator(
            Options(0, H200, baselines=("cublas", "nvmmh")), 7.0, FreeOptions(prepare=None, **free)
        )
        return list(evaluator.evaluate(P, kernels))

    return ask


def test_device_kernels_share_workers_and_host_kernels_are_alone(evaluated):
    kernels = [host(1), *(device(i) for i in range(5)), host(2)]
    found = evaluated(kernels, batch=2, candidate_s=10.0, memory_bytes=5, folder_bytes=6)
    order = [*kernels[1:6], kernels[0], kernels[6]]
    assert [e.config for e, _ in found] == order
    assert [[item.config for item in box.items] for box in Box.made] == [
        order[:2],
        order[2:4],
        order[4:5],
        order[5:6],
        order[6:],
    ]
    assert [box.batch_timeout_s for box in Box.made] == [20.0, 20.0, 10.0, 10.0, 10.0]
    assert [box.cell.cudart for box in Box.made] == [None] * 3 + ["/cuda/libcudart.so.13"] * 2
    for box in Box.made:
        assert box.limits == HostLimits(5, box.cell.folder, 6) and box.cell.jailed and box.spawn is None
        assert (box.factory, box.step_s, box.codec) == (
            "outblas_lab.jail.jailed_worker:make_handler", 7.0, "outblas_lab.jail.jailed_evaluator"
        )  # fmt: skip
        assert box.options.baselines == ("cublas",) and box.options.algorithms is None
        assert all(item.problem == P and not item.proved and item.nvmmh is None for item in box.items)
        assert all(item.built.kernel == item.config for item in box.items)
    assert len({box.cell.folder for box in Box.made}) == 5


def test_failures_come_first_and_nothing_is_run_for_them(evaluated):
    bad = device("bad")
    assert evaluated([bad]) == [(Evaluation(P, bad, Status.COMPILE_ERROR, "no"), None)] and not Box.made
    assert evaluated([]) == [] and not Box.made
    assert [e.status for e, _ in evaluated([device(1), bad])] == [Status.COMPILE_ERROR, Status.WRONG]


def test_a_cell_without_a_jail_keeps_its_folder_and_library(evaluated):
    evaluated([host(1)], jailed=False)
    (box,) = Box.made
    assert box.cell == JailedCell(box.limits.folder, "/cuda/libcudart.so.13", False)


def test_a_free_kernels_limits():
    free = FreeOptions()
    assert (free.batch, free.memory_bytes, free.folder_bytes, free.candidate_s) == (8, 48 << 30, 4 << 30, 240.0)


@pytest.mark.parametrize("compilers", [None, 1])
def test_answers_are_those_of_the_kernel_that_was_asked_for(evaluated, compilers):
    lost, other, size, nothing, good, wrong = kernels = [device(i) for i in range(6)]
    timing, baselines = Timing("offline", (1.0,), 1.0, 0.0), Baselines({"cublas": Timing("offline", (2.0,), 2.0, 0.0)})
    Box.answers.update({
        lost: WorkerLoss(Status.HANG, "no answer"),
        other: (Evaluation(P, good, Status.WRONG), None),
        size: (Evaluation(Problem(8, 8, 8), size, Status.WRONG), None),
        nothing: (None, baselines),
        good: (Evaluation(P, good, Status.PASSED, "d" * 601, PASSED, timing, counters={"registers": 1.0}), baselines),
        wrong: (Evaluation(P, wrong, Status.WRONG, "e" * 601), None),
    })  # fmt: skip
    found = {e.config: (e, b) for e, b in evaluated(kernels, compilers=compilers)}
    assert len(found) == 6 and all(e.counters == {"registers": 32.0} for e, _ in found.values())
    assert (found[lost][0].status, found[lost][0].detail, found[lost][0].log) == (Status.HANG, "no answer", "no answer")
    for kernel in (other, size, nothing):
        evaluation, kept = found[kernel]
        assert (evaluation.status, kept) == (Status.RULE_BROKEN, None)
        assert evaluation.detail == "the worker answered a different question"
        assert evaluation.verdict.status is Status.RULE_BROKEN
    evaluation, kept = found[good]
    assert (evaluation.timing, kept, evaluation.detail, evaluation.log) == (timing, baselines, "d" * 600, "ptxas")
    evaluation, kept = found[wrong]
    assert (evaluation.detail, evaluation.log, kept) == ("e" * 600, "wrong: " + "e" * 600, None)
