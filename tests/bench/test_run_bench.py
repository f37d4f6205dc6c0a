"""Benching a library, on fake GPUs: rows that a reader accepts, whatever the candidates did."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import Result, read_result
from outblas_lab.pool import run_bench
from outblas_lab.pool.averages import published_us
from outblas_lab.publish.summary import summarise
from support.fake_gpu import BASELINES_US, STATE, FakeEvaluator, FakeGpu, install, time_us
from support.gpus.known import H200

PLAIN, DEPENDENT, SMALL = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True), Sm80MmaConfig(16, 64)
BOTH, ONE, NONE, UNKNOWN = Problem(64, 128, 256), Problem(128, 128, 256), Problem(256, 64, 64), Problem(64, 64, 64)
PROBLEMS = (BOTH, ONE, NONE, UNKNOWN)


def choice(config: Any) -> LibraryChoice:
    return LibraryChoice(config, 1.2, 1.1, 1.3)


LIBRARY = Library(
    "h200",
    (
        LibraryRow(BOTH, "lt_auto", "", "cuda:0", choice(PLAIN), choice(DEPENDENT)),
        LibraryRow(ONE, "lt_auto", "", "cuda:0", choice(SMALL), choice(SMALL)),
        LibraryRow(NONE, "lt_auto", "", "cuda:0"),
    ),
    {"date": "2000-01-01"},
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, run_bench)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library.json"
    LIBRARY.save(path)
    return path


def run(library: Path, out: Path, problems: tuple[Problem, ...] = PROBLEMS, **kwargs: Any) -> Result:
    progress = kwargs.pop("progress", None)
    return read_result(
        run_bench.run_bench(run_bench.BenchRequest(problems, "grid1000", library, out, **kwargs), progress)
    )


def row_of(result: Result, problem: Problem, pdl: bool) -> dict[str, Any]:
    (row,) = (r for r in result.rows if Problem.from_json(r) == problem and r["pdl"] is pdl)
    return row


def test_two_rows_per_problem_in_the_order_of_the_suite(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    result = run(library, tmp_path / "out.parquet")
    assert [(Problem.from_json(r), r["pdl"]) for r in result.rows] == [(p, d) for p in PROBLEMS for d in (False, True)]
    assert result.suite == "grid1000" and result.provenance["library"] == {"date": "2000-01-01"}
    assert {row["n"] for row in summarise(tmp_path / "out.parquet")} == {4}


def test_a_row_holds_what_was_measured_of_its_own_kernel(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    result = run(library, tmp_path / "out.parquet")
    for pdl, config in ((False, PLAIN), (True, DEPENDENT)):
        row, us = row_of(result, BOTH, pdl), time_us(BOTH, config)
        assert row["config"] == config_name(config) and row["status"] == "passed" and row["fallback"] is False
        assert row["ours_us"] == pytest.approx(us) and row["published"] == row["speedup"] == pytest.approx(4.0 / us)
        assert (row["low"], row["high"]) == pytest.approx((3.9 / us, 4.1 / us))
        assert (row["baseline"], row["baseline_us"]) == ("lt_auto", 4.0)
        assert row["baseline_detail"] == row["lt_auto_detail"] == "lt_auto's algorithm"
        timed = {**BASELINES_US, "torch_full": 5.5, "lt_edges": 3.5, "clock": 0.1}
        assert {name: row[f"{name}_us"] for name in timed} == timed and row["ran"] == row["config"]
        assert (row["rounds"], row["repeats"], row["operand_sets"]) == (9, 32, 4)
        assert {key: row[key] for key in STATE} == STATE


def test_a_kernel_of_both_rows_is_measured_once(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    result = run(library, tmp_path / "out.parquet")
    assert [configs for _, problem, configs in gpu.asked if problem == ONE] == [(SMALL,)]
    one, two = (row_of(result, ONE, pdl) for pdl in (False, True))
    assert {**one, "pdl": True} == two


@pytest.mark.parametrize("problem", [NONE, UNKNOWN])
def test_without_a_kernel_a_row_publishes_what_the_fall_back_measured(
    gpu: FakeGpu, library: Path, tmp_path: Path, problem: Problem
) -> None:
    result = run(library, tmp_path / "out.parquet")
    for pdl in (False, True):
        row = row_of(result, problem, pdl)
        assert (row["fallback"], row["config"], row["status"]) == (True, "", "left_out")
        assert row["ran"] == "fallback's algorithm" and row["ours_us"] == 4.1
        assert row["published"] == row["speedup"] == pytest.approx(4.0 / 4.1)
        assert row["low"] <= row["speedup"] <= row["high"]
        assert (row["baseline"], row["baseline_us"]) == ("lt_auto", 4.0)
    assert published_us(row) == 4.1


def test_only_problems_that_may_fall_back_have_the_entry(gpu: FakeGpu, tmp_path: Path) -> None:
    named = LibraryRow(NONE, "lt_auto", "index=2/8 id=66 tile=20", "cuda:0")
    some = LibraryRow(ONE, "lt_auto", "index=0/8 id=7", "cuda:0", None, choice(DEPENDENT))
    run(Library("h200", (LIBRARY.rows[0], some, named)), tmp_path / "out.parquet")
    assert gpu.fallbacks == {ONE: "id=7", NONE: "id=66 tile=20", UNKNOWN: ""}


@pytest.mark.parametrize("status", [Status.WRONG, Status.FAULT, Status.COMPILE_ERROR, Status.ILLEGAL])
def test_a_kernel_that_fails_falls_back_with_its_status(
    gpu: FakeGpu, library: Path, tmp_path: Path, status: Status
) -> None:
    gpu.statuses[BOTH, DEPENDENT] = status
    result = run(library, tmp_path / "out.parquet")
    failed, other = row_of(result, BOTH, True), row_of(result, BOTH, False)
    assert (failed["fallback"], failed["published"], failed["status"]) == (True, 1.0, status.value)
    assert failed["config"] == "" and failed["ours_us"] is None
    assert other["fallback"] is False
    plain, dependent = summarise(tmp_path / "out.parquet")
    assert (plain["fallbacks"], dependent["fallbacks"]) == (2, 3)


def test_nvmmh_is_reported_and_is_not_the_baseline(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    assert min(BASELINES_US, key=lambda name: BASELINES_US[name]) == "nvmmh"
    assert {row["baseline"] for row in run(library, tmp_path / "out.parquet").rows} == {"lt_auto"}


def test_a_lost_baseline_is_null_and_the_next_best_takes_its_place(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    gpu.missing = {"lt_auto", "nvmmh"}
    row = row_of(run(library, tmp_path / "out.parquet"), NONE, False)
    assert (row["baseline"], row["baseline_us"], row["lt_auto_us"], row["nvmmh_us"]) == (
        "lt_heuristic",
        4.25,
        None,
        None,
    )


def test_a_fallback_names_the_autotuned_algorithm_whatever_was_the_fastest(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BASELINES_US, "torch", 3.9)
    row = row_of(run(library, tmp_path / "out.parquet"), NONE, False)
    assert row["fallback"] and (row["baseline"], row["baseline_detail"]) == ("torch", "torch's algorithm")
    assert row["lt_auto_detail"] == "lt_auto's algorithm"


def test_a_library_in_hand_proofs_and_baselines_are_handed_on(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    whole = run(library, tmp_path / "file.parquet")
    known = frozenset({config_name(PLAIN)})
    result = run(LIBRARY, tmp_path / "out.parquet", baselines=RIVALS, proved=known)  # type: ignore[arg-type]
    assert gpu.options[0].proved == frozenset() and "nvmmh" in gpu.options[0].baselines
    assert (gpu.options[1].proved, gpu.options[1].baselines, gpu.options[1].level) == (known, RIVALS, "full")
    assert {row["nvmmh_us"] for row in result.rows} == {None}
    assert [row["config"] for row in result.rows] == [row["config"] for row in whole.rows]


def test_kernels_are_proved_in_full_and_timed_for_the_rounds_asked(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    result = run(library, tmp_path / "out.parquet", mode="offline_cold", rounds=7)
    (options,) = gpu.options
    assert (options.level, options.recheck, options.mode, options.rounds) == ("full", True, "offline_cold", 7)
    assert set(RIVALS) <= set(options.baselines) and gpu.closed == 1
    assert {(row["mode"], row["rounds"]) for row in result.rows} == {("offline_cold", 7)}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RecordError("x", "y", "z"), RuntimeError("a worker")])
def test_a_run_that_was_stopped_goes_on_and_ends_in_the_same_rows(
    gpu: FakeGpu, library: Path, tmp_path: Path, stop: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(run_bench, "monotonic", lambda: float(next(ticks)))  # each problem takes a second
    whole = run(library, tmp_path / "whole.parquet")
    out = tmp_path / "resumed.parquet"
    gpu.interrupt[ONE] = stop
    with pytest.raises(type(stop)):
        run(library, out)
    assert not out.exists() and gpu.closed == 2
    gpu.interrupt.clear()
    gpu.asked.clear()
    resumed = run(library, out)
    assert resumed.rows == whole.rows
    problems = len({(row["m"], row["n"], row["k"]) for row in whole.rows})
    assert resumed.provenance["gpu_seconds"] == whole.provenance["gpu_seconds"] == problems, "of both processes"
    assert [problem for _, problem, configs in gpu.asked] == [ONE]  # the others have no kernel or are done
    assert list(tmp_path.glob("*.jsonl")) == []


def test_without_resume_everything_is_measured_again(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    gpu.interrupt[ONE] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(library, tmp_path / "out.parquet")
    gpu.interrupt.clear()
    gpu.asked.clear()
    run(library, tmp_path / "out.parquet", resume=False)
    assert [problem for _, problem, _ in gpu.asked] == [BOTH, ONE]


def test_other_settings_do_not_resume(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    gpu.interrupt[ONE] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(library, tmp_path / "out.parquet")
    with pytest.raises(UsageError, match="other settings"):
        run(library, tmp_path / "out.parquet", rounds=11)


def test_figures_of_two_kinds_of_gpu_are_not_mixed(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.interrupt[ONE] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(library, tmp_path / "out.parquet")
    gpu.interrupt.clear()
    monkeypatch.setattr(run_bench, "gpu_of_device", lambda index: replace(H200, name="another") if index else H200)
    with pytest.raises(UsageError, match="different models: h200, another"):
        run(library, tmp_path / "out.parquet", gpu_indices=(0, 1))
    with pytest.raises(UsageError, match="other settings"):
        run(library, tmp_path / "out.parquet", gpu_indices=(1,))


def test_gpus_share_the_problems(gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stations meet at a barrier, so neither can do the work alone; every problem is done once."""
    meet, measure = threading.Barrier(2, timeout=60), FakeEvaluator.evaluate

    def together(self: FakeEvaluator, pairs: Any) -> Any:
        listed = list(pairs)
        if listed:
            meet.wait()
        return measure(self, listed)

    monkeypatch.setattr(FakeEvaluator, "evaluate", together)
    result = run(library, tmp_path / "out.parquet", (BOTH, ONE), gpu_indices=(0, 3))
    assert sorted(index for index, _, _ in gpu.asked) == [0, 3]
    assert sorted(options.gpu_index for options in gpu.options) == [0, 3] and gpu.closed == 2
    assert [Problem.from_json(row) for row in result.rows] == [BOTH, BOTH, ONE, ONE]
    assert result.provenance["gpus"] == 2


def test_a_gpu_that_fails_ends_the_run_and_keeps_what_the_others_did(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, done, measure = threading.Event(), threading.Event(), FakeEvaluator.evaluate

    def evaluate(self: FakeEvaluator, pairs: Any) -> Any:
        if self.options.gpu_index == 1:
            taken.set()
            assert done.wait(60)
            raise RuntimeError("GPU 1 fell off")
        assert taken.wait(60)
        return measure(self, pairs)

    monkeypatch.setattr(FakeEvaluator, "evaluate", evaluate)
    out = tmp_path / "out.parquet"
    with pytest.raises(RuntimeError, match="GPU 1 fell off"):
        run(library, out, (BOTH, ONE), gpu_indices=(0, 1), progress=lambda *_: done.set())
    monkeypatch.setattr(FakeEvaluator, "evaluate", measure)
    gpu.asked.clear()
    assert len(run(library, out, (BOTH, ONE)).rows) == 4
    assert len(gpu.asked) == 1  # the other was in the journal


def test_what_is_finished_after_a_gpu_has_failed_is_kept(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, failing, measure = threading.Event(), threading.Event(), FakeEvaluator.evaluate

    def evaluate(self: FakeEvaluator, pairs: Any) -> Any:
        if self.options.gpu_index == 1:
            assert taken.wait(60)
            failing.set()
            raise RuntimeError("GPU 1 fell off")
        taken.set()
        assert failing.wait(60)
        threading.Event().wait(0.2)  # the main thread has heard of it, most likely
        return measure(self, pairs)

    monkeypatch.setattr(FakeEvaluator, "evaluate", evaluate)
    out = tmp_path / "out.parquet"
    with pytest.raises(RuntimeError, match="GPU 1 fell off"):
        run(library, out, (BOTH, ONE), gpu_indices=(0, 1))
    monkeypatch.setattr(FakeEvaluator, "evaluate", measure)
    gpu.asked.clear()
    assert len(run(library, out, (BOTH, ONE)).rows) == 4
    assert len(gpu.asked) == 1, "the other was finished and is in the journal"


def test_progress_says_the_mean_with_pdl_so_far(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    run(library, tmp_path / "out.parquet", (NONE, BOTH), progress=lambda *at: seen.append(at))
    mean = (4.0 / time_us(BOTH, DEPENDENT)) ** 0.5
    fallback = 4.0 / 4.1
    assert seen == [(1, 2, pytest.approx(fallback)), (2, 2, pytest.approx(mean * fallback**0.5))]


@pytest.mark.parametrize("older", [False, True])
def test_a_disk_that_refuses_the_result_keeps_the_journal(
    older: bool, gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RecordError("cannot write out.parquet", "room there", "free space")

    if older:
        run(library, tmp_path / "out.parquet")
    with monkeypatch.context() as patch:
        patch.setattr(run_bench, "write_result", full)
        with pytest.raises(RecordError):
            run(library, tmp_path / "out.parquet")
    gpu.asked.clear()
    assert len(run(library, tmp_path / "out.parquet").rows) == 8 and gpu.asked == []


def test_a_library_that_is_not_there_is_one_clear_error(gpu: FakeGpu, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        run(tmp_path / "none.json", tmp_path / "out.parquet")
    assert gpu.options == [] and list(tmp_path.iterdir()) == []


def test_server_mode_has_one_row_per_problem_and_progress(
    gpu: FakeGpu, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def server_rows(problem: Problem, library: Library, index: int, gpu: Any, qps: float) -> list[dict[str, Any]]:
        return [{
            **problem.to_json(), "mode": "server", "pdl": False, "config": "", "status": "left_out", "fallback": True,
            "baseline": "torch", "baseline_us": 9.0, "published": 1.0, "floor_us": 1.0, "regime": "launch",
        }]  # fmt: skip

    monkeypatch.setattr("outblas_lab.pool.served_rows.server_rows", server_rows)
    seen: list[tuple[int, int, float]] = []
    result = run(
        library, tmp_path / "out.parquet", mode="server", target_qps=100.0, progress=lambda *at: seen.append(at)
    )
    assert len(result.rows) == 4 and seen == [(i + 1, 4, 1.0) for i in range(4)]


def test_a_problem_without_any_baseline_stops_the_run_in_one_line_and_is_done_again(
    gpu: FakeGpu, library: Path, tmp_path: Path
) -> None:
    gpu.missing = set(BASELINES_US)
    with pytest.raises(DeviceError, match="no baseline for 64_128_256.*it was lost.*it resumes"):
        run(library, tmp_path / "out.parquet")
    gpu.missing = set()
    assert len(run(library, tmp_path / "out.parquet").rows) == 8


def test_all_problems_to_come_are_announced_at_once(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    run(library, tmp_path / "out.parquet")
    assert gpu.expected == [(0, PROBLEMS)]


def test_one_gpu_has_the_kernels_compiled_for_all(gpu: FakeGpu, library: Path, tmp_path: Path) -> None:
    run(library, tmp_path / "out.parquet", gpu_indices=(2, 1))
    wanted = [(BOTH, PLAIN), (BOTH, DEPENDENT), (BOTH, DEPENDENT), (ONE, SMALL), (ONE, SMALL), (ONE, SMALL)]
    assert [(index, list(dict.fromkeys(pairs))) for index, pairs in gpu.compiled] == [(2, list(dict.fromkeys(wanted)))]
    gpu.compiled.clear()
    gpu.interrupt[ONE] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(library, tmp_path / "other.parquet")
    gpu.interrupt.clear()
    gpu.compiled.clear()
    run(library, tmp_path / "other.parquet")
    assert {p for _, pairs in gpu.compiled for p, _ in pairs} == {ONE}, "the rest is in the journal"
