from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError
from outblas.records import library as module
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow, choose_kernel
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    without_kernels,
)

PROBLEMS, CONFIGS = synthetic_problems(), synthetic_catalogue()
PLAIN, PDL = CONFIGS[0], CONFIGS[1]
assert not PLAIN.pdl and PDL.pdl
LIBRARY = Library(
    "h200",
    (
        LibraryRow(
            PROBLEMS[0],
            "torch",
            "",
            "replay:h200",
            LibraryChoice(PLAIN, 1.2, 1.1, 1.3),
            LibraryChoice(PDL, 1.5, 1.4, 1.6),
        ),
        LibraryRow(PROBLEMS[1], "lt_auto", "algo 7", "replay:h200", None, LibraryChoice(PDL, 1.05, 1.01, 1.1)),
        LibraryRow(PROBLEMS[2], "lt_auto", "algo 9", "replay:h200", nearest=LibraryChoice(PLAIN, 0.97, 0.96, 0.98)),
    ),
    {"agent": "random"},
)


def test_saved_and_loaded_equal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h200.json"
    LIBRARY.save(path)
    assert Library.load(path) == LIBRARY
    assert [f.name for f in path.parent.iterdir()] == ["h200.json"]


def test_the_file_says_use_the_baseline_with_null(tmp_path: Path) -> None:
    LIBRARY.save(tmp_path / "l.json")
    row = json.loads((tmp_path / "l.json").read_text())["rows"][1]
    assert row["config"] is None and row["speedup"] is None and row["baseline"] == "lt_auto"
    assert row["config_pdl"].startswith("sm90_wgmma_gemm:") and row["low_pdl"] == 1.01


def test_the_file_has_the_nearest_kernel_where_the_row_has_one(tmp_path: Path) -> None:
    LIBRARY.save(tmp_path / "l.json")
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert [row.get("nearest", {}).get("low") for row in rows] == [None, None, 0.96]
    rows[2]["nearest"]["low"] = -1
    (tmp_path / "wrong.json").write_text(json.dumps({"format": 1, "gpu": "h200", "rows": rows, "provenance": {}}))
    with pytest.raises(RecordError, match=r"nearest\.low"):
        Library.load(tmp_path / "wrong.json")


def test_m_of_a_weight_are_listed() -> None:
    first = PROBLEMS[0]
    same = [problem.m for problem in PROBLEMS[:3] if (problem.n, problem.k) == (first.n, first.k)]
    assert LIBRARY.listed_m(first.n, first.k) == sorted(same) and LIBRARY.listed_m(first.n, first.k + 1) == []
    row = replace(LIBRARY.rows[0], problem=replace(first, m=first.m + 100))
    wider = replace(LIBRARY, intervals=(LibraryInterval(row, first.m + 200),))
    assert wider.listed_m(first.n, first.k) == sorted([*same, first.m + 100])


def test_lookup() -> None:
    row = LIBRARY.lookup(PROBLEMS[1])
    assert row is not None and row.choice("plain") is None
    chosen = row.choice("pdl")
    assert chosen is not None and chosen.config == PDL
    assert LIBRARY.lookup(PROBLEMS[5]) is None


def test_some_problems_and_less_some_kernels() -> None:
    part = LIBRARY.restricted_to([PROBLEMS[2], PROBLEMS[5], PROBLEMS[0]])
    assert [row.problem for row in part.rows] == [PROBLEMS[2], PROBLEMS[0]] and part.gpu == "h200"
    left = without_kernels(LIBRARY, [(PROBLEMS[0], "plain"), (PROBLEMS[1], "pdl"), (PROBLEMS[5], "pdl")])
    assert [row.problem for row in left.rows] == [row.problem for row in LIBRARY.rows]
    assert left.rows[0] == LibraryRow(PROBLEMS[0], "torch", "", "replay:h200", None, LIBRARY.rows[0].pdl)
    assert left.rows[1].pdl is None and left.rows[1].baseline_detail == "algo 7" and left.rows[2] == LIBRARY.rows[2]


def test_the_autotuned_algorithm_is_named_whichever_baseline_was_the_fastest(tmp_path: Path) -> None:
    by_noise = LibraryRow(PROBLEMS[0], "torch", "torch 2", "cuda:0", lt_auto_detail="algo 3")
    library = Library("h200", (by_noise, LIBRARY.rows[2]))
    library.save(tmp_path / "l.json")
    loaded = Library.load(tmp_path / "l.json")
    assert loaded == library and [row.algorithm for row in loaded.rows] == ["algo 3", "algo 9"]
    assert LIBRARY.rows[0].algorithm == ""


def test_fallback_rows_count_as_one() -> None:
    assert LIBRARY.geomean("plain") == pytest.approx(1.2 ** (1 / 3))
    assert LIBRARY.geomean("pdl") == pytest.approx((1.5 * 1.05) ** (1 / 3))
    assert (LIBRARY.fallbacks("plain"), LIBRARY.fallbacks("pdl")) == (2, 1)


def test_only_a_lower_bound_above_one_is_installed() -> None:
    sure = passed_evaluation(PROBLEMS[0], PLAIN, low=1.02, ratio=1.1)
    lucky = passed_evaluation(PROBLEMS[0], CONFIGS[2], low=1.0, ratio=1.9)
    wrong = failed_evaluation(PROBLEMS[0], CONFIGS[3])
    chosen = choose_kernel([lucky, wrong, sure], "plain")
    assert chosen is not None and chosen.config == PLAIN
    assert choose_kernel([lucky, wrong], "plain") is None


def test_a_level_kernel_is_installed_where_torch_is_behind() -> None:
    """Without the kernel a call would run torch.matmul, not the baseline whose speed the kernel only equals."""
    level = passed_evaluation(PROBLEMS[0], PLAIN, low=0.995, ratio=1.0)
    assert level.timing is not None
    mine = level.timing.median_us
    behind = replace(level, baselines_us={"lt_auto": mine, "torch": 1.05 * mine})
    close = replace(level, baselines_us={"lt_auto": mine, "torch": 1.005 * mine})
    chosen = choose_kernel([behind], "plain")
    assert chosen is not None and chosen.config == PLAIN
    assert choose_kernel([close], "plain") is None
    lost = replace(behind, speedup=replace(behind.speedup, low=0.98))  # type: ignore[type-var]
    assert choose_kernel([lost], "plain") is None


def test_pdl_is_chosen_only_where_it_is_allowed() -> None:
    both = [passed_evaluation(PROBLEMS[0], PLAIN, low=1.1), passed_evaluation(PROBLEMS[0], PDL, low=1.15)]
    plain, allowed = choose_kernel(both, "plain"), choose_kernel(both, "pdl")
    assert plain is not None and plain.config == PLAIN
    assert allowed is not None and allowed.config == PDL
    only_plain = choose_kernel(both[:1], "pdl")
    assert only_plain is not None and only_plain.config == PLAIN


def break_row(**changes: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        data["rows"][0].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format=2), "format 2"),
        (lambda d: d.pop("rows"), "rows"),
        (break_row(config="sm70_gemm:bm=1"), "unknown kernel family"),
        (break_row(low=None), "without results"),
        (break_row(speedup=-1), "speedup"),
        (break_row(high=float("inf")), "high"),
        (break_row(problem="0_1_1_TN_fp16_fp32"), "M is 0"),
        (lambda d: d["rows"].append(d["rows"][0]), "two rows"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "l.json"
    LIBRARY.save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=words) as caught:
        Library.load(path)
    assert "\n" not in str(caught.value)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    LIBRARY.save(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(RecordError, match="truncated"):
        Library.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="UTF-8"):
        Library.load(path)
    with pytest.raises(RecordError, match="No such file"):
        Library.load(tmp_path / "none.json")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "l.json"
    LIBRARY.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        Library("h200", ()).save(path)
    monkeypatch.undo()
    assert Library.load(path) == LIBRARY
    assert [f.name for f in tmp_path.iterdir()] == ["l.json"]


def test_a_gpu_without_packaged_library() -> None:
    with pytest.raises(RecordError, match="h999"):
        Library.packaged("h999")
    assert Library.packaged("h999", missing_ok=True) == Library("h999", ())
