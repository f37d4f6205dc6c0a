"""Free kernels evaluated live, but for the GPU: batches, workers that are lost, and forged answers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_evaluator import FreeOptions, JailedEvaluator
from support import free_workers
from support.free_fixture import ANSWERS, BODY, IMPORTS_NOTHING, cache_fixture, compiles, device_text  # noqa: F401
from support.gpus.known import H200
from support.helpers import SOURCE_PATH, running

P = Problem(64, 64, 64)
HERE = str(Path(__file__).resolve().parents[1])


@pytest.fixture
def live(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    options = Options(0, H200, baselines=("cublas", "nvmmh"))

    with contextlib.ExitStack() as stack:

        def make(step=20.0, prepare="support.free_workers:prepare", **keys):
            free = FreeOptions(prepare=prepare, **keys)
            made = JailedEvaluator(options, step, free, factory=ANSWERS)
            return stack.enter_context(contextlib.closing(made))

        yield make


@pytest.fixture(name="log")
def log_fixture(monkeypatch, tmp_path):
    monkeypatch.setenv(free_workers.LOG, str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return free_workers.notes


def test_no_file_of_the_search_lies_open_where_strangers_run():
    assert JailedEvaluator(Options(0, H200, algorithms="algorithms.jsonl"), 20.0)._options.algorithms is None


def ordered(order, number=0):
    return FreeKernel.parse(f"// order: {order}\n" + device_text(BODY + f"int x{number};"))


def answers(live, kernels):
    return {e.config: (e, b) for e, b in live.evaluate(P, kernels)}


@compiles
def test_a_live_answer_has_what_was_measured_and_what_was_seen_here(live):
    kernel = ordered("pass")
    evaluation, baselines = answers(live(), [kernel])[kernel]
    assert evaluation.status is Status.PASSED and evaluation.timing.median_us == 2.0
    assert evaluation.counters["registers"] < 256, "not what the worker says of the machine code"
    assert list(baselines.timings) == ["cublas"], "nvmmh would need a compiler in the jail"


@compiles
def test_failures_before_a_worker_need_none_and_losses_cost_one_kernel(live):
    kernels = [ordered("pass", 1), ordered("exit", 2), FreeKernel.parse(device_text("x")), ordered("pass", 3)]
    found = answers(live(), kernels)
    assert [found[k][0].status.value for k in kernels] == ["passed", "exited", "compile_error", "passed"]


@compiles
def test_forged_answers_are_not_taken(live):
    for order, status in (("other", Status.RULE_BROKEN), ("negative", Status.EXITED)):
        kernel = ordered(order)
        (found,) = [e for e, _ in live().evaluate(P, [kernel])]
        assert found.status is status and found.config == kernel and found.timing is None


@compiles
def test_a_worker_lives_for_a_batch_and_its_folder_with_it(live):
    kernels = [ordered("pid", n) for n in range(3)]
    found = [e.detail.split() for e, _ in live(batch=2).evaluate(P, kernels)]
    pids = [pid for pid, _ in found]
    assert pids[0] == pids[1] != pids[2] and all(there == "True" for _, there in found)


@compiles
def test_a_live_evaluator_keeps_the_two_kinds_apart(live, monkeypatch):
    monkeypatch.setattr("outblas_lab.jail.jailed_evaluator.HANDLER_FACTORY", ANSWERS)
    monkeypatch.setattr(JailedEvaluator.__init__, "__defaults__", (None, ANSWERS))
    monkeypatch.syspath_prepend(HERE)
    options, templates = Options(0, H200, baselines=("cublas",)), "support.free_workers:templates"
    with LiveEvaluator(0, options, factory=templates, compile_ahead=False, free=IMPORTS_NOTHING) as evaluator:
        template = Sm90WgmmaConfig(64, 64)
        found = {e.config: e for e in evaluator.evaluate([(P, template), (P, ordered("pid")), (P, template)])}
    assert found[template].detail != found[ordered("pid")].detail.split()[0]


@compiles
def test_the_next_worker_is_prepared_while_one_judges_and_has_its_turn_after_it(live, log):
    """Each kernel is answered only once another worker is prepared, so the test fails if none is."""
    found = [e.detail.split()[0] for e, _ in live(batch=1).evaluate(P, [ordered("next", n) for n in range(2)])]
    first, second = map(int, found)
    third = log()[-2][1]
    assert log() == [
        ("prepared", first), ("turn", first), ("prepared", second), ("judged", first),
        ("turn", second), ("prepared", third), ("judged", second),
    ]  # fmt: skip
    assert len({first, second, third}) == 3, "no worker has two turns"


@compiles
def test_a_prepared_worker_serves_the_next_call_and_ends_with_the_evaluator(live, log):
    evaluator = live()
    answers(evaluator, [ordered("next", 1)])
    (waiting,) = {pid for word, pid in log() if word == "prepared" and running(pid)}
    (found,) = answers(evaluator, [ordered("next", 2)]).values()
    assert int(found[0].detail.split()[0]) == waiting
    evaluator.close()
    assert not any(running(pid) for _, pid in log())


@compiles
def test_a_lost_worker_costs_its_kernel_and_the_next_one_takes_the_rest(live, log):
    kernels = [ordered("exit", 1), ordered("next", 2)]
    found = answers(live(), kernels)
    assert found[kernels[0]][0].status is Status.EXITED and found[kernels[1]][0].status is Status.WRONG
    assert "overlap" not in dict(log())


@compiles
def test_nothing_is_started_ahead_for_a_single_kernel(live, log):
    answers(live(prepare=None), [ordered("pid")])
    assert [word for word, _ in log()] == ["turn"]


def test_a_worker_that_waits_has_torch_and_no_keys_and_has_not_started_cuda():
    pytest.importorskip("torch")
    program = (
        "import os, sys\n"
        "from outblas_lab.jail.jailed_worker import import_ahead\n"
        "import_ahead()\n"
        "import torch\n"
        "from pathlib import Path\n"
        "maps = Path('/proc/self/maps').read_text()\n"
        "print('torch' in sys.modules, 'SECRET' in os.environ, torch.cuda.is_initialized(), 'libcuda.so' in maps,\n"
        "      'value-of-the-key' in Path('/proc/self/environ').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": SOURCE_PATH, "SECRET": "value-of-the-key"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False", "False", "False", "False"]
