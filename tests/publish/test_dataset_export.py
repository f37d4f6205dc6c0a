"""A recording as a data set: read back by Hugging Face datasets and by Kernel Tuner, and checked by its hashes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas_lab.compare.splits import public_split
from outblas_lab.kernel_tuner.t4_files import read_task, task_of
from outblas_lab.publish.dataset.dataset_export import COLUMNS, export_recording
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.recording_files import STATUS_CODES, STATUSES
from support.helpers import synthetic_recording

TABLES = ("cells", "problems", "baselines", "kernels")


def recording_with_failures() -> Recording:
    """Return a recording with a wrong cell and one that was left out."""
    recording = synthetic_recording(problems=12, candidates=10)
    for column, status in ((0, Status.WRONG), (1, Status.LEFT_OUT)):
        recording.status[0, column] = STATUS_CODES[status]
        recording.median_us[0, column] = recording.spread[0, column] = np.nan
        recording.rounds[0, column] = 0
    return replace(recording)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return recording_with_failures()


@pytest.fixture(scope="module")
def folder(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "data-set"
    export_recording(recording, "mine", path, 2)
    return path


def card_header(folder: Path) -> dict[str, Any]:
    _, header, _ = (folder / "README.md").read_text().split("---\n", 2)
    return dict(yaml.safe_load(header))


def rows_of(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table through the card's list of files, as a reader of the card finds them."""
    import pyarrow.parquet as pq

    (config,) = [c for c in card_header(folder)["configs"] if c["config_name"] == table]
    return [row for file in config["data_files"] for row in pq.read_table(folder / file["path"]).to_pylist()]


def test_datasets_loads_every_table_by_the_card(
    folder: Path, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets (pip install './lab[train-llm]')")
    datasets.disable_progress_bars()
    for table in TABLES:
        loaded = datasets.load_dataset(str(folder), table, cache_dir=str(tmp_path))
        rows = [row for part in loaded.values() for row in part]
        assert rows == rows_of(folder, table)
    split = public_split(recording.problems)
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path))  # cells is the default
    assert {row["problem"] for row in loaded["test"]} == {p.key for p in split.held_out}
    assert {row["problem"] for row in loaded["train"]} == {p.key for p in split.training}
    assert loaded["train"].features["median_us"].dtype == "float64"


def test_the_tables_hold_the_whole_matrix(folder: Path, recording: Recording) -> None:
    kernels = {row["kernel_id"]: row for row in rows_of(folder, "kernels")}
    assert [kernels[i]["bm"] for i in sorted(kernels)] == [c.bm for c in recording.catalogue]
    cells = rows_of(folder, "cells")
    assert len(cells) == recording.status.size
    rows = {p.key: i for i, p in enumerate(recording.problems)}
    for cell in cells:
        at = rows[cell["problem"]], cell["kernel_id"]
        assert cell["status"] == STATUSES[recording.status[at]].value and cell["rounds"] == recording.rounds[at]
        best = recording.best_baseline(recording.problems[at[0]])[1]
        assert cell["baseline_us"] == pytest.approx(best)
        if cell["status"] == "passed":
            assert cell["median_us"] == recording.median_us[at] and cell["spread"] == recording.spread[at]
            assert cell["speedup"] == pytest.approx(best / recording.median_us[at])
        else:
            assert cell["median_us"] is cell["spread"] is cell["speedup"] is None
    assert {"wrong", "left_out", "passed"} <= {cell["status"] for cell in cells}
    timed = {(row["problem"], row["name"]): row["median_us"] for row in rows_of(folder, "baselines")}
    assert timed == {(p.key, n): us for p in recording.problems for n, us in recording.baselines_of(p).items()}
    sizes = {row["problem"]: (row["m"], row["n"], row["k"]) for row in rows_of(folder, "problems")}
    assert sizes == {p.key: (p.m, p.n, p.k) for p in recording.problems}


def test_the_sheet_names_the_measurement_every_column_and_every_file(folder: Path, recording: Recording) -> None:
    sheet = json.loads((folder / "datasheet.json").read_text())
    assert sheet["recording"] == {"name": "mine", "suite": "synthetic", "sha256": recording_sha(recording)}
    assert sheet["gpu"] == "NVIDIA H200" and sheet["driver"] == "0" and "1980 MHz" in sheet["clocks"]
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert written == {*sheet["files"], "datasheet.json", "README.md"}
    for path, about in sheet["files"].items():
        data = (folder / path).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (about["sha256"], about["bytes"])
    for table in TABLES:
        named = [column["name"] for column in sheet["columns"][table]]
        have = list(rows_of(folder, table)[0])
        assert named == have[: len(named)] and (table == "kernels" or named == have)
        assert all(column.unit for column in COLUMNS[table] if column.name.endswith("_us"))
    statuses = [cell["status"] for cell in rows_of(folder, "cells")]
    tried = [status for status in statuses if status not in ("left_out", "illegal")]
    failed = sum(status != "passed" for status in tried)
    assert f"{failed} of {len(tried)} tried cells failed a gate." in sheet["limits"] and failed > 0


def test_the_card_has_a_header_of_yaml(folder: Path) -> None:
    header = card_header(folder)
    assert header["license"] == "apache-2.0" and header["size_categories"] == ["n<1K"]
    assert [c["config_name"] for c in header["configs"]] == list(TABLES)
    assert [c["config_name"] for c in header["configs"] if c.get("default")] == ["cells"]
    for config in header["configs"]:
        assert all((folder / file["path"]).is_file() for file in config["data_files"])


def test_kernel_tuners_files_are_those_of_held_out_problems(folder: Path, recording: Recording) -> None:
    held_out = {p.key for p in public_split(recording.problems).held_out}
    files = sorted((folder / "kernel_tuner").iterdir())
    assert len(files) == 2 * 2 * 2, "T4 results and a cache of two problems and two launch options"
    for path in files:
        task = read_task(path)
        assert task.problem.key in held_out and task == task_of(recording, task.problem, task.launch)


def test_kernel_tuner_reads_the_caches(folder: Path) -> None:
    pytest.importorskip("kernel_tuner", reason="needs kernel_tuner (pip install './lab[kernel-tuner]')")
    from kernel_tuner import util

    for path in (folder / "kernel_tuner").glob("*.cache.json"):
        task = read_task(path)
        entries = util.read_cache(str(path), open_cache=False)["cache"].values()
        times = [e["time"] for e in entries if isinstance(e.get("time"), float)]
        assert min(times) * 1000 == pytest.approx(task.best()[1])  # type: ignore[index]
        assert len(entries) == len(task.cells)


def test_the_same_recording_gives_the_same_tables(folder: Path, recording: Recording, tmp_path: Path) -> None:
    done: list[str] = []
    again = export_recording(recording, "mine", tmp_path / "again", 2, lambda n, total, path: done.append(path))
    assert again["files"] == json.loads((folder / "datasheet.json").read_text())["files"]
    assert done == list(again["files"])


def test_a_folder_with_files_is_refused_and_a_failure_leaves_nothing(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        export_recording(recording, "mine", tmp_path / "full", 0)
    with pytest.raises(UsageError, match="--kernel-tuner is 99"):
        export_recording(recording, "mine", tmp_path / "new", 99)

    def stop(done: int, total: int, path: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_recording(recording, "mine", tmp_path / "new", 0, stop)
    assert [p.name for p in tmp_path.iterdir()] == ["full"] and (tmp_path / "full" / "mine.txt").read_text() == "keep"


def test_an_empty_folder_is_filled_and_no_kernel_tuner_means_none(recording: Recording, tmp_path: Path) -> None:
    export_recording(recording, "mine", tmp_path, 0)
    assert not (tmp_path / "kernel_tuner").exists() and "Kernel Tuner" not in (tmp_path / "README.md").read_text()


def test_an_empty_folder_is_filled_and_not_replaced(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    before = (tmp_path / "real").stat().st_ino
    monkeypatch.chdir(tmp_path / "real")
    export_recording(recording, "mine", Path("."), 0)
    assert sorted(os.listdir(".")) == ["README.md", "data", "datasheet.json"], "the current folder is still this one"
    assert (tmp_path / "real").stat().st_ino == before
    with pytest.raises(UsageError, match="not empty"):
        export_recording(recording, "mine", tmp_path / "link", 0)
    shutil.rmtree("data")
    Path("README.md").unlink()
    Path("datasheet.json").unlink()
    Path(".outblas-export-of-a-killed-process").mkdir()
    export_recording(recording, "mine", tmp_path / "link", 0)
    assert (tmp_path / "link").is_symlink() and Path("README.md").is_file()


@pytest.mark.parametrize("name", [".", "file", "dangling"])
def test_a_folder_with_files_is_refused_and_kept(
    name: str, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="not empty"):
        export_recording(recording, "mine", Path(name), 0)
    assert sorted(os.listdir(".")) == ["dangling", "file"] and Path("file").read_text() == "mine"
