"""`outblas fit` on the command line: its help, its refusals, and which step reaches which function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.files import lock_folder
from outblas.learn import any_shape

pytest.importorskip("torch", reason="what any shape is given is fitted by torch")

from outblas.learn.train import fit_any_shape_run  # noqa: E402
from outblas.search import any_shape_run  # noqa: E402


def fit(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["fit", *arguments], env={"COLUMNS": "200"})


def refused(done: Any) -> str:
    """The one line of an error in three parts; exit 2, nothing on stdout."""
    assert done.exit_code == 2, (done.stdout, done.stderr, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and done.stdout == ""
    assert line.count("; ") >= 2 and "; expected " in line, line
    return line


def test_without_a_command_it_tells_all_three() -> None:
    shown = fit().output
    assert all(name in shown for name in ("catalogue", "model", "any-shape")) and "error" not in shown


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("catalogue", ("--out", "--recording", "--store", "--kernels")),
        ("model", ("JSONL", "--recording", "--store", "--folds", "--out")),
        (
            "any-shape",
            ("STEP", "--count", "--measurements", "--seed", "--work", "--cells", "--proved", "--out", "--summary"),
        ),
    ],
)
def test_help_names_every_option(name: str, options: tuple[str, ...]) -> None:
    done = fit(name, "--help")
    assert done.exit_code == 0 and all(option in done.stdout for option in options)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["catalogue", "--out", "OUT"], "give a recording, --store or both"),
        (["catalogue", "--out", "OUT", "--store", "missing.sqlite"], "missing.sqlite"),
        (["catalogue", "--out", "OUT", "--recording", "missing"], "missing"),
        (["catalogue", "--out", "OUT", "--recording", "missing", "--kernels", "0"], "--kernels"),
        (["model"], "give a JSONL, --store, --recording or some of them"),
        (["model", "missing.jsonl"], "missing.jsonl"),
        (["model", "--store", "missing.sqlite"], "missing.sqlite"),
        (["model", "--recording", "missing"], "missing"),
        (["model", "--recording", "missing", "--folds", "1"], "--folds"),
        (["any-shape", "guess"], "record or fit or prove or bench"),
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
    assert asked == [(any_shape_run.shapes(3, 5), any_shape.MAX_KERNELS_RANKED, tmp_path / "store.sqlite", cells)]
    assert done.stdout == f"7 cells of 3 problems: {cells}\n"


def test_the_fit_goes_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fit_all(cells: Path, proved: Path, out: Path, tell: Any) -> str:
        asked.append((cells, proved, out))
        return "9 kernels"

    monkeypatch.setattr(fit_any_shape_run, "fit_all", fit_all)
    monkeypatch.chdir(tmp_path)
    done = fit("any-shape", "fit", "--work", "work")
    results = Path("results/any_shapes")
    packaged = fit_any_shape_run.packaged_path()
    assert packaged.is_file() and packaged.name == "h200.npz"
    assert asked == [(results / "h200_cells.parquet", results / "h200_proved.json", packaged)]
    assert done.stdout == f"9 kernels: {packaged}\n"


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_a_kernel_that_fails_a_proof_is_the_exit_status(
    passed: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(any_shape_run, "prove", lambda out: passed)
    done = fit("any-shape", "prove", "--work", str(tmp_path), "--proved", "proved.json")
    assert (done.exit_code, done.stdout) == (status, "written to proved.json\n")


def test_others_are_benched_than_were_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(any_shape_run, "bench", lambda *given: asked.append(given) or {"shapes": 300})
    out, summary = tmp_path / "bench.parquet", tmp_path / "h200.json"
    done = fit("any-shape", "bench", "--work", str(tmp_path), "--out", str(out), "--summary", str(summary))
    ((problems, *files),) = asked
    assert files == [out, summary] and problems == any_shape_run.shapes(300, any_shape_run.BENCHED)
    assert any_shape_run.BENCHED != any_shape_run.RECORDED
    assert '"shapes": 300' in done.stdout and f"result: {out}\nfigures: {summary}\n" in done.stdout
