"""The README's table: fallbacks, and the interval between starts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pages.headline import headline_rows, headline_table, short_rows
from pages.rival_tables import transformer_table
from pages.table_words import mean_in_words
from transformer.whole_model_file import FORMAT

from outblas.records.results import read_result, write_result
from support.bench_fixture import META, make_rows

ROOT = Path(__file__).resolve().parents[2]
DRAWN = sorted((ROOT / "results").glob("*/drawn_*.parquet"))
PAGES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if "journal" not in path.parts]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((None,), "1.126×"),
        (((1.1271, 1.1274),), "1.126× (starts 1.127–1.127)"),
        ((None, [1.1, 1.2]), "1.126× (95% 1.100–1.200)"),
        (([1.1, 1.2], [1.0, 1.3]), "1.126× (starts 1.100–1.200, 95% 1.000–1.300)"),
    ],
)
def test_the_brackets_of_a_mean_say_what_they_hold(interval: Any, words: str) -> None:
    assert mean_in_words(1.1264, *interval) == words


#: A figure with brackets behind it: the figure, the words in the brackets, their two ends.
BRACKETS = re.compile(r"(\d+\.\d+)× \(([^()\d]*(?:95% )?)(\d+\.\d+)(?:–| to |-)(\d+\.\d+)")


@pytest.mark.parametrize("page", sorted({"README.md", *PAGES}))
def test_each_bracket_on_a_page_holds_its_figure_or_is_called_the_range_of_the_starts(page: str) -> None:
    found = BRACKETS.findall((ROOT / page).read_text(encoding="utf-8"))
    wrong = [each for each in found if each[1] != "starts " and not float(each[2]) <= float(each[0]) <= float(each[3])]
    assert wrong == []
    assert found or page not in {"docs/results/index.md", "docs/results/tables.md"}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: f"{path.parts[-2]}/{path.stem}")
def test_each_half_of_drawn_shapes_in_the_headline_is_that_of_its_file(path: Path) -> None:
    result = read_result(path)
    rows = [row for row in result.rows if not row["pdl"]]
    listed_rows = headline_rows(path.parent, [result])
    shown = {row.use.rsplit(", ", 1)[1]: row for row in listed_rows if "aligned" in row.use}
    assert shown.keys() == {"aligned", "unaligned"}
    assert sum(row.problems for row in shown.values()) == len(rows) == 400
    summary = json.loads(path.with_name("summary.json").read_text(encoding="utf-8"))
    (listed,) = [row for row in summary if row["file"] == path.name and not row["pdl"]]
    for name, row in shown.items():
        mine = [r["published"] for r in rows if (r["n"] % 8 == 0 and r["k"] % 8 == 0) == (name == "aligned")]
        log = math.fsum(map(math.log, mine)) / len(mine)
        assert (row.problems, row.worst) == (len(mine), round(min(mine), 6))
        assert row.geomean == pytest.approx(math.exp(log), abs=1e-6)
        assert row.below_098 == sum(one < 0.98 for one in mine)
        assert row.bootstrap is not None and row.bootstrap[0] < row.geomean < row.bootstrap[1]
        part = listed["by_alignment"][name]
        assert (part["n"], part["geomean"], part["below_098"]) == (row.problems, row.geomean, row.below_098)
        line = f"{name} | {row.problems} | {mean_in_words(row.geomean, None, row.bootstrap)} |"
        unlinked = f"{name}](https://outblas.github.io/outblas/results/tables/){line[len(name) :]}"
        assert unlinked in (ROOT / "docs/results/index.md").read_text(encoding="utf-8")
        assert line not in (ROOT / "README.md").read_text(encoding="utf-8"), "it says in words what they gain"


def test_the_headline_names_the_half_from_which_the_gain_comes(tmp_path: Path) -> None:
    made = [row for row in make_rows((64, 128), pdls=(False,)) if not row["fallback"]][:6]
    common = {"ran": "torch 2", "mode": "unmeasured"}
    slow, fast = ({**common, "published": ratio, "speedup": ratio} for ratio in (1.0, 1.5))

    def text(aligned: dict[str, Any], unaligned: dict[str, Any]) -> str:
        rows = [{**row, **aligned} if i < 3 else {**row, **unaligned, "k": row["k"] + 1} for i, row in enumerate(made)]
        path = write_result([whole(row) for row in rows], {**META, "suite": "drawn"}, tmp_path / "drawn.parquet")
        return headline_table(headline_rows(tmp_path, [read_result(path)]))

    said = "The gain on random shapes comes from the unaligned ones."
    assert said in text(slow, fast) and said not in text(fast, slow)


def whole(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose times and interval agree with its speed-up."""
    return {**row, "ours_us": row["baseline_us"] / row["speedup"], "low": row["speedup"], "high": row["speedup"]}


def test_torch_compile_stands_beside_optimize(tmp_path: Path) -> None:
    def step(**us: float) -> dict[str, Any]:
        return {"variants": {name: {"us": [time, time, time]} for name, time in us.items()}}

    parts = {"models": {}, "tuned": [], "bars": [], "settings": {"gpu": "NVIDIA H200"}, "format": FORMAT}
    rows = [step(compile=1.0, optimize=2.0), step(compile=2.0, optimize=1.0), step(compile=1.0), step(optimize=3.0)]
    told = "`optimize()` without torch.compile, against its mode max-autotune:"

    def text(steps: list[dict[str, Any]]) -> str:
        (tmp_path / "h200").mkdir(exist_ok=True)
        (tmp_path / "h200" / "whole_models.json").write_text(json.dumps({**parts, "rows": steps}))
        path = write_result(make_rows((64,), pdls=(False,)), META, tmp_path / "grid.parquet")
        return headline_table(headline_rows(tmp_path, [read_result(path)]), [tmp_path / "h200"])

    assert f"{told} slower in 1 of the 2 steps timed with both on the H200." in text(rows)
    assert f"{told} not timed on the H200." in text(rows[3:])


def test_compiled_models_are_compared_with_torch_compile_before_eager_ones(tmp_path: Path) -> None:
    def file(variant: str, **ratios: float) -> dict[str, Any]:
        figures = {name: [ratio, ratio, ratio] for name, ratio in ratios.items()}
        about = {"gpu": "NVIDIA H200", "driver": "1", "date": "2026-11-30T00:00:00"}
        row = {"model": "llama_8b", "context": 64, "variants": {variant: figures}, "provenance": [about]}
        parts = {"models": {"llama_8b": {}}, "tuned": [], "bars": [], "format": FORMAT, "rows": [row]}
        return {**parts, "settings": {**about, "layers": 8, "tune": 0}}

    (tmp_path / "whole_models.json").write_text(json.dumps(file("optimize", speedup=1.2, speedup_over_merged=1.1)))
    compiled = file("default_optimize", speedup=1.6, speedup_over_default=1.13)
    (tmp_path / "compiled_models.json").write_text(json.dumps(compiled))
    found = [(row.rival, row.geomean) for row in short_rows(tmp_path, [])]
    assert found == [("torch.compile (default)", 1.13), ("torch with merged weights and fused norms", 1.1)]
    assert [row.geomean for row in headline_rows(tmp_path, [])] == [1.13, 1.2, 1.1]
    assert all("8 layers" in row.use for row in headline_rows(tmp_path, []))


def table_of(rows: list[dict[str, Any]], folder: Path) -> str:
    path = write_result(rows, META, folder / "grid.parquet")
    return headline_table(headline_rows(folder, [read_result(path)]))


def test_measured_fall_backs_and_starts_are_told(tmp_path: Path) -> None:
    rows = [{**row, "ran": "torch 2"} for row in make_rows((64, 128), pdls=(False,)) if not row["fallback"]]
    one = table_of(rows, tmp_path)
    assert "Timed fallbacks are included." in one and "counted as 1" not in one and "*Starts*:" not in one
    three = table_of([{**row, "by_start": [row["published"]] * 3} for row in rows], tmp_path)
    assert "*Starts*: lowest and highest mean of a single machine boot." in three
    (line,) = [line for line in three.splitlines() if "grid1000*" in line]
    assert line.count("–") == 1 and "× (starts " in line


def test_the_use_has_the_number_of_problems_that_were_timed(tmp_path: Path) -> None:
    rows = make_rows((64, 128), pdls=(False,))
    text = table_of(rows, tmp_path)
    assert f"[{len(rows)} problems of *grid1000*]" in text and len(rows) == 8


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layers": 32}, "decode steps of Llama 3 8B, over torch]"),
        ({"layers": 4}, "decode steps of Llama 3 8B, 4 of its 32 layers, over torch]"),
        ({"layers": 32, "tuned": {}}, "decode steps of Llama 3 8B, after tuning, over torch]"),
    ],
)
def test_a_part_of_a_model_and_a_tuned_one_are_told(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    variants = {"torch": {"us": [9.0], "tokens_per_s": 64}, "outblas": {"speedup": [1.25, 1.2, 1.3]}}
    made = {**META["provenance"], "toolchain": {"torch": "2"}}
    steps = [{"step": "decode_8", "mode": "graph", "variants": variants}]
    data = {"context": 2, "rounds": 3, "provenance": made, "steps": steps, **more}
    (tmp_path / "model_steps.json").write_text(json.dumps(data))
    assert words in headline_table(headline_rows(tmp_path, []))
    assert transformer_table(tmp_path).count(f"{more['layers']} layers, after tuning") == ("tuned" in more)
