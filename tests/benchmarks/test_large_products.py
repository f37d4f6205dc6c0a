"""Large products in blocks: which are timed, and what is counted, on a fake GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from pages.notes import LARGE

from outblas.core.suites import block_problems, suite
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import read_result
from outblas_lab.pool import run_bench
from support.fake_gpu import install

ROOT = Path(__file__).resolve().parents[2]
KERNEL = LibraryChoice(Sm90WgmmaConfig(128, 256, consumers=2), 1.1, 1.0, 1.2)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("large_products")


def row(published: float, fallback: bool = False) -> dict[str, Any]:
    about = dict.fromkeys(("m", "n", "k", "config", "low", "high", "ours_mhz", "baseline_mhz"))
    return {**about, "published": published, "fallback": fallback}


def test_a_win_is_half_a_percent_of_a_kernel_of_ours(script: Any) -> None:
    about = dict.fromkeys(("gpu", "driver", "toolchain", "date", "commit", "command"), "x")
    found = script.entry_of([row(1.005), row(1.0), row(0.9), row(2.0, fallback=True)], about, 7)
    assert (found["problems"], found["with_kernel"], found["wins"], len(found["rows"])) == (7, 3, 1, 3)
    assert found["geomean"] == round((1.005 * 0.9) ** (1 / 3), 6) and found["provenance"] == about


def test_products_without_a_kernel_are_not_timed_and_other_entries_stay(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, (first, second, *_) = install(monkeypatch, run_bench), block_problems(suite("grid1000"))
    rows = (LibraryRow(first, "torch", plain=KERNEL), LibraryRow(second, "torch"))
    Library("h200", rows, {"tables": {}}).save(tmp_path / "library.json")
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"format": LARGE.form, "libraries": {"before": {"wins": 3}}}))
    given = ["--library", str(tmp_path / "library.json"), "--work", str(tmp_path), "--out", str(out)]
    assert script.main([*given, "--name", "mine"]) == 0
    assert [problem for _, problem, _ in fake.asked] == [first] and fake.options[0].mode == "block"
    found = json.loads(out.read_text())["libraries"]
    assert found["before"] == {"wins": 3} and found["mine"]["problems"] == 187 and found["mine"]["with_kernel"] == 1
    assert " of 1 kernels win by 0.5%" in capsys.readouterr().out
    assert script.main(["--library", str(tmp_path / "none.json")]) == 2


def test_a_bench_in_blocks_is_counted_and_another_is_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, out = ROOT / "results" / "h200", tmp_path / "out.json"
    out.write_text(json.dumps({"format": LARGE.form, "libraries": {}}))
    assert script.main(["--bench", str(published / "grid1000_tn_fp16_fp32_block.parquet"), "--out", str(out)]) == 0
    ours = [row for row in read_result(published / "grid1000_tn_fp16_fp32_block.parquet").rows if not row["fallback"]]
    found = json.loads(out.read_text())["libraries"]["packaged"]
    assert found["with_kernel"] == len(found["rows"]) == len(ours)
    assert found["wins"] == sum(row["published"] >= 1.005 for row in ours)
    assert script.main(["--bench", str(published / "grid1000_tn_fp16_fp32_offline.parquet"), "--out", str(out)]) == 2
    assert "another mode" in capsys.readouterr().err
