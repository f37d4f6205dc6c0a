"""``outblas eval`` on a fake GPU: the tried candidates, the timed ones, and the written file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Speedup, Status
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_NAMES
from outblas.core.roofline import floor_us
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.tune import eval_problem
from outblas_lab.pool.latency import RequestPlan, ServerTimes
from outblas_lab.pool.served_rows import MIN_REQUESTS
from outblas_lab.pool.serving import Served
from support.fake_gpu import BASELINES_US, FakeGpu, install, time_us, timing
from support.gpus.known import H200

PROBLEM = Problem(64, 128, 256)
UNALIGNED = Problem(127, 1001, 333)
LEGAL = candidates(PROBLEM, H200)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> list[LibraryRow]:
    """Rows of the packaged library, empty until a test adds some."""
    rows: list[LibraryRow] = []
    found = classmethod(lambda cls, gpu, missing_ok=False: Library(gpu, tuple(rows)))
    monkeypatch.setattr(Library, "packaged", found)
    return rows


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, eval_problem)


def run(folder: Path, problem: Problem = PROBLEM, mode: str = "offline", qps: float | None = None) -> dict[str, Any]:
    return eval_problem.run_eval(problem, mode, qps, 0.0, 0.1, folder)


def named(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def fastest(configs: list[KernelConfig], pdl: bool) -> KernelConfig:
    return min((c for c in configs if c.pdl is pdl), key=lambda c: time_us(PROBLEM, c))


def test_the_shortlist_is_the_models_first_choices_of_either_kind() -> None:
    found = eval_problem.shortlist_candidates(PROBLEM, H200, 8)
    ranked = [LEGAL[i] for i in rank(PROBLEM, LEGAL, H200)]
    assert found == [c for c in ranked if not c.pdl][:4] + [c for c in ranked if c.pdl][:4]


def test_the_shortlist_starts_with_the_librarys_kernels_and_has_none_twice(library: list[LibraryRow]) -> None:
    last = LEGAL[int(rank(PROBLEM, LEGAL, H200)[-1])]
    first = eval_problem.shortlist_candidates(PROBLEM, H200)[0]
    library.append(
        LibraryRow(PROBLEM, "lt_auto", "", "", LibraryChoice(last, 1.2, 1.1, 1.3), LibraryChoice(first, 1.2, 1.1, 1.3))
    )
    found = eval_problem.shortlist_candidates(PROBLEM, H200)
    assert found[:2] == [last, first] and len(found) == len(set(found)) == eval_problem.CANDIDATES_TRIED + 1


def test_a_library_kernel_that_is_not_legal_is_left_out(library: list[LibraryRow]) -> None:
    illegal = Sm80MmaConfig(16, 64, wm=2)
    assert why_illegal(PROBLEM, illegal, H200) is not None
    library.append(LibraryRow(PROBLEM, "lt_auto", "", "", LibraryChoice(illegal, 1.2, 1.1, 1.3)))
    assert illegal not in eval_problem.shortlist_candidates(PROBLEM, H200)


def test_the_shortlist_of_an_unaligned_problem_is_legal() -> None:
    found = eval_problem.shortlist_candidates(UNALIGNED, H200)
    assert found and all(why_illegal(UNALIGNED, c, H200) is None for c in found)


def test_a_problem_that_no_kernel_runs_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_problem, "candidates", lambda problem, gpu: [])
    with pytest.raises(DeviceError, match="OutBLAS has no kernel for 64_128_256"):
        eval_problem.shortlist_candidates(PROBLEM, H200)


def test_the_search_is_short_and_only_its_winners_meet_the_baselines(gpu: FakeGpu, tmp_path: Path) -> None:
    run(tmp_path)
    configs = eval_problem.shortlist_candidates(PROBLEM, H200)
    search, final = gpu.options
    assert search.baselines == () and set(final.baselines) == set(BASELINE_NAMES) and search.level == "full"
    assert search.seed != final.seed  # other data than those the winners were chosen on
    winners = (fastest(configs, False), fastest(configs, True))
    assert gpu.asked == [(0, PROBLEM, tuple(configs)), (0, PROBLEM, winners)]
    assert gpu.closed == 2


def test_the_result_is_written_and_returned(gpu: FakeGpu, tmp_path: Path) -> None:
    result = run(tmp_path / "new")
    path = Path(result.pop("written"))
    assert path == tmp_path / "new" / f"eval_{PROBLEM.key}_offline.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert result["candidates_tried"] == eval_problem.CANDIDATES_TRIED and result["proof"] == "passed: static, memory"
    assert "fake" in result["provenance"]["gpu"] and result["provenance"]["sm_clock_mhz"] == 1700


def test_rows_are_ours_then_every_baseline_with_their_figures(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = named(run(tmp_path))
    assert list(rows) == ["ours", "ours_pdl", *BASELINE_NAMES]
    configs = eval_problem.shortlist_candidates(PROBLEM, H200)
    for name, pdl in (("ours", False), ("ours_pdl", True)):
        row, config = rows[name], fastest(configs, pdl)
        us = time_us(PROBLEM, config)
        assert row["us"] == us and row["speedup"] == pytest.approx(4.0 / us) and row["low"] < row["high"]
        assert row["tflops"] == pytest.approx(2 * 64 * 128 * 256 / us / 1e6)
        assert row["floor_percent"] == pytest.approx(100 * floor_us(PROBLEM, H200) / us)
        assert row["detail"] == f"vs lt_auto; {config_name(config)}"
    assert {name: rows[name]["us"] for name in BASELINE_NAMES} == BASELINES_US
    assert all("speedup" not in rows[name] for name in BASELINE_NAMES)


def test_a_baseline_that_is_missing_says_why(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.missing = {"nvmmh"}
    row = named(run(tmp_path))["nvmmh"]
    assert "us" not in row and row["detail"] == "left out: it was lost"


def test_without_a_kernel_that_uses_pdl_there_is_one_row_of_ours(gpu: FakeGpu, tmp_path: Path) -> None:
    for config in eval_problem.shortlist_candidates(PROBLEM, H200):
        if config.pdl:
            gpu.statuses[PROBLEM, config] = Status.WRONG
    rows = named(run(tmp_path))
    assert "ours" in rows and "ours_pdl" not in rows


def test_a_kernel_that_fails_its_proof_is_named_though_others_pass(gpu: FakeGpu, tmp_path: Path) -> None:
    assert run(tmp_path)["refused"] == ""
    wrong = eval_problem.shortlist_candidates(PROBLEM, H200)[0]
    gpu.statuses[PROBLEM, wrong] = Status.WRONG
    assert run(tmp_path)["refused"] == f"{config_name(wrong)}: wrong as ordered"


def test_when_nothing_passes_it_says_so_and_writes_nothing(gpu: FakeGpu, tmp_path: Path) -> None:
    for config in eval_problem.shortlist_candidates(PROBLEM, H200):
        gpu.statuses[PROBLEM, config] = Status.WRONG
    with pytest.raises(DeviceError, match="no candidate for 64_128_256.*wrong as ordered"):
        run(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("qps", [None, 0.0, -1.0])
def test_server_mode_needs_a_rate_before_anything_is_tried(gpu: FakeGpu, tmp_path: Path, qps: float | None) -> None:
    with pytest.raises(UsageError, match="target-qps"):
        run(tmp_path, mode="server", qps=qps)
    assert gpu.options == [] and list(tmp_path.iterdir()) == []


def test_server_mode_reports_percentiles(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def serve(*arguments: Any) -> Any:
        asked.append(arguments)
        found = {"ours": timing(9.0, mode="server"), "torch": timing(12.0, mode="server")}
        return Served(ServerTimes(found, found, 100.0), Speedup("torch", 12 / 9, 1.3, 1.4), {"torch": "torch.mm"})

    used: list[Any] = []
    monkeypatch.setattr("outblas_lab.pool.served_rows.serve", serve)
    monkeypatch.setattr("outblas.tune.eval_problem.use_library", lambda library, index: used.append(library))
    result = run(tmp_path, mode="server", qps=100.0)
    # outblas.matmul is timed with the kernel found here, and has its own library back afterwards.
    assert [row.problem for row in used[0].rows] == [PROBLEM] and used[0].rows[0].plain is not None
    assert used[1:] == [None]
    assert asked == [(PROBLEM, 0, RequestPlan(100.0, MIN_REQUESTS, 0.0, 0.1))]
    rows = named(result)
    assert rows["ours"]["p50_us"] == rows["ours"]["p99_us"] == 9.0 and rows["ours"]["speedup"] == 12 / 9
    assert rows["torch"]["detail"] == "torch.mm" and "speedup" not in rows["torch"]
    assert Path(result["written"]).name == f"eval_{PROBLEM.key}_server.json"
