"""The sentences on unlisted shapes: figures of their files, and the fit by which they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages.any_shape_block import NOT_MEASURED, any_shape_text
from pages.headline import headline_rows

from outblas.core.errors import RecordError
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.results import write_result
from support.bench_fixture import META, make_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of an H200; beside it a bench of unlisted shapes of which one is slower than its fastest rival."""
    (tmp_path / "any_shapes").mkdir()
    rows = [row for row in make_rows((64, 512), pdls=(False,)) if not row["fallback"]]
    rows = [{**row, "ours_us": row["baseline_us"] / 1.5, "speedup": 1.5, "published": 1.5} for row in rows]
    rows[0] |= {"ours_us": rows[0]["baseline_us"] / 0.96, "speedup": 0.96, "low": 0.95, "published": 0.96}
    rows = [{**row, "low": 0.9, "high": 1.6} for row in rows]
    write_result(rows, {**META, "suite": "any_shapes"}, tmp_path / "any_shapes" / "h200_bench.parquet")
    return tmp_path / "h200"


def write(folder: Path, fit: str) -> None:
    means = {"over_torch": 1.25, "ours_over_torch": 1.5, "ours_over_lt_auto": 1.4}
    data = {"shapes": 9, "ours": 8, "slower": 0, **means, "fit": fit, "provenance": META["provenance"]}
    (folder.parent / "any_shapes" / "h200.json").write_text(json.dumps(data))


@pytest.mark.parametrize("earlier", [False, True])
def test_figures_of_an_earlier_fit_are_marked(folder: Path, earlier: bool) -> None:
    write(folder, "an older fit" if earlier else AnyShapeModel.load("h200").about)
    text, (row,) = any_shape_text(folder), headline_rows(folder, [])
    assert text.startswith(f"{'An earlier' if earlier else 'The packaged'} model chose a kernel (case 3) for 8 of 9")
    assert "1.50× the speed of torch.matmul and 1.40× that of autotuned" in text and "1.250× over torch" in text
    assert "1 of the 8 were slower than the fastest rival, by at most 4.0%" in text and "none ran below" in text
    assert row.use == f"random shapes not in the library{' (earlier model, 2000-01-02)' if earlier else ''}"


@pytest.mark.parametrize("earlier", [False, True])
def test_held_out_figures_are_those_of_todays_rule_without_pdl(folder: Path, earlier: bool) -> None:
    assert any_shape_text(folder) == NOT_MEASURED, "a bench alone does not say by which fit it was made"
    rows = [
        {"source": source, "layout": layout, "launch": launch, "over_best": [ratio, 1.0, 2.0]}
        for source, layout, launch, ratio in (
            ("grid1000", "TN", "plain", 1.1), ("grid1000", "TN", "pdl", 1.9),
            ("grid1000", "NN", "plain", 1.2), ("llm", "TN", "plain", 1.8),
        )
    ]  # fmt: skip
    problems = {"today": rows, "former": [{**row, "over_best": [9.0]} for row in rows]}
    (folder.parent / "any_shapes" / "h200_held_out.json").write_text(
        json.dumps({"problems": problems, "data": "other data" if earlier else AnyShapeModel.load("h200").about})
    )
    text = any_shape_text(folder)
    assert "without PDL: 1.100× in TN and 1.200× in NN (" in text
    assert ("an earlier model reaches this" if earlier else "the packaged model reaches this") in text


def test_a_damaged_file_is_refused(folder: Path) -> None:
    (folder.parent / "any_shapes" / "h200.json").write_text("{}")
    with pytest.raises(RecordError, match="h200.json cannot be read"):
        any_shape_text(folder)
