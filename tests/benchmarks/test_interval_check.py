"""benchmarks/interval_check.py: an interval's decision beside the kernel that is tuned for that very M."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import ConfigError, UsageError
from outblas.core.weight import Weight
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL, Model, ModelledEvaluator

WEIGHT = Weight(512, 512)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch", reason="the script fits choices by torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("interval_check")


def library(*ranges: tuple[int, int, Any]) -> Library:
    """Intervals (first, last, kernel) of the weight; None: torch."""
    rows = (
        (LibraryRow(WEIGHT.problem(first), "torch", plain=kernel and LibraryChoice(kernel, 1.2, 1.1, 1.3)), last)
        for first, last, kernel in ranges
    )
    return Library("h200", (), {}, tuple(LibraryInterval(row, last, (row.problem.m, last)) for row, last in rows))


def test_weights_and_problems_are_drawn_by_the_seed(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = script.drawn_weights(20, 1)
    assert len(set(drawn)) == 20 and drawn == script.drawn_weights(20, 1) != script.drawn_weights(20, 2)
    assert {nk for layers in script.MODELS.values() for nk in layers} >= set(drawn)
    script.main(["--names", "2", "--seed", "1"])
    assert capsys.readouterr().out.split() == [word for n, k in drawn[:2] for word in ("--linear", f"{n}_{k}")]
    problems = script.drawn_problems(library((1, 64, SMALL), (65, 4096, LARGE)), 40, 7)
    assert len(set(problems)) == 40 and {Weight.of(p) for p in problems} == {WEIGHT}
    assert min(p.m for p in problems) < 64 < max(p.m for p in problems) <= 4096
    assert len(script.drawn_problems(library((3, 6, SMALL)), 40, 7)) == 4
    with pytest.raises(UsageError, match="no intervals"):
        script.drawn_problems(Library("h200", ()), 40, 7)


def test_several_runs_share_the_weights(script: Any, tmp_path: Path) -> None:
    other = replace(library((1, 64, LARGE)).intervals[0].row, problem=Weight(256, 512).problem(1))
    for name, found in (
        ("a", library((1, 64, SMALL))),
        ("b", Library("h200", (), {}, (LibraryInterval(other, 64, (1, 64)),))),
    ):
        (tmp_path / name).mkdir()
        found.save(tmp_path / name / "library.json")
    both = script.library_of_runs([tmp_path / "a", tmp_path / "b"])
    assert {Weight.of(p) for p in script.drawn_problems(both, 5, 0)} == {WEIGHT, Weight(256, 512)}
    with pytest.raises(ConfigError, match="overlap"):
        script.library_of_runs([tmp_path / "a", tmp_path / "a"]).lookup(WEIGHT.problem(5))


def packaged(problems: list[Any], gpu: Any) -> Library:
    """The package chooses the small kernel for whatever it is asked."""
    choice = LibraryChoice(SMALL, 1.2, 1.1, 1.3)
    return Library("h200", tuple(LibraryRow(problem, "torch", plain=choice) for problem in problems))


def without_kernels(problems: list[Any], gpu: Any) -> Library:
    """The package chooses torch for whatever it is asked."""
    return Library("h200", tuple(map(LibraryRow, problems)))


@pytest.fixture
def model(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    """The large kernel is twice as fast from M = 100 on, and torch is level with the small one."""
    found = Model({SMALL: lambda m: 1.2, LARGE: lambda m: 2.4 if m >= 100 else 0.6})
    monkeypatch.setattr(script, "LiveEvaluator", lambda *_, **__: contextlib.nullcontext(ModelledEvaluator(found)))
    monkeypatch.setattr(script, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(script, "shipped_library", packaged)
    monkeypatch.setattr(script, "collect_provenance", lambda command, index: {"command": command})
    library((1, 99, SMALL), (100, 199, SMALL), (200, 300, None)).save(tmp_path / "library.json")
    return found


def run(script: Any, tmp_path: Path) -> dict[str, Any]:
    script.main(
        ["--run", str(tmp_path), "--agent", "exhaustive", "--work", str(tmp_path / "work")]
        + ["--out", str(tmp_path / "out.json")]
    )
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


def test_cases_below_the_kernel_of_that_m_are_counted(script: Any, model: Model, tmp_path: Path) -> None:
    found = run(script, tmp_path)
    by_m = {int(row["problem"].split("_")[0]): row for row in found["rows"]}
    assert found["cases"] == 40 and not found["failed"]
    late = [row for m, row in by_m.items() if 100 <= m < 200]
    assert late and all(row["ratio"] == pytest.approx(0.5) for row in late), "1.2 where 2.4 can be had"
    open_m = [row for m, row in by_m.items() if 200 < m < 300]
    assert open_m and {row["interval"] for row in open_m} == {config_name(SMALL)}, "as the package says"
    assert found["below"] == len(late) + len(open_m) == sum(m >= 100 for m in by_m)
    early = [row for m, row in by_m.items() if m < 100]
    assert all(row["ratio"] == 1 for row in early) and found["same_decision"] >= len(early)


def test_an_m_that_no_interval_decides_has_the_decision_of_the_package(
    script: Any, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    gap = library((1, 99, LARGE), (200, 300, None))
    problems = [WEIGHT.problem(m) for m in (50, 150, 250)]
    found = script.decisions(gap, [*problems, WEIGHT.problem(200)], H200)
    kernels = {problem.m: row.plain and row.plain.config for problem, row in found.items()}
    assert kernels == {50: LARGE, 150: SMALL, 250: SMALL, 200: None}, "200 was measured"
    monkeypatch.setattr(script, "shipped_library", without_kernels)
    kept = script.decisions(gap, problems, H200)[problems[2]]
    assert kept.interval is not None, "the package has nothing"


def test_a_stopped_run_measures_nothing_twice(script: Any, model: Model, tmp_path: Path) -> None:
    model.kill_at, model.error = 30, RuntimeError("killed")
    with pytest.raises(RuntimeError):
        run(script, tmp_path)
    model.kill_at = None
    first = len(model.asked)
    whole = run(script, tmp_path)
    counts = len(model.asked)
    assert run(script, tmp_path) == whole and len(model.asked) == counts > first


def test_a_kernel_that_fails_is_named_not_counted(
    script: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "shipped_library", without_kernels)
    asked: set[Any] = set()

    def fails(problem: Any, config: Any) -> bool:
        """The second time that the small kernel is tried."""
        again = (problem, config) in asked
        asked.add((problem, config))
        return again and config == SMALL

    model.fails = fails
    found = run(script, tmp_path)
    assert found["failed"] and all(row["ratio"] is None for row in found["failed"])
    assert found["cases"] == 40


def part(path: Path, seed: int, **ratios: float) -> str:
    rows = [{"problem": key, "interval": "torch", "tuned": "x", "ratio": ratio} for key, ratio in ratios.items()]
    about = {"gpu": "NVIDIA H200", "driver": "1", "toolchain": {}, "commit": f"of {path.name}", "command": path.name}
    path.write_text(json.dumps({"cases": len(rows) + 1, "rows": rows, "budget": 8, "seed": seed, "provenance": about}))
    return str(path)


def test_checks_of_several_gpus_are_joined(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [part(tmp_path / "a.json", 1, p=1.0, q=0.5), part(tmp_path / "b.json", 1, r=0.97)]
    script.main(["--join", *files, "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["cases"], found["same_decision"], found["below"], found["parts"]) == (5, 2, 2, 2)
    assert [row["problem"] for row in found["rows"]] == ["p", "q", "r"] and found["commands"] == ["a.json", "b.json"]
    assert found["commits"] == ["of a.json", "of b.json"]
    for other in (part(tmp_path / "c.json", 2, s=1.0), files[0]):
        with pytest.raises(SystemExit, match="one kind of check"):
            script.main(["--join", files[0], other, "--out", str(tmp_path / "none.json")])
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        with pytest.raises(SystemExit, match=r"error: .*interval_check"):
            script.main(["--join", files[0], str(tmp_path / name), "--out", str(tmp_path / "none.json")])
    assert not (tmp_path / "none.json").exists()
