"""The parts of benchmarks/learning.py that need no GPU: merged rows, percentiles, lost rows and result files."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.adapt.learning.learned_products import LearnedProduct, LearningReport, Stage
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow

PROBLEM, OTHER = Problem(17, 512, 512), Problem(18, 512, 512)
SHIPS, LEARNED = (LibraryChoice(Sm90WgmmaConfig(64, n), 1.2, 1.1, 1.3) for n in (64, 128))
SHIPPED = LibraryRow(PROBLEM, "torch", source="any_shape", plain=SHIPS, pdl=SHIPS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch", reason="the script fits choices by torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("learning")


def test_each_launch_option_has_what_was_learned_for_it_or_what_ships(script: Any) -> None:
    won, torch = LibraryRow(PROBLEM, "torch", plain=LEARNED), LibraryRow(PROBLEM, "torch")
    assert script.learned_row(SHIPPED, None, None) == SHIPPED
    found = script.learned_row(SHIPPED, won, None)
    assert (found.plain, found.pdl) == (LEARNED, SHIPS)
    assert script.learned_row(SHIPPED, torch, torch).plain is None
    algorithm = LibraryRow(PROBLEM, "lt_auto", "id=66")
    found = script.learned_row(SHIPPED, won, algorithm)
    assert (found.plain, found.pdl, found.fallback) == (LEARNED, None, "id=66")


def test_a_product_that_was_not_learned_is_served_as_it_ships(script: Any) -> None:
    rows = (SHIPPED, LibraryRow(OTHER, "torch", plain=SHIPS))
    products = [
        LearnedProduct(PROBLEM, "plain", row=LibraryRow(PROBLEM, "torch", plain=LEARNED)),
        LearnedProduct(OTHER, "plain", stage=Stage.LEFT_ALONE),
    ]
    first, second = script.learned_library(Library("h200", rows), products).rows
    assert first.plain == LEARNED and second == rows[1]


def test_percentiles_are_microseconds_and_need_a_step(script: Any) -> None:
    assert script.percentiles_us([0.001] * 99 + [0.1]) == pytest.approx({"p50": 1000.0, "p99": 1990.0})
    with pytest.raises(UsageError, match="more --steps"):
        script.percentiles_us([])


def test_only_steps_during_learning_count_as_such(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def learned() -> LearningReport:
        stage = Stage.TIMING if len(steps) < script.WARM_UP + 7 else Stage.SETTLED
        return LearningReport((LearnedProduct(PROBLEM, "plain", stage=stage),), 0.0, 1.0)

    monkeypatch.setattr(script.outblas, "learned", learned, raising=False)
    assert len(script.timed_steps(lambda: steps.append(1), 100, while_learning=True)) == 7
    assert len(script.timed_steps(lambda: steps.append(1), 100, while_learning=False)) == 100


def test_a_soak_counts_wrong_results_and_names_lost_rows(script: Any) -> None:
    found = [{"wrong": 0, "saved": [PROBLEM.key]}, {"wrong": 2, "saved": [PROBLEM.key, OTHER.key]}]
    result = script.soak_result(found, Library("h200", (SHIPPED,)))
    assert result == {"wrong": 2, "saved": 2, "lost": [OTHER.key]}


def test_a_worker_of_the_soak_that_fails_is_an_error(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(communicate=lambda: ("", None), returncode=1)
    monkeypatch.setattr(script.subprocess, "Popen", lambda *_, **__: failed)
    with pytest.raises(UsageError, match=r"exit codes \[1, 1\]"):
        script.soak(Namespace(calls=10, processes=2, out=Path("unused")))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--drawn", "--layout", "NN"], "drawn_nn_fp16_fp32_learned.parquet"),
        (["--loop"], "learning_loop.json"),
        (["--soak"], "learning_soak.json"),
    ],
)
def test_each_kind_has_its_result_file_and_a_library_of_its_own(
    options: list[str], name: str, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["learning.py", *options, "--work", str(tmp_path)])
    for kind in ("bench_learned", "loop", "soak"):
        monkeypatch.setattr(script, kind, seen.append)
    script.main()
    assert [one.out for one in seen] == [Path("results/h200") / name]
    assert script.os.environ["OUTBLAS_LIBRARY"] == str(tmp_path / "own.json")


def test_what_is_lost_is_named_with_the_end_of_its_learning(script: Any) -> None:
    problem = Problem(17, 64, 64)
    row = {"m": 17, "n": 64, "k": 64, "layout": "TN", "dtype": "fp16", "acc": "fp32", "pdl": False, "published": 0.9}
    ends = [LearnedProduct(problem, "plain", detail="none of 9"), LearnedProduct(problem, "pdl", detail="other")]
    rows = [row, row | {"published": 1.2}, row | {"pdl": True}, row | {"m": 18}]
    assert script.lost(rows, ends) == [
        f"0.900 {problem.key}: none of 9",
        f"0.900 {replace(problem, m=18).key}: not met",
    ]
