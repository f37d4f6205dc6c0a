"""Notes below the published table: files of earlier kernels, and means over what is no rival."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import notes
from pages.all_rows_table import markdown_table

from outblas.core.config import config_name
from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import read_result, write_result
from outblas_lab.publish.summary import summarise_result
from support.bench_fixture import META, make_rows

MADE = {"date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef"}
WHEN = ", 2026-01-02, commit 0123456"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Result files of a GPU whose library's kernels are of 2026-02-01."""
    tables = {"t": {"date": "2026-02-01T00:00:00+00:00"}}
    library = Library("h200", (), {"kernels": "new", "tables": tables})
    monkeypatch.setattr(Library, "packaged", lambda gpu, missing_ok=False: library)
    return tmp_path / "h200"


def bench(folder: Path, name: str, date: str) -> None:
    folder.mkdir(exist_ok=True)
    meta = {**META, "provenance": {**META["provenance"], "date": date}}
    write_result(make_rows((64,)), meta, folder / f"{name}.parquet")


def test_files_of_earlier_kernels_are_named(folder: Path) -> None:
    bench(folder, "new", "2026-02-01T00:00:00+00:00")
    assert notes.notes_of_earlier_kernels(folder) == []
    bench(folder, "old", "2026-01-31T00:00:00+00:00")
    (folder / "ncu.json").write_text(json.dumps({"provenance": {"date": "2026-01-01T00:00:00+00:00"}}))
    (folder / "host_cost.json").write_text(json.dumps({"provenance": {"date": "2026-03-01T00:00:00+00:00"}}))
    (folder / "summary.json").write_text("[]")
    line = "- measured with earlier kernels, before 2026-02-01: `ncu`, `old`"
    assert notes.notes_of_earlier_kernels(folder) == [line]


@pytest.mark.parametrize("text", ["{", "", "\xff"])
def test_a_damaged_file_beside_the_benches_is_named(text: str, folder: Path) -> None:
    bench(folder, "new", "2026-02-01T00:00:00+00:00")
    (folder / "clock_study.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match="clock_study.json cannot be read"):
        notes.notes_of_earlier_kernels(folder)
    for made in (None, [], "x", {"date": None}):
        (folder / "clock_study.json").write_text(json.dumps({"provenance": made}))
        assert notes.notes_of_earlier_kernels(folder) == []


def test_without_a_library_of_known_kernels_no_file_is_older(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(folder, "old", "2026-01-31T00:00:00+00:00")
    monkeypatch.setattr(Library, "packaged", lambda gpu, missing_ok=False: Library("h200", (), {}))
    assert notes.notes_of_earlier_kernels(folder) == []


def test_what_is_no_rival_stands_below_the_table(folder: Path) -> None:
    bench(folder, "a", "2026-03-01T00:00:00+00:00")
    result = read_result(folder / "a.parquet")
    row = {**summarise_result(result)[0], "geomean_torch_full": 1.25, "geomean_lt_edges": 1.5}
    row["less_clock"] = {"us": 2.88, "geomean": 1.125}
    text = markdown_table([row])
    assert "1.250× over torch.matmul with both reduced-precision switches off" in text
    assert "every time includes 2.9 µs of timer overhead; 1.125× without it" in text
    assert "1.500× over cuBLASLt with (unsafe) programmatic edges on its captured nodes" in text
    assert "switches" not in markdown_table(summarise_result(result))


def test_wins_of_large_products_are_told_for_each_library(folder: Path) -> None:
    folder.mkdir()
    assert notes.LARGE.lines(folder) == []
    libraries = {"packaged": {"wins": 3, "with_kernel": 4}, "before": {"wins": 1, "with_kernel": 9}}
    libraries = {name: {**found, "provenance": MADE} for name, found in libraries.items()}
    path = folder / notes.LARGE.name
    path.write_text(json.dumps({"format": notes.LARGE.form, "libraries": libraries}))
    (line,) = notes.LARGE.lines(folder)
    assert line.endswith(f"0.5% or more: 1 of 9 kernels (before{WHEN}), 3 of 4 kernels (packaged{WHEN})")
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(RecordError, match=r"a file from benchmarks/large_products.py"):
        notes.LARGE.lines(folder)


def test_means_beside_torch_compile_are_told_for_each_suite(folder: Path) -> None:
    folder.mkdir()
    assert notes.INDUCTOR.lines(folder) == []
    rows = [{"suite": "a", "inductor": {"ratio": 1.0}}, {"suite": "a", "inductor": None}]
    means = {"a": {"inductor": 0.5, "ours": 1.25, "ours_over_inductor": 2.5}}
    path = folder / notes.INDUCTOR.name
    made = {"format": notes.INDUCTOR.form, "provenance": MADE}
    path.write_text(json.dumps({**made, "rows": rows, "means": means}))
    (line,) = notes.INDUCTOR.lines(folder)
    assert "on 1 problems of a " in line and "0.500× the fastest baseline" in line
    assert line.endswith(f"1.250× there and 2.500× torch.compile{WHEN}")
    path.write_text(json.dumps({"format": notes.INDUCTOR.form, "means": means}))
    with pytest.raises(RecordError, match=r"a file from benchmarks/inductor_rival.py"):
        notes.INDUCTOR.lines(folder)


def test_products_outside_the_bound_are_added_up_over_dtypes(folder: Path) -> None:
    folder.mkdir()
    assert notes.ACCURACY.lines(folder) == []
    sides = ("torch", "torch_full", "outblas_kernel", "outblas_accurate")
    fp16 = {side: {"n": 10, "outside": number} for number, side in enumerate(sides)}
    bf16 = {**fp16, "outblas_fallback": {"n": 5, "outside": 4}}
    costs = {"torch": {"n": 3, "geomean": 1.25}, "outblas": {"n": 3, "geomean": 1.125}}
    found = {"by_dtype": {"fp16": fp16, "bf16": bf16}, "cost_of_full_precision": {"drawn": costs}}
    made = {"format": notes.ACCURACY.form, "provenance": MADE}
    (folder / notes.ACCURACY.name).write_text(json.dumps({**made, **found}))
    (line,) = notes.ACCURACY.lines(folder)
    assert "0 of 20 with torch.matmul by default, 2 of 20 with torch.matmul with both switches off" in line
    assert "4 of 20 with OutBLAS kernels, 4 of 5 with OutBLAS fallbacks, 6 of 20 with `accurate=True`" in line
    assert "torch.matmul with both switches off takes 1.250× the time on 3 drawn matmuls" in line
    assert line.endswith(f"OutBLAS with `accurate=True` takes 1.125× the time on 3 drawn matmuls{WHEN}")


def test_files_of_unlisted_shapes_count_too(folder: Path) -> None:
    bench(folder, "new", "2026-02-01T00:00:00+00:00")
    beside = folder.parent / "any_shapes"
    beside.mkdir()
    for name in ("h200_proved.json", "h100_proved.json"):
        (beside / name).write_text(json.dumps({"provenance": {"date": "2026-01-01T00:00:00+00:00"}}))
    bench(beside, "h200_bench", "2026-01-01T00:00:00+00:00")
    (line,) = notes.notes_of_earlier_kernels(folder)
    assert line.endswith(": `any_shapes/h200_bench`, `any_shapes/h200_proved`")


def test_a_peers_rows_of_other_kernels_than_the_library_has_now_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert notes.replaced_words(folder, [{"problem": "64_64_64_TN_fp16_fp32", "config": "one"}]) == "", "no library"
    config = Sm90WgmmaConfig(64, 64)
    problems = [Problem(64, 64, 64 * k) for k in (1, 2, 3, 4)]
    choices = (LibraryChoice(config, 1.2, 1.1, 1.3), None)
    rows = tuple(LibraryRow(p, "torch", plain=choices[i % 2]) for i, p in enumerate(problems))
    monkeypatch.setattr(Library, "packaged", lambda gpu, missing_ok=False: Library("h200", rows))
    timed = [config_name(config), None, "another", "another"]
    peer = [{"problem": p.key, "config": name} for p, name in zip(problems, timed, strict=True)]
    assert notes.replaced_words(folder, peer[:2]) == ""
    assert notes.replaced_words(folder, peer) == "; the library now has another kernel for 2 of 4"


def test_the_packaged_part_of_a_file_of_several_libraries_has_its_date(folder: Path) -> None:
    bench(folder, "new", "2026-02-01T00:00:00+00:00")
    parts = {name: {"provenance": {"date": f"2026-01-0{day}"}} for name, day in (("packaged", 2), ("those of 1", 1))}
    (folder / "large_products.json").write_text(json.dumps({"libraries": parts}))
    (line,) = notes.notes_of_earlier_kernels(folder)
    assert line.endswith(": `large_products`")
    parts["packaged"]["provenance"]["date"] = "2026-02-02"
    (folder / "large_products.json").write_text(json.dumps({"libraries": parts}))
    assert notes.notes_of_earlier_kernels(folder) == [], "an earlier library is older on purpose"
