from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas_lab.pool.record_candidates import wide_kernels
from outblas_lab.recordings import recording as places
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from support.helpers import synthetic_recording

ARRAYS = ("status", "median_us", "spread", "rounds")


def same(a: Recording, b: Recording) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert getattr(a, name).dtype == getattr(b, name).dtype
    for name in ("suite", "problems", "catalogue", "provenance", "baseline_detail"):
        assert getattr(a, name) == getattr(b, name)
    for name in ("baselines", "baseline_spread"):
        assert getattr(a, name).keys() == getattr(b, name).keys()
        for key in getattr(a, name):
            np.testing.assert_array_equal(getattr(a, name)[key], getattr(b, name)[key])


def test_written_and_read_back_equal(tmp_path: Path) -> None:
    recording = synthetic_recording()
    cells = recording.write(tmp_path)
    same(Recording.load(tmp_path), recording)
    same(Recording.load(cells), recording)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "synthetic_TN_fp16_fp32_baselines.parquet",
        "synthetic_TN_fp16_fp32_cells.parquet",
    ]


def test_words_of_a_baseline_are_cleaned_when_they_are_read(tmp_path: Path) -> None:
    recording = synthetic_recording()
    (name, lines), *_ = recording.baseline_detail.items()
    dirty = {**recording.baseline_detail, name: tuple(f"\x1b[2J{line}\u202e" + "x" * 10_000 for line in lines)}
    dataclasses.replace(recording, baseline_detail=dirty).write(tmp_path)
    read = Recording.load(tmp_path).baseline_detail[name]
    assert all(found.startswith(f"[2J{line}x") and len(found) <= 1000 for found, line in zip(read, lines, strict=True))


def test_the_files_have_the_published_layout(tmp_path: Path) -> None:
    table = pq.read_table(synthetic_recording().write(tmp_path))
    assert [str(t) for t in table.schema.types[:2]] == ["int32", "int16"]
    assert pa.types.is_dictionary(table.schema.field("status").type)
    assert [str(table.schema.field(n).type) for n in ("median_us", "spread", "rounds")] == ["float", "float", "int16"]
    passed = np.array([s == "passed" for s in table["status"].to_pylist()])
    assert (np.array([v is not None for v in table["median_us"].to_pylist()]) == passed).all()
    metadata = json.loads(table.schema.metadata[b"outblas"])
    assert (metadata["format"], metadata["kind"], len(metadata["problems"])) == (1, "recording-cells", 12)


def test_more_candidates_than_int16_counts_are_read_back(tmp_path: Path) -> None:
    few, kernels = synthetic_recording(), wide_kernels()[:33_000]
    many = np.arange(len(kernels)) % len(few.catalogue)
    arrays = {name: getattr(few, name)[:, many] for name in (*ARRAYS, "chosen")}
    recording = dataclasses.replace(few, catalogue=kernels, **arrays)
    recording.write(tmp_path)
    same(Recording.load(tmp_path), recording)


def test_a_packaged_recording_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_package_root", lambda: tmp_path)
    synthetic_recording().write(tmp_path / "h200")
    assert places.packaged() == ["h200"]
    assert Recording.load("h200").gpu.name == "h200"


@pytest.mark.parametrize("name", ["h999", "/no/such/folder"])
def test_an_unknown_recording_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Recording.load(name)


def test_best_is_the_fastest_passed_cell() -> None:
    recording = synthetic_recording()
    for row, problem in enumerate(recording.problems):
        us = {
            c: recording.median_us[row, i]
            for i, c in enumerate(recording.catalogue)
            if recording.status[row, i] == STATUS_CODES[Status.PASSED]
        }
        best = recording.best(problem)
        assert best is not None and best[1] == min(us.values()) == us[best[0]]
        plain = recording.best(problem, pdl=False)
        assert plain is not None and plain[1] == min(v for c, v in us.items() if not c.pdl)


def test_best_without_a_passed_cell_is_none() -> None:
    recording = synthetic_recording()
    recording.status[3] = STATUS_CODES[Status.WRONG]
    assert recording.best(recording.problems[3]) is None


def test_offered_are_measured_and_failed_cells() -> None:
    recording = synthetic_recording()
    for row, problem in enumerate(recording.problems):
        kept = [s not in (STATUS_CODES[Status.LEFT_OUT], STATUS_CODES[Status.ILLEGAL]) for s in recording.status[row]]
        assert recording.recorded_mask(problem).tolist() == kept
    assert (recording.status == STATUS_CODES[Status.LEFT_OUT]).any() and (
        recording.status == STATUS_CODES[Status.WRONG]
    ).any()


def test_best_baseline() -> None:
    recording = synthetic_recording()
    name, us = recording.best_baseline(recording.problems[4])
    assert (name, us) == ("lt_auto", float(recording.baselines["lt_auto"][4]))
    recording.baselines["lt_auto"][4] = np.nan
    assert recording.best_baseline(recording.problems[4])[0] == "torch"


def test_a_problem_that_is_not_recorded_is_a_clear_error() -> None:
    recording = synthetic_recording()
    for problem in (Problem(8, 8, 8), dataclasses.replace(recording.problems[0], layout="NN")):
        with pytest.raises(UsageError, match=problem.key):
            recording.recorded_mask(problem)


def test_a_suite_that_is_not_recorded_is_named() -> None:
    layer = next(problem for problem in suite("llm") if problem not in suite("grid1000"))
    with pytest.raises(
        UsageError, match=f"suite llm needs a GPU: it is not recorded .{layer.key}.*another suite or a live GPU"
    ):
        synthetic_recording().recorded_mask(layer)
    named = other(synthetic_recording(), suite="grid1000+llm")
    with pytest.raises(
        UsageError, match=f"problem {layer.key} needs a GPU: it is not in the recording.*a recorded problem"
    ):
        named.recorded_mask(layer)


def other(recording: Recording, **changes: Any) -> Recording:
    return dataclasses.replace(recording, **changes)


def test_a_problem_of_two_recordings_keeps_the_row_of_the_first(tmp_path: Path) -> None:
    one = synthetic_recording()
    two = dataclasses.replace(one, suite="twin", median_us=2 * one.median_us)
    some = dataclasses.replace(one.problems[0], m=7)
    two = dataclasses.replace(two, problems=(*one.problems[:-1], some))
    one.write(tmp_path)
    two.write(tmp_path)
    both = Recording.load(tmp_path)
    assert both.problems == (*one.problems, some)
    np.testing.assert_array_equal(both.median_us[:-1], one.median_us)
    np.testing.assert_array_equal(both.median_us[-1], two.median_us[-1])
    assert both.baselines_of(some) == two.baselines_of(some)


def test_a_folder_of_several_recordings_is_one_matrix(tmp_path: Path) -> None:
    tn = synthetic_recording()
    nn = synthetic_recording(seed=8)
    nn = other(
        nn,
        problems=tuple(dataclasses.replace(p, layout="NN") for p in nn.problems),
        catalogue=(*nn.catalogue[5:], *nn.catalogue[:4], Sm80MmaConfig(256, 16)),
        baselines={"nvmmh": nn.baselines["torch"]},
        baseline_spread={"nvmmh": nn.baseline_spread["torch"]},
        baseline_detail={"nvmmh": nn.baseline_detail["torch"]},
    )
    tn.write(tmp_path)
    nn.write(tmp_path)
    both = Recording.load(tmp_path)
    assert len(both.problems) == 24 and len(both.catalogue) == 11
    for part in (tn, nn):
        for problem in part.problems:
            offered = {c for c, yes in zip(part.catalogue, part.recorded_mask(problem), strict=True) if yes}
            assert {c for c, yes in zip(both.catalogue, both.recorded_mask(problem), strict=True) if yes} == offered
            assert both.best(problem) == part.best(problem)
            assert both.best_baseline(problem) == part.best_baseline(problem)


def test_the_same_problem_in_two_recordings_is_refused(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path)
    other(synthetic_recording(), suite="again").write(tmp_path)
    with pytest.raises(RecordError, match="listed twice"):
        Recording.load(tmp_path)


@pytest.mark.parametrize("suffix", ["cells", "baselines"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, share: float) -> None:
    synthetic_recording().write(tmp_path)
    (path,) = tmp_path.glob(f"*_{suffix}.parquet")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(RecordError, match="cannot be read") as caught:
        Recording.load(tmp_path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value)


def test_a_missing_baselines_file_is_refused(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path)
    next(tmp_path.glob("*_baselines.parquet")).unlink()
    with pytest.raises(RecordError, match="baselines.parquet cannot be read"):
        Recording.load(tmp_path)


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path)
    old = next(tmp_path.glob("*_baselines.parquet")).read_bytes()
    cells = other(synthetic_recording(), provenance={"gpu": "NVIDIA H200", "date": "2000-01-02"}).write(tmp_path)
    cells.with_name(cells.name.replace("cells", "baselines")).write_bytes(old)
    with pytest.raises(RecordError, match="from different runs"):
        Recording.load(tmp_path)


def rewrite(path: Path, change: Any) -> None:
    """Apply ``change(table, metadata) -> table`` to a file on disk."""
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[b"outblas"])
    table = change(table, metadata)
    pq.write_table(table.replace_schema_metadata({b"outblas": json.dumps(metadata).encode()}), path)


def _set(column: str, value: Any) -> Any:
    def change(table: pa.Table, metadata: dict[str, Any]) -> pa.Table:
        index = table.column_names.index(column)
        kind = pa.string() if column == "status" else table.schema.field(column).type
        values = table[column].to_pylist()
        return table.set_column(index, column, pa.array([value, *values[1:]], kind))

    return change


def _as(column: str, kind: pa.DataType, value: Any) -> Any:
    """The column in another type, the first cell of which holds ``value``."""

    def change(table: pa.Table, metadata: dict[str, Any]) -> pa.Table:
        index = table.column_names.index(column)
        return table.set_column(index, column, pa.array([value, *table[column].to_pylist()[1:]], kind))

    return change


def _meta(key: str, value: Any) -> Any:
    def change(table: pa.Table, metadata: dict[str, Any]) -> pa.Table:
        metadata[key] = value
        return table

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_meta("format", 2), "format 2"),
        (_meta("kind", "bench"), "kind bench"),
        (lambda t, m: t.drop_columns(["median_us"]), "no column median_us"),
        (lambda t, m: t.slice(0, 119), "119 cells"),
        (_set("candidate", 1), "not one for each"),
        (_set("candidate", 10), "index outside"),
        (_set("problem", -1), "index outside"),
        (_set("problem", None), "null"),
        (_set("status", "wonderful"), "wonderful"),
        (_set("status", "wrong"), "a time in a cell that did not pass"),
        (_set("median_us", None), "without a positive time"),
        (_set("median_us", -1.0), "without a positive time"),
        (_set("rounds", 0), "without spread or rounds"),
        (_as("rounds", pa.int32(), 70_000), "70000 rounds"),
        (_as("problem", pa.float64(), 0.5), "double instead of integers"),
    ],
)
def test_cells_that_make_no_sense_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = synthetic_recording().write(tmp_path)
    rewrite(path, change)
    with pytest.raises(RecordError, match=words) as caught:
        Recording.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("catalogue", ["sm70_gemm:bm=1"] * 10),
        ("problems", ["0_1_2_TN_fp16_fp32"] * 12),
        ("problems", 3),
        ("problems", [3] * 12),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    synthetic_recording().write(tmp_path)
    for path in tmp_path.iterdir():
        rewrite(path, _meta(key, value))
    with pytest.raises(RecordError, match="cannot be used"):
        Recording.load(tmp_path)


@pytest.mark.parametrize("us", [0.0, -1.0])
def test_a_baseline_that_takes_no_time_is_refused(tmp_path: Path, us: float) -> None:
    cells = synthetic_recording().write(tmp_path)
    rewrite(cells.with_name(cells.name.replace("cells", "baselines")), _set("median_us", us))
    with pytest.raises(RecordError, match="not positive"):
        Recording.load(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [("name", None, "without a name"), ("problem", 1, "twice for a problem"), ("problem", 12, "index outside")],
)
def test_baselines_that_make_no_sense_are_refused(tmp_path: Path, column: str, value: Any, words: str) -> None:
    cells = synthetic_recording().write(tmp_path)
    rewrite(cells.with_name(cells.name.replace("cells", "baselines")), _set(column, value))
    with pytest.raises(RecordError, match=words):
        Recording.load(tmp_path)


def test_details_are_cleaned_and_may_be_missing(tmp_path: Path) -> None:
    cells = synthetic_recording().write(tmp_path)
    path = cells.with_name(cells.name.replace("cells", "baselines"))
    rewrite(path, _set("detail", "a\x1bb"))
    name = pq.read_table(path)["name"].to_pylist()[0]
    assert Recording.load(tmp_path).baseline_detail[name][0] == "ab"
    rewrite(path, _set("detail", None))
    assert Recording.load(tmp_path).baseline_detail[name][0] == ""


def test_a_problem_without_baseline_is_refused(tmp_path: Path) -> None:
    cells = synthetic_recording().write(tmp_path)
    path = cells.with_name(cells.name.replace("cells", "baselines"))
    rewrite(path, lambda table, _: table.filter(pa.compute.not_equal(table["problem"], 5)))
    with pytest.raises(RecordError, match="without a baseline"):
        Recording.load(tmp_path)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(RecordError, match="Voodoo"):
        _ = other(synthetic_recording(), provenance={"gpu": "Voodoo 2"}).gpu


def test_a_failed_write_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = synthetic_recording()
    recording.write(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places.os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        synthetic_recording(seed=9).write(tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
