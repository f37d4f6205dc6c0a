"""tools/drawn_history.py: every committed draw counts once, and the published file ends with the draws of today."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from drawn_history import DRAWS
from pages.study_blocks import draws_block

from outblas.core.errors import RecordError
from outblas.records.results import read_result, write_result
from support.bench_fixture import META, make_rows
from support.helpers import ROOT, module_of_file

NAME = "results/h200/drawn_tn_fp16_fp32_unmeasured.parquet"


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "tools" / "drawn_history.py", monkeypatch)


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def commit_draw(root: Path, seed: int, date: str, more: str = "") -> str:
    """Commit a draw, and return the commit's name."""
    rows = [{**row, "mode": "unmeasured"} for row in make_rows((64, 128, 512), seed=seed)]
    made = {**META["provenance"], "date": date}
    meta = {**META, "suite": "drawn", "provenance": made, "shapes": f"drawn, seed {seed}", "more": more}
    write_result(rows, meta, root / NAME)
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "a draw")
    return git(root, "rev-parse", "HEAD").strip()


def test_each_draw_of_the_history_counts_once(script: Any, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    first = commit_draw(tmp_path, 1, "2000-01-02")
    commit_draw(tmp_path, 1, "2000-01-02", more="a stamp")  # another file with the same draw
    second = commit_draw(tmp_path, 2, "2000-01-03")
    script.main(tmp_path)
    draws = json.loads((tmp_path / "results" / DRAWS).read_text())["draws"]
    assert [(draw["added_by"], draw["seed"], draw["date"]) for draw in draws] == [
        (first, 1, "2000-01-02"),
        (second, 2, "2000-01-03"),
    ]
    made = [make_rows((64, 128, 512), seed=seed) for seed in (1, 2)]
    counts = [sum(row["published"] < 0.98 for row in rows if not row["pdl"]) for rows in made]
    assert [draw["below_098"] for draw in draws] == counts
    assert f"- H200, unmeasured, TN: {counts[0]}, {counts[1]} below 0.98" in draws_block(tmp_path / "results" / DRAWS)


def test_a_history_that_is_cut_off_is_refused(script: Any, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "whole")
    for seed in (1, 2):
        commit_draw(tmp_path / "whole", seed, "2000-01-02")
    git(tmp_path, "clone", "-q", "--depth", "1", (tmp_path / "whole").as_uri(), "cut")
    with pytest.raises(RecordError, match="cut off"):
        script.main(tmp_path / "cut")
    with pytest.raises(RecordError, match="git rev-parse"):
        script.main(tmp_path)


def test_the_published_draws_end_with_the_files_of_today(script: Any) -> None:
    draws = json.loads((ROOT / "results" / DRAWS).read_text(encoding="utf-8"))["draws"]
    latest = {draw["file"]: draw for draw in draws}
    assert latest.keys() == {path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*/drawn_*.parquet")}
    for name, draw in latest.items():
        result = read_result(ROOT / name)
        figures = script.figures_of_draw(result.rows)
        assert {key: draw[key] for key in figures} == figures, f"run tools/drawn_history.py: {name} is newer"
        assert (draw["date"], draw["commit"]) == (result.provenance["date"], result.provenance["commit"])


def test_six_draws_of_learned_nn_shapes_on_the_h100_are_published() -> None:
    page = (ROOT / "docs/results/tables.md").read_text(encoding="utf-8")
    assert "- H100, learned, NN: 40, 17, 16, 12, 17, 9" in page
    assert draws_block(ROOT / "results" / DRAWS) in page


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "another"}', '{"format": "outblas-draws-1", "draws": [{}]}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    assert draws_block(tmp_path / DRAWS) == "No draws are recorded."
    (tmp_path / DRAWS).write_text(text)
    with pytest.raises(RecordError, match="cannot be read"):
        draws_block(tmp_path / DRAWS)
