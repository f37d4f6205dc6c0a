"""While a worker measures one problem, later ones are drawn, listed and compiled; nothing else changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.tune.live_evaluator import MAX_PROBLEMS_AHEAD, PROBLEMS_AT_A_TIME, LiveEvaluator, Lookahead
from outblas.workers.compile_ahead import BackgroundCompiler
from support import sandbox_handlers
from support.gpus.known import H200
from support.helpers import running

TESTS = Path(__file__).resolve().parents[1]
PROBLEMS = [Problem(64 * i, 64, 64) for i in range(1, 21)]
CONFIGS: list[KernelConfig] = [Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 128)]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveEvaluator]:
    monkeypatch.syspath_prepend(str(TESTS))
    options = Options(0, H200, baselines=())
    with LiveEvaluator(0, options, 20.0, "support.sandbox_handlers:evaluations", compile_ahead=False) as evaluator:
        yield evaluator


def pairs_of(drawn: list[Problem]) -> Iterator[tuple[Problem, KernelConfig]]:
    for problem in PROBLEMS:
        drawn.append(problem)
        for config in CONFIGS:
            yield problem, config


def test_it_draws_some_problems_ahead_and_no_more() -> None:
    drawn: list[Problem] = []
    told: list[Problem] = []
    ahead = Lookahead(pairs_of(drawn), lambda group: told.append(group[0][0]))
    assert ahead.next() == [(PROBLEMS[0], c) for c in CONFIGS]
    assert told == PROBLEMS[:1], "nothing ahead unless asked"
    ahead.more()
    assert told == PROBLEMS[: 1 + PROBLEMS_AT_A_TIME]
    for _ in range(10):
        ahead.more()
    assert told == PROBLEMS[: 1 + MAX_PROBLEMS_AHEAD] and len(drawn) == 2 + MAX_PROBLEMS_AHEAD, (
        "a problem ends where the next one begins"
    )
    left = []
    while group := ahead.next():
        left.append(group)
    assert [group[0][0] for group in left] == PROBLEMS[1:] and all(len(group) == 2 for group in left)
    assert ahead.next() is None


def test_agents_are_asked_while_the_worker_works(live: LiveEvaluator) -> None:
    drawn: list[Problem] = []
    before = []
    for evaluation in live.evaluate(pairs_of(drawn)):
        assert evaluation.status is Status.PASSED
        before.append(len(drawn))
    assert before[0] == 2 + PROBLEMS_AT_A_TIME, "the first problem, two ahead, and the first pair behind them"
    assert before[-1] == len(drawn) == len(PROBLEMS) and len(before) == len(PROBLEMS) * len(CONFIGS)
    assert live.accounts()["host"].seconds["ahead"] > 0


def test_what_an_agent_raises_ends_the_batch_and_its_worker(live: LiveEvaluator) -> None:
    def pairs() -> Iterator[tuple[Problem, KernelConfig]]:
        yield PROBLEMS[0], CONFIGS[0]
        yield PROBLEMS[1], CONFIGS[0]
        raise UsageError("this agent", "another", "correct it")

    with pytest.raises(UsageError, match="this agent"):
        list(live.evaluate(pairs()))
    assert live.sandbox.pid is None, "what it had in hand belongs to nobody"
    assert [e.status for e in live.evaluate([(PROBLEMS[2], CONFIGS[0])])] == [Status.PASSED]


def test_candidates_are_listed_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    listed: list[Problem] = []

    def offered(problem: Problem) -> list[KernelConfig]:
        listed.append(problem)
        return CONFIGS

    options, factory = Options(0, H200, baselines=()), "support.sandbox_handlers:evaluations"
    with LiveEvaluator(0, options, 20.0, factory, offered, compile_ahead=False) as live:
        live.list_ahead(PROBLEMS[2:6])
        list(live.evaluate((p, CONFIGS[0]) for p in PROBLEMS[:2]))
        assert listed == PROBLEMS[2:6], "two for each problem that was measured"
        assert live.candidates_of(PROBLEMS[2:6]) == dict.fromkeys(PROBLEMS[2:6], CONFIGS)
        assert listed == PROBLEMS[2:6]
        live.candidates(PROBLEMS[2])
        assert listed == [*PROBLEMS[2:6], PROBLEMS[2]], "kept until it is asked for"


def test_kernels_of_a_bench_are_begun_at_once_and_one_that_nobody_compiles_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[Problem, KernelConfig]] = []
    monkeypatch.setattr(BackgroundCompiler, "begin", lambda self, pairs: begun.extend(pairs))
    pairs = [(problem, CONFIGS[0]) for problem in PROBLEMS]
    with LiveEvaluator(0, Options(0, H200, baselines=())) as live:
        live.compile_soon(pairs)
    with LiveEvaluator(0, Options(0, H200, baselines=()), compile_ahead=False) as live:
        live.compile_soon(pairs)
    assert begun == pairs


DIRECT = [Sm80DirectConfig(16, 8, wk=wk, unroll=unroll) for wk in (1, 2, 4) for unroll in (1, 2)]
PAIRS = [(Problem(64, 64, 512), config) for config in DIRECT]


def cubins(cache: Path) -> list[Path]:
    return [path for path in (cache / "cubin").rglob("*") if path.is_file()]


def test_kernels_are_compiled_behind_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.kernels.source import make_source
    from outblas.runtime.nvrtc import is_compiled

    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    compiler = BackgroundCompiler(H200, jobs=2)
    try:
        compiler.begin(PAIRS)
        compiler.wait(PAIRS)
        assert all(is_compiled(make_source(p, c), "sm_90a") for p, c in PAIRS)
    finally:
        compiler.close()
    assert len(cubins(tmp_path)) == len(PAIRS)
    again = BackgroundCompiler(H200, jobs=2)
    again.begin(PAIRS)
    assert again._pool is None, "all compiled: no process is started"
    again.wait(PAIRS)


def test_few_kernels_are_left_to_whoever_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    compiler = BackgroundCompiler(H200, jobs=2)
    compiler.begin(PAIRS[:2])
    compiler.wait(PAIRS[:2])
    compiler.begin(PAIRS[2:4])
    assert compiler._pool is None and not cubins(tmp_path), "two that were left, and two more: still few"
    compiler.close()


class DyingPool:
    """A pool whose processes have died."""

    def submit(self, *_: object) -> object:
        raise BrokenProcessPool("a process ended")

    def shutdown(self, **_: object) -> None:
        return None


def test_a_compiler_that_dies_is_told_where_its_kernel_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    compiler = BackgroundCompiler(H200, jobs=2)
    with monkeypatch.context() as broken:
        broken.setattr("outblas.runtime.nvrtc.compile_processes", lambda *_: DyingPool())
        compiler.begin(PAIRS)
        compiler.wait(PAIRS)
    monkeypatch.syspath_prepend(str(TESTS))
    others = [(Problem(64, 64, 512, layout="NN"), config) for config in DIRECT]
    with monkeypatch.context() as broken:
        broken.setattr("outblas.runtime.nvrtc.fill_cache", sandbox_handlers.dies_compiling)
        compiler.begin(others)
        compiler.wait(others)
    more = [(Problem(64, 64, 512, dtype="bf16"), config) for config in DIRECT]
    compiler.begin(more)
    compiler.wait(more)
    assert len(cubins(tmp_path)) == len(more), "those that came later have processes of their own"
    compiler.close()


def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ToolchainMissing("no NVRTC", "one", "install it")

    monkeypatch.setattr("outblas.runtime.nvrtc.nvrtc_version", missing)
    with pytest.raises(ToolchainMissing):
        BackgroundCompiler(H200).begin(PAIRS)


def test_compiling_processes_end_with_a_driver_that_was_killed() -> None:
    script = (
        "import os, time\n"
        "from outblas.runtime.nvrtc import compile_processes\n"
        "if __name__ == '__main__':\n"
        "    pool = compile_processes(2, 5)\n"
        "    print(pool.submit(os.getpid).result(60), pool.submit(os.nice, 0).result(60), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid, nice = map(int, driver.stdout.readline().split())
        assert nice == os.nice(0) + 5
        driver.send_signal(signal.SIGKILL)
    for _ in range(100):
        if not running(pid):
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it compiles for nobody")
