"""`outblas fit` on the command line: its help, its refusals, and which step reaches which function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.files import lock_folder

pytest.importorskip("torch", reason="what any shape is given is fitted by torch")

from outblas_lab.build import any_shape_run  # noqa: E402
from outblas_lab.train import (  # noqa: E402
    fit_answers,
    fit_any_shape,
    fit_any_shape_run,
)
from support.cli_fixture import refused  # noqa: E402


def fit(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["fit", *arguments], env={"COLUMNS": "200"})


def test_without_a_command_it_tells_all_three() -> None:
    shown = fit().output
    assert all(name in shown for name in ("catalogue", "model", "any-shape")) and "error" not in shown


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("catalogue", ("--out", "--recording", "--store", "--kernels")),
        ("model", ("--recording", "--store", "--folds", "--out")),
        (
            "any-shape",
            ("STEP", "--count", "--measurements", "--seed", "--work", "--cells", "--proved", "--out", "--summary")
            + ("--trials", "--build", "--held-out", "--every", "--more", "--answers", "--layouts"),
        ),
    ],
)
def test_help_names_every_option(name: str, options: tuple[str, ...]) -> None:
    done = fit(name, "--help")
    assert done.exit_code == 0 and all(option in done.stdout for option in options)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["catalogue", "--out", "OUT"], "pass --recording, --store or both"),
        (["catalogue", "--out", "OUT", "--store", "missing.sqlite"], "missing.sqlite"),
        (["catalogue", "--out", "OUT", "--recording", "missing"], "missing"),
        (["catalogue", "--out", "OUT", "--recording", "missing", "--kernels", "0"], "--kernels"),
        (["model"], "pass --recording, --store or both"),
        (["model", "--store", "missing.sqlite"], "missing.sqlite"),
        (["model", "--store", "missing.sqlite"], "missing.sqlite"),
        (["model", "--recording", "missing"], "missing"),
        (["model", "--recording", "missing", "--folds", "1"], "--folds"),
        (["any-shape", "guess"], "record or extend or answers or collect or fit or evaluate or prove or bench"),
        (["any-shape", "evaluate", "--every", "0"], "--every"),
        (["any-shape", "evaluate", "--cells", "missing.parquet"], "missing.parquet"),
        (["any-shape", "collect", "--build", "missing"], "missing has no finished trial"),
        (["any-shape", "record", "--count", "0"], "--count"),
        (["any-shape", "record", "--measurements", "0"], "--measurements"),
        (["any-shape", "fit", "--cells", "missing.parquet"], "missing.parquet"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in refused(fit(*arguments))
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize("arguments", [["catalogue"], ["any-shape"], ["guess"]], ids=" ".join)
def test_what_is_missing_or_unknown_is_one_line(arguments: list[str]) -> None:
    done = fit(*arguments)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")


def test_two_fits_do_not_share_a_directory(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        assert "is in use by another process" in refused(fit("any-shape", "fit", "--work", str(tmp_path)))


def test_random_shapes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(any_shape_run, "record", lambda *given: asked.append(given) or "7 cells of 3 problems")
    cells = tmp_path / "cells.parquet"
    done = fit("any-shape", "record", "--count", "3", "--seed", "5", "--work", str(tmp_path), "--cells", str(cells))
    assert done.exit_code == 0, done.stderr
    assert asked == [(any_shape_run.shapes(3, 5), any_shape_run.MEASUREMENTS, tmp_path / "store.sqlite", cells)]
    assert done.stdout == f"7 cells of 3 problems: {cells}\n"


def test_the_fit_goes_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fit_all(cells: list[Path], proved: Path, folder: Path, tell: Any) -> list[str]:
        asked.append((cells, proved, folder))
        return ["9 kernels", "8 kernels"]

    monkeypatch.setattr(fit_any_shape_run, "fit_all", fit_all)
    monkeypatch.setattr(fit_answers, "fit_answers", lambda *given: asked.append(given[:2]) or ["a margin"])
    monkeypatch.chdir(tmp_path)
    results = Path("results/any_shapes")
    results.mkdir(parents=True)
    cells, trials, proved = (results / f"h200_{name}" for name in ("cells.parquet", "trials.parquet", "proved.json"))
    beside = [results / f"{name}.parquet" for name in ("h100_extension", "h200_extension", "h200_extension_b")]
    others, answers = results / "h100_trials.parquet", [results / f"{g}_answers.parquet" for g in ("h100", "h200")]
    for file in (*beside, *answers, others, cells, trials, results / "h200_bench.parquet"):
        file.touch()
    done = fit("any-shape", "fit", "--work", "work")
    packaged, of_answers = (fit_any_shape_run.packaged_folder(name) for name in ("any_shape", "answers"))
    assert {file.name for file in packaged.iterdir()} == {file.name for file in of_answers.iterdir()} >= {"h200.npz"}
    assert asked == [([cells, trials, *sorted([*beside, others])], proved, packaged), (answers, of_answers)]
    assert done.stdout == f"9 kernels\n8 kernels\na margin\nwritten: {packaged}\nwritten: {of_answers}\n"


def test_what_further_steps_record_goes_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(any_shape_run, "extend", lambda *given: asked.append(given) or "7 cells")
    monkeypatch.setattr(any_shape_run, "record_answers", lambda *given: asked.append(given) or "9 answers")
    for step, option, told in (("extend", "--more", "7 cells"), ("answers", "--answers", "9 answers")):
        file = tmp_path / f"{step}.parquet"
        done = fit("any-shape", step, "--count", "3", "--work", str(tmp_path), option, str(file))
        assert (done.exit_code, done.stdout) == (0, f"{told}: {file}\n")
        assert asked[-1][0] == any_shape_run.extension_shapes(3, 1) and asked[-1][2] == file
        fit("any-shape", step, "--count", "3", "--work", str(tmp_path), option, str(file), "--layouts", "NN")
        assert asked[-1][0] == any_shape_run.extension_shapes(3, 1, ("NN",))
        assert {problem.layout for problem in asked[-1][0]} == {"NN"}
        wrong = fit("any-shape", step, "--work", str(tmp_path), option, str(file), "--layouts", "NT,TN")
        assert "--layouts NT,TN" in refused(wrong)
        nowhere = ("--cells", str(tmp_path / "none_cells.parquet"), "--work", str(tmp_path))
        assert f"pass {option} once" in refused(fit("any-shape", step, *nowhere))


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_a_kernel_that_fails_a_proof_is_the_exit_status(
    passed: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_shape_run, "prove", lambda out: passed)
    done = fit("any-shape", "prove", "--work", str(tmp_path), "--proved", "proved.json")
    assert (done.exit_code, done.stdout) == (status, "written: proved.json\n")


def test_others_are_benched_than_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(any_shape_run, "bench", lambda *given: asked.append(given) or {"shapes": 300})
    out, summary = tmp_path / "bench.parquet", tmp_path / "h200.json"
    done = fit("any-shape", "bench", "--work", str(tmp_path), "--out", str(out), "--summary", str(summary))
    ((problems, *files),) = asked
    assert files == [out, summary] and problems == any_shape_run.shapes(300, any_shape_run.BENCHED)
    assert any_shape_run.BENCHED != any_shape_run.RECORDED
    assert '"shapes": 300' in done.stdout and f"written: {out}\nwritten: {summary}\n" in done.stdout


def test_a_slice_of_the_problems_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small nets see few problems once, so the form of the figures and their bounds are tested, not their values."""
    monkeypatch.setattr(fit_any_shape, "SETTINGS", fit_any_shape.NetSettings(width=8, epochs=1, batch=256))
    monkeypatch.setattr(fit_any_shape, "MAX_SLOWER", 1.0)
    results, out = Path(__file__).resolve().parents[2] / "results" / "any_shapes", tmp_path / "held_out.json"
    names = {"--cells": "h200_cells", "--trials": "h200_trials", "--more": "h100_extension"}
    tables = [word for option, name in names.items() for word in (option, str(results / f"{name}.parquet"))]
    done = fit("any-shape", "evaluate", "--every", "97", "--work", str(tmp_path), *tables, "--held-out", str(out))
    assert done.exit_code == 0, (done.stderr, done.exception)
    found = json.loads(out.read_text())
    assert found["every"] == 97 and f"written: {out}" in done.stdout
    for split in ("problems", "weights", "suites"):
        rows = found[split]["today"]
        sources = {row["source"] for row in rows}
        assert sources == ({"llm"} if split == "suites" else {"grid1000", "llm", "random"})
        for row in rows:
            value, low, high = row["over_torch"]
            assert low <= value <= high and 0 <= row["served"][1] <= row["served"][2] <= 1
            assert (row["over_best"] is None) == (row["source"] == "random")
            assert f"{split}: {row['source']} {row['layout']} {row['launch']}: " in done.stdout
