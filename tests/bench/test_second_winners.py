"""A cold bench of a library with second winners, on fake GPUs: the plain choice is published beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner
from outblas.records.results import read_result
from outblas_lab.build.library_tables import is_bench_of
from outblas_lab.pool import run_bench
from outblas_lab.publish.summary import summarise
from support.fake_gpu import BASELINES_US, BENCH_ONLY_US, FakeGpu, install, time_us

PLAIN, PDL, OTHER = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True), Sm90WgmmaConfig(64, 32)
KERNEL, FALLBACK, FILLED, NAMED = (Problem(m, 128, 256) for m in (64, 128, 256, 512))
BEST = BASELINES_US["lt_auto"]
CHOICE = LibraryChoice(PLAIN, 1.2, 1.1, 1.3)
ROW = LibraryRow(KERNEL, "lt_auto", "id=66", "cuda:0", CHOICE, LibraryChoice(PDL, 1.3, 1.2, 1.4))
LIBRARY = Library(
    "h200",
    (
        replace(ROW, cold=SecondWinner(OTHER, 1.1, 1.05, 1.2)),
        replace(ROW, problem=FALLBACK, cold=SecondWinner(None, 1.1, 1.05, 1.2)),
        replace(ROW, problem=FILLED, plain=None, cold=SecondWinner(OTHER, 1.1, 1.05, 1.2)),
        replace(ROW, problem=NAMED, plain=None, cold=SecondWinner(None, 1.1, 1.05, 1.2, "id=66 tile=5")),
    ),
)
PROBLEMS = (KERNEL, FALLBACK, FILLED, NAMED)


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, run_bench)


def bench(path: Path, mode: str) -> dict[tuple[Problem, bool], dict[str, Any]]:
    request = run_bench.BenchRequest(PROBLEMS, "grid1000", LIBRARY, path, mode=mode)
    return {(Problem.from_json(row), row["pdl"]): row for row in read_result(run_bench.run_bench(request)).rows}


def test_a_cold_bench_times_the_second_winner_and_its_plain_choice_together(gpu: FakeGpu, tmp_path: Path) -> None:
    path = tmp_path / "cold.parquet"
    rows = bench(path, "offline_cold")
    kernel, fallback, filled, named = (rows[problem, False] for problem in PROBLEMS)
    assert (kernel["config"], kernel["published"]) == (config_name(OTHER), BEST / time_us(KERNEL, OTHER))
    assert (kernel["plain_config"], kernel["plain_us"]) == (config_name(PLAIN), time_us(KERNEL, PLAIN))
    assert kernel["plain_speedup"] == BEST / time_us(KERNEL, PLAIN)
    assert (fallback["config"], fallback["fallback"], fallback["ran"]) == ("", True, "fallback's algorithm")
    assert (fallback["plain_config"], fallback["plain_us"]) == (config_name(PLAIN), time_us(FALLBACK, PLAIN))
    assert (filled["config"], filled["plain_config"]) == (config_name(OTHER), "")
    assert filled["plain_us"] == BENCH_ONLY_US["fallback"]
    assert (named["config"], named["ran"], named["ours_us"]) == ("", "second_algorithm's algorithm", 3.9)
    assert (named["plain_config"], named["plain_us"]) == ("", BENCH_ONLY_US["fallback"])
    assert all(rows[problem, True]["plain_speedup"] is None for problem in PROBLEMS), "only plain calls have them"
    assert rows[KERNEL, True]["config"] == config_name(PDL)
    assert is_bench_of(path, LIBRARY, PROBLEMS)
    plain, pdl = summarise(path)
    assert plain["plain_choice"]["n"] == 4 and "plain_choice" not in pdl


def test_a_bench_in_another_mode_times_the_plain_choice_alone(gpu: FakeGpu, tmp_path: Path) -> None:
    rows = bench(tmp_path / "hot.parquet", "offline")
    assert rows[KERNEL, False]["config"] == rows[FALLBACK, False]["config"] == config_name(PLAIN)
    assert rows[FILLED, False]["fallback"] and all(row["plain_config"] is None for row in rows.values())
    assert is_bench_of(tmp_path / "hot.parquet", LIBRARY, PROBLEMS)
    assert not any(OTHER in configs for _, _, configs in gpu.asked)


def test_the_kernels_of_second_winners_are_compiled_ahead(gpu: FakeGpu, tmp_path: Path) -> None:
    bench(tmp_path / "cold.parquet", "offline_cold")
    assert {(KERNEL, OTHER), (FILLED, OTHER)} <= {pair for _, pairs in gpu.compiled for pair in pairs}


def test_single_requests_are_served_on_the_first_gpu_alone(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def server_rows(problem: Problem, library: Library, index: int, gpu: Any, qps: float) -> list[dict[str, Any]]:
        asked.append(index)
        return [{
            **problem.to_json(), "mode": "server", "pdl": False, "config": "", "status": "left_out", "fallback": True,
            "baseline": "torch", "baseline_us": 9.0, "published": 1.0, "floor_us": 1.0, "regime": "launch",
        }]  # fmt: skip

    monkeypatch.setattr("outblas_lab.pool.served_rows.server_rows", server_rows)
    path = tmp_path / "server.parquet"
    run_bench.run_bench(run_bench.BenchRequest(PROBLEMS, "grid1000", LIBRARY, path, (1, 0), "server", target_qps=9.0))
    assert asked == [1, 1, 1, 1]
