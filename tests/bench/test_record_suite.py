"""Recording a catalogue, on a fake GPU: the file is a sound matrix whatever happened on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas_lab.pool import record_suite
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.fake_gpu import BASELINES_US, FakeGpu, install, time_us
from support.gpus.known import H200

CATALOGUE: tuple[KernelConfig, ...] = (
    Sm90WgmmaConfig(64, 64),
    Sm90WgmmaConfig(64, 64, pdl=True),
    Sm80MmaConfig(64, 64),
    Sm80MmaConfig(32, 64, 32, vec=1),
)
ALIGNED = (Problem(64, 128, 256), Problem(128, 128, 256), Problem(256, 128, 64))
#: Rows of K = 255 elements: TMA cannot take them, nor loads of eight elements.
ODD = Problem(64, 127, 255)
PROBLEMS = (*ALIGNED, ODD)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(
        record_suite, "pruned_mask", lambda problem, configs, gpu, factor: np.zeros(len(configs), dtype=bool)
    )
    return install(monkeypatch, record_suite)


def run(folder: Path, problems: tuple[Problem, ...] = PROBLEMS, **kwargs: float) -> Path | None:
    return record_suite.run_record(problems, "grid1000", CATALOGUE, folder, **kwargs)


def same(one: Recording, two: Recording) -> bool:
    assert (one.problems, one.catalogue, one.suite) == (two.problems, two.catalogue, two.suite)
    return all(
        np.array_equal(getattr(one, name), getattr(two, name), equal_nan=name in ("median_us", "spread"))
        for name in ("status", "median_us", "spread", "rounds")
    ) and all(np.array_equal(one.baselines[n], two.baselines[n], equal_nan=True) for n in one.baselines)


def test_a_record_is_a_recording_that_loads_with_every_figure_in_its_cell(gpu: FakeGpu, tmp_path: Path) -> None:
    path = run(tmp_path)
    assert path is not None and path.parent == tmp_path
    found = Recording.load(tmp_path)
    assert found.problems == PROBLEMS and found.catalogue == CATALOGUE and found.suite == "grid1000"
    for row, problem in enumerate(PROBLEMS):
        for column, config in enumerate(CATALOGUE):
            if why_illegal(problem, config, H200) is None:
                assert found.status[row, column] == STATUS_CODES[Status.PASSED]
                assert found.median_us[row, column] == pytest.approx(time_us(problem, config))
                assert found.rounds[row, column] == record_suite.ROUNDS
        assert found.baselines_of(problem) == pytest.approx(BASELINES_US)
    assert found.baseline_detail["lt_auto"] == ("lt_auto's algorithm",) * len(PROBLEMS)
    assert "fake" in found.provenance["gpu"]


def test_a_record_can_be_replayed(gpu: FakeGpu, tmp_path: Path) -> None:
    run(tmp_path)
    replay = ReplayEvaluator(Recording.load(tmp_path))
    (answer,) = replay.evaluate([(ALIGNED[0], CATALOGUE[1])])
    assert answer.status is Status.PASSED and answer.timing is not None
    assert answer.timing.median_us == pytest.approx(time_us(ALIGNED[0], CATALOGUE[1]))
    assert set(replay.candidates(ODD)) == {CATALOGUE[3]}


def test_illegal_cells_are_marked_and_never_tried(gpu: FakeGpu, tmp_path: Path) -> None:
    run(tmp_path)
    found = Recording.load(tmp_path)
    illegal = [column for column, config in enumerate(CATALOGUE) if why_illegal(ODD, config, H200) is not None]
    assert illegal == [0, 1, 2]
    assert (found.status[3, illegal] == STATUS_CODES[Status.ILLEGAL]).all() and np.isnan(
        found.median_us[3, illegal]
    ).all()
    assert [configs for _, problem, configs in gpu.asked if problem == ODD] == [(CATALOGUE[3],)]


def test_what_the_model_drops_is_marked_and_never_tried(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Problem, tuple[KernelConfig, ...]]] = []

    def model(problem: Problem, configs: list[KernelConfig], gpu: object, factor: float) -> np.ndarray:
        assert factor == record_suite.LEAVE_OUT_BEYOND > 1
        asked.append((problem, tuple(configs)))
        return np.array([problem == ALIGNED[1] and config == CATALOGUE[2] for config in configs])

    monkeypatch.setattr(record_suite, "pruned_mask", model)
    run(tmp_path)
    found = Recording.load(tmp_path)
    expected = np.zeros(found.status.shape, dtype=bool)
    expected[1, 2] = True
    assert ((found.status == STATUS_CODES[Status.LEFT_OUT]) == expected).all()
    assert asked[3] == (ODD, (CATALOGUE[3],))  # the model is asked about legal configs only
    assert all(CATALOGUE[2] not in configs for _, problem, configs in gpu.asked if problem == ALIGNED[1])


def test_long_problems_are_recorded_of_fewer_cells(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[Problem, float] = {}

    def model(problem: Problem, configs: list[KernelConfig], gpu: object, factor: float) -> np.ndarray:
        asked[problem] = factor
        return np.zeros(len(configs), dtype=bool)

    monkeypatch.setattr(record_suite, "pruned_mask", model)
    long = Problem(8192, 8192, 8192)
    run(tmp_path, (ALIGNED[0], long))
    assert asked == {ALIGNED[0]: record_suite.LEAVE_OUT_BEYOND, long: record_suite.LONG_LEAVE_OUT_BEYOND}
    assert 1 < record_suite.LONG_LEAVE_OUT_BEYOND < record_suite.LEAVE_OUT_BEYOND


def test_a_failure_is_a_cell_without_a_time(gpu: FakeGpu, tmp_path: Path) -> None:
    for column, status in enumerate((Status.WRONG, Status.HANG, Status.COMPILE_ERROR)):
        gpu.statuses[ALIGNED[column], CATALOGUE[column]] = status
    run(tmp_path)
    found = Recording.load(tmp_path)
    diagonal = [found.status[i, i] for i in range(3)]
    assert diagonal == [STATUS_CODES[s] for s in (Status.WRONG, Status.HANG, Status.COMPILE_ERROR)]
    assert np.isnan([found.median_us[i, i] for i in range(3)]).all()


def test_a_baseline_that_is_missing_is_missing_in_the_file_only(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.missing = {"nvmmh"}
    run(tmp_path)
    assert "nvmmh" not in Recording.load(tmp_path).baselines_of(ALIGNED[0])


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("the worker cannot start")])
def test_a_run_that_was_stopped_goes_on_and_ends_in_the_same_file(
    gpu: FakeGpu, tmp_path: Path, stop: BaseException
) -> None:
    run(tmp_path / "whole")
    gpu.interrupt[ALIGNED[2]] = stop
    with pytest.raises(type(stop)):
        run(tmp_path / "resumed")
    assert not list((tmp_path / "resumed").glob("*.parquet"))
    gpu.interrupt.clear()
    gpu.asked.clear()
    run(tmp_path / "resumed")
    assert [problem for _, problem, _ in gpu.asked] == [ALIGNED[2], ODD]
    assert same(Recording.load(tmp_path / "whole"), Recording.load(tmp_path / "resumed"))


def test_other_settings_do_not_resume(gpu: FakeGpu, tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(UsageError, match="other settings"):
        run(tmp_path, ALIGNED)
    assert Recording.load(tmp_path).problems == PROBLEMS


def test_a_recording_is_not_gone_on_with_on_another_gpu(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.interrupt[PROBLEMS[0]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.setattr(record_suite, "gpu_of_device", lambda index: replace(H200, name="another"))
    with pytest.raises(UsageError, match="other settings"):
        run(tmp_path)


def test_a_recording_without_its_journal_is_not_replaced(gpu: FakeGpu, tmp_path: Path) -> None:
    path = run(tmp_path)
    assert path is not None and run(tmp_path) == path, "its own journal may write it again"
    (journal,) = tmp_path.glob("*.jsonl")
    journal.unlink()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="without its journal.*another --out"):
        run(tmp_path)
    assert path.read_bytes() == before


def test_the_evaluator_is_told_what_a_recording_needs_and_is_closed(gpu: FakeGpu, tmp_path: Path) -> None:
    run(tmp_path)
    (options,) = gpu.options
    assert (options.rounds, options.level, options.chunk) == (record_suite.ROUNDS, "full", len(CATALOGUE))
    assert options.long_rounds == record_suite.LONG_ROUNDS < record_suite.ROUNDS
    assert gpu.closed == 1


def test_progress_counts_problems(gpu: FakeGpu, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    record_suite.run_record(PROBLEMS, "grid1000", CATALOGUE, tmp_path, progress=lambda *at: seen.append(at))
    assert seen == [(i + 1, 4) for i in range(4)]


def test_a_disk_that_refuses_keeps_the_journal(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Recording, folder: Path) -> Path:
        raise RecordError("recording could not be written", "free disk space", "free some")

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "write", full)
        with pytest.raises(RecordError):
            run(tmp_path)
    gpu.asked.clear()
    assert run(tmp_path) is not None and gpu.asked == []


def test_a_resumed_run_trusts_the_proofs_of_its_own_journal_only(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.statuses[ALIGNED[0], CATALOGUE[1]] = Status.WRONG  # never passes before the interruption
    gpu.statuses[ALIGNED[1], CATALOGUE[1]] = Status.WRONG
    gpu.interrupt[ALIGNED[2]] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(tmp_path)
    assert gpu.options[0].proved == frozenset()
    gpu.interrupt.clear()
    run(tmp_path)
    assert gpu.options[1].proved == {config_name(c) for c in CATALOGUE if c is not CATALOGUE[1]}


def test_other_kernels_do_not_resume(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row measured before a kernel file was edited is not mixed with rows measured after."""
    run(tmp_path)
    monkeypatch.setattr(record_suite, "kernels_sha", lambda: "another")
    with pytest.raises(UsageError, match="other settings"):
        run(tmp_path)


def test_a_problem_without_any_baseline_stops_the_run_in_one_line_and_is_done_again(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    gpu.missing = set(BASELINES_US)
    with pytest.raises(DeviceError, match="no baseline for 64_128_256.*it was lost.*it resumes"):
        run(tmp_path)
    gpu.missing = set()
    assert run(tmp_path) is not None
