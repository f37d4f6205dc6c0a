"""benchmarks/torch_accuracy.py on a CPU: its products, and what it counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.suites import suite


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("torch_accuracy")


def test_half_of_the_products_are_of_the_grid(script: Any) -> None:
    drawn = list(script.products(64, 0))
    assert drawn == list(script.products(64, 0)) != list(script.products(64, 1))
    grid = {(p.m, p.n, p.k) for p in suite("grid1000")}
    assert all((p.m, p.n, p.k) in grid for p in drawn[1::2])
    kinds = {(p.layout, p.dtype, p.rows_aligned) for p in drawn[::2]}
    assert len(kinds) == 8 and max(max(p.m, p.n, p.k) for p in drawn) <= script.MOST


def test_a_result_has_every_switch_and_the_worst_of_each(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = script.error_ratios

    def with_one_outside(problem: Any, device: str, seed: int) -> dict[str, float]:
        found = real(problem, device, seed)
        return {**found, "torch": 7.25} if seed == 3 else found

    monkeypatch.setattr(script, "error_ratios", with_one_outside)
    out = tmp_path / "new" / "r.json"
    script.main(["--device", "cpu", "--count", "16", "--most", "128", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["switches"]["torch_full"].values()) == {False}
    assert set(result["by_dtype"]) == {"fp16", "bf16"} and result["provenance"]["commit"]
    for rows in result["by_dtype"].values():
        who = {"torch", "outblas_fallback", "outblas_accurate", "torch_full"}
        assert set(rows) == who and {r["n"] for r in rows.values()} == {8}
    rows = result["by_dtype"]["fp16"]
    assert (rows["torch"]["outside"], rows["torch"]["worst"]) == (1, 7.25)
    assert rows["torch_full"]["outside"] == 0 and 0 < rows["torch_full"]["worst"] <= 1
    assert result["cost_of_full_precision"] == {}, "nothing is timed on a CPU"
    assert not list(out.parent.glob("*.jsonl"))


def test_an_interrupted_run_resumes(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PIECE", 4)
    real, seen = script.error_ratios, []

    def stops(problem: Any, device: str, seed: int) -> dict[str, float]:
        seen.append(seed)
        if len(seen) == 7:
            raise KeyboardInterrupt
        return dict(real(problem, device, seed))

    monkeypatch.setattr(script, "error_ratios", stops)
    arguments = ["--device", "cpu", "--count", "10", "--most", "64", "--out", str(tmp_path / "r.json")]
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments)
    script.main(arguments)
    assert seen == [*range(7), *range(4, 10)]
    by_dtype = json.loads((tmp_path / "r.json").read_text())["by_dtype"]
    assert sum(rows["torch"]["n"] for rows in by_dtype.values()) == 10


def test_several_processes_count_the_same(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PIECE", 3)
    found = []
    for processes in ("1", "2"):
        out = tmp_path / f"{processes}.json"
        script.main(["--device", "cpu", "--count", "8", "--most", "64", "--processes", processes, "--out", str(out)])
        found.append(json.loads(out.read_text())["by_dtype"])
    assert found[0] == found[1] and sum(rows["torch"]["n"] for rows in found[0].values()) == 8


def test_costs_are_of_drawn_products_and_those_of_the_grid(script: Any) -> None:
    costs = [{"torch": 1.0, "outblas": 4.0}, {"torch": 2.0, "outblas": 1.0}, {"torch": 1.0, "outblas": 1.0}]
    found = script.costs_by_group(costs)
    assert found["drawn"]["outblas"] == {"n": 2, "geomean": pytest.approx(2.0), "worst": 4.0}
    assert found["grid"]["torch"] == {"n": 1, "geomean": pytest.approx(2.0), "worst": 2.0}
    assert script.costs_by_group([]) == {}


def test_without_a_gpu_it_says_so_in_one_line(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="^error: "):
        script.main(["--count", "1", "--out", str(tmp_path / "r.json")])
