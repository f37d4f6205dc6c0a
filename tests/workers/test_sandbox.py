"""A lost worker costs the item that lost it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Status
from outblas.workers import sandbox as sandbox_module
from outblas.workers.sandbox import HostLimits, Sandbox, WorkerLoss
from support.gpus.known import H200
from support.helpers import SOURCE_PATH, running

HERE = Path(__file__).resolve().parents[1]
HANDLERS = "support.sandbox_handlers"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Spawned workers take the driver's sys.path."""
    monkeypatch.syspath_prepend(str(HERE))


def sandbox(name="doubler", step=20.0):
    return Sandbox(f"{HANDLERS}:{name}", (), step, 60.0)


def answers(box, items):
    found = list(box.run(items))
    assert sorted(i for i, _ in found) == list(range(len(items))), "every item exactly once"
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def alive(pid):
    """Running or a zombie: either way the system still knows it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_worker_serves_many_batches_and_is_gone_after():
    with sandbox() as box:
        assert answers(box, [1, 2, 3]) == [2, 4, 6]
        first = answers(box, ["pid"])
        assert answers(box, ["pid"]) == first and box.lost == 0
        pid = box.pid
        assert alive(pid)
    assert box.pid is None and not alive(pid)


@pytest.mark.parametrize("after", [0, 1])
def test_a_batch_after_ctrl_c_does_not_get_the_answers_of_the_one_before(monkeypatch, after):
    with sandbox() as box:
        listened, heard = box._silent, []

        def interrupted(child, end):
            found = listened(child, end)
            heard.append(found)
            if len(heard) > after:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(box, "_silent", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(box.run([1, 2, 3]))
        monkeypatch.setattr(box, "_silent", listened)
        assert answers(box, [10, 20, 30]) == [20, 40, 60] and box.lost == 0


def test_ctrl_c_while_a_worker_starts_leaves_none_behind(monkeypatch):
    from outblas.core.child_process import ChildProcess

    class Pipe:
        def __init__(self, pipe):
            self.close, self.send = pipe.close, pipe.send

        def poll(self, timeout):
            raise KeyboardInterrupt

    def half(*arguments):
        child = ChildProcess(*arguments)
        child.connection = Pipe(child.connection)
        return child

    with sandbox() as box:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("outblas.workers.sandbox.ChildProcess", half)
            box.start()
        assert box.pid is None
        assert answers(box, [1]) == [2]


def test_an_empty_batch_is_answered():
    with sandbox() as box:
        assert answers(box, []) == []


@pytest.mark.parametrize(
    ("item", "status", "words"),
    [
        ("exit", Status.EXITED, "exit code 0"),
        ("sysexit", Status.EXITED, "exit code 3"),
        ("segfault", Status.FAULT, "SIGSEGV"),
        ("fault", Status.FAULT, "ILLEGAL_ADDRESS"),
    ],
)
def test_a_lost_worker_is_replaced_and_the_rest_goes_on(item, status, words):
    with sandbox() as box:
        first = answers(box, ["pid"])[0]
        one, lost, three, four = answers(box, [1, item, 3, 4])
        assert (one, three, four) == (2, 6, 8)
        assert isinstance(lost, WorkerLoss) and lost.status is status and words in lost.detail
        assert box.lost == 1 and not alive(first)


def test_a_hang_is_killed_and_leaves_no_zombie():
    with sandbox(step=1.5) as box:
        pid = answers(box, ["pid"])[0]
        one, lost, three = answers(box, [1, "hang", 3])
        assert (one, three) == (2, 6) and lost.status is Status.HANG
        assert not alive(pid)


def test_two_culprits_in_one_batch_cost_one_worker_each():
    with sandbox() as box:
        values = answers(box, ["exit", 2, "segfault", 4])
        assert [v.status if isinstance(v, WorkerLoss) else v for v in values] == [Status.EXITED, 4, Status.FAULT, 8]
        assert box.lost == 2


def test_a_loss_without_a_name_is_found_by_trying_each_alone():
    with sandbox("late") as box:
        values = answers(box, [1, "exit", 3])
        assert values[0] == 2 and values[2] == 6
        assert values[1].status is Status.EXITED and "7" in values[1].detail


def test_an_item_left_unanswered_is_reported():
    with sandbox("silent") as box:
        one, two = answers(box, [1, 2])
        assert one == 1 and two.status is Status.EXITED


def test_a_bug_of_the_evaluator_is_an_error_not_a_verdict():
    with sandbox() as box:
        with pytest.raises(DeviceError, match="a bug of the evaluator"):
            answers(box, ["raise"])
        assert answers(box, [5]) == [10]


@pytest.mark.parametrize(("name", "words"), [("unable", "no GPU here"), ("dies_at_birth", "exit code 9")])
def test_a_worker_that_cannot_start_says_why(name, words):
    with sandbox(name) as box, pytest.raises(DeviceError, match=words):
        answers(box, [1])


def test_leaving_in_the_middle_ends_the_worker():
    box = sandbox()
    stream = box.run(["pid", "hang"])
    _, pid = next(stream)
    stream.close()
    assert not alive(pid)


def test_a_killed_driver_takes_a_stuck_worker_with_it():
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from outblas.workers.sandbox import Sandbox\n"
        "if __name__ == '__main__':\n"
        "    box = Sandbox('support.sandbox_handlers:doubler', (), 60.0)\n"
        "    for i, v in box.run(['pid', 'hang']): print(v, flush=True)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE_PATH},
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    for _ in range(200):
        if not running(pid):
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its driver")


def test_a_live_evaluator_reports_losses_as_evaluations():
    from outblas.core.problem import Problem
    from outblas.judge.bench_cell import Options
    from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
    from outblas.tune.live_evaluator import LiveEvaluator

    problem, other = Problem(64, 64, 64), Problem(128, 64, 64)
    good, hangs, exits = (
        Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, split_k=2), Sm90WgmmaConfig(64, 64, stages=6),
    )  # fmt: skip
    pairs = [(problem, good), (problem, hangs), (problem, exits), (other, good)]
    with LiveEvaluator(0, Options(0, H200, baselines=()), 1.5, f"{HANDLERS}:evaluations") as evaluator:
        found = {(e.problem, e.config): e for e in evaluator.evaluate(pairs)}
        assert [found[p].status for p in pairs] == [Status.PASSED, Status.HANG, Status.EXITED, Status.PASSED]
        assert found[problem, hangs].timing is None and found[problem, hangs].detail
        assert evaluator.baselines(problem) == {"cublas": 2.0}
        assert evaluator.baseline_detail(problem, "cublas") == "default"
        assert evaluator.baselines(Problem(8, 8, 8)) == {"cublas": 2.0}
        assert evaluator.source == "cuda:0"


def test_representatives_are_ragged_legal_and_of_the_same_kind():
    pytest.importorskip("outblas.kernels.legality")
    from outblas.core.problem import Problem
    from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
    from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig, gemv_blocks_per_sm
    from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
    from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
    from outblas.kernels.legality import why_illegal
    from outblas.kernels.proof_shapes import proof_shapes
    from support.gpus.known import H200

    problem = Problem(64, 64, 64, "NN", "bf16")
    gemv = Sm80GemvConfig(16, 64, 1, 8, 2), Sm80GemvConfig(8, 64, 1, 8, 2, split_k=8)
    walks = replace(gemv[0], wk=4, persistent=True), replace(gemv[1], split_k=1, persistent=True, kept_k=8192)
    for config in (Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64, vec=1), Sm80DirectConfig(16, 16), *gemv, *walks):
        found = proof_shapes(problem, config, H200)
        assert any(p.m % config.bm and p.n % config.bn and p.k % config.bk for p in found)
        assert any(p.k >= 4096 for p in found)
        for p in found:
            assert (p.layout, p.dtype, p.acc) == ("NN", "bf16", "fp32") and why_illegal(p, config, H200) is None
        if config in walks:  # CTAs with two tiles and with three, the last tile ragged
            ctas = H200.sms * gemv_blocks_per_sm(problem, config)
            assert any(2 * ctas < p.n / config.bn < 3 * ctas and p.n % config.bn for p in found)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("memory", "host memory"),
        ("file in memory", "host memory"),
        ("disk", "MiB of disk for 2 files, more than 2"),
        ("files", "101 files"),
    ],
)
def test_a_worker_that_talks_all_the_time_is_still_watched_as_it_fills_the_host(tmp_path, monkeypatch, how, words):
    monkeypatch.setattr(sandbox_module, "_MOST_ENTRIES", 100)
    limits = HostLimits(150 << 20, str(tmp_path), 2 << 20)
    given = (how, str(tmp_path))
    with Sandbox(f"{HANDLERS}:greedy", given, 20.0, 60.0, limits=limits, batch_timeout_s=20.0) as box:
        ((_, loss),) = box.run(["x"])
    assert loss.status is Status.FAULT and words in loss.detail
