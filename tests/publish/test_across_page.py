"""The tables of learning across GPUs: only from result files, one for each judged GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.publish_results import check_published, publish

from outblas_lab.compare.compare_result import figures, paired_gains, read_comparison, write_comparison
from outblas_lab.publish.html.compare_page import render_comparison
from support.bench_fixture import PROVENANCE, made_meta, made_rows, write_bench
from support.helpers import ROOT

ARMS = {"regressor@other": 0.2, "regressor@both": 0.1, "regressor@own": 0.15, "heuristic@other": 0.4, "random": 2.0}
LEARNED = {"": 80, "other": 60, "other-all": 90, "both": 140, "own": 80}


def write_across(path: Path, other: str = "NVIDIA H100") -> None:
    about = {"name": "other", "provenance": {**PROVENANCE, "gpu": other}, "sha256": "0" * 64, "gpu": "h100"}
    meta = {**made_meta(list(ARMS), ("shapes",)), "across": {**about, "learned": {"shapes": LEARNED}}}
    write_comparison(made_rows(ARMS, ("shapes",)), meta, path)


@pytest.fixture(name="published")
def published_fixture(tmp_path: Path) -> tuple[Path, Path]:
    folder, page = tmp_path / "results" / "h200", tmp_path / "docs" / "search" / "across-gpus.md"
    write_bench(folder / "grid.parquet")
    page.parent.mkdir(parents=True)
    page.write_text("# Title\n<!-- across:begin -->\n<!-- across:end -->\nrest\n")
    return folder, tmp_path


def test_without_a_result_file_the_page_stays_as_it_is(published: tuple[Path, Path]) -> None:
    page = published[1] / "docs/search/across-gpus.md"
    before = page.read_text()
    assert page not in publish(*published) and page.read_text() == before


def test_each_judged_gpu_has_its_table_and_the_paired_gains(published: tuple[Path, Path]) -> None:
    folder, root = published
    page = root / "docs/search/across-gpus.md"
    write_across(folder / "across.parquet")
    write_across(folder.parent / "h100" / "across.parquet", "NVIDIA H200")
    assert any("across-gpus.md is stale" in line for line in check_published(*published))
    publish(*published)
    text, found = page.read_text(), read_comparison(folder / "across.parquet")
    assert text.count("Judged on NVIDIA H200 (test fixture)") == 2
    assert "the other GPU is NVIDIA H100." in text and "the other GPU is NVIDIA H200." in text
    assert "60 of `other`, 140 of `both`, 80 of `own`" in text and "of `other-all`" not in text
    figure = figures(found, "shapes")["random", 4]
    assert f"{figure.quality:.3f} ± {figure.half_width:.3f}" in text
    gain = paired_gains(found, "shapes", "regressor@both", "regressor@own")[0]
    interval = f"[{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]"
    line = f"`regressor@both` over `regressor@own` | {100 * gain.mean:+.2f} {interval}"
    assert text.count(line) == 2 and "`ppo@other`" not in text
    assert check_published(*published) == []


def test_a_missed_aim_and_a_plainer_agent_that_is_ahead_are_told_in_words(published: tuple[Path, Path]) -> None:
    folder, root = published
    path = folder / "across.parquet"
    write_across(path)
    publish(*published)
    text = (root / "docs/search/across-gpus.md").read_text()
    quality = figures(read_comparison(path), "shapes")["regressor@other", 0].quality
    said = "missed on *shapes*" if quality < 0.965 else "met on every split"
    assert f"has {quality:.3f} on *shapes*; {quality:.3f} in the mean. The aim is 0.965. It is {said}." in text
    assert "surely behind" not in text, "the cost model is worse here"
    arms = {**ARMS, "regressor@other": 0.4, "heuristic@other": 0.1}
    write_comparison(made_rows(arms, ("shapes",)), read_comparison(path).meta, path)
    publish(*published)
    text, gains = page_text(root), paired_gains(read_comparison(path), "shapes", "regressor@other", "heuristic@other")
    behind = [gain for gain in gains if gain.high < 0]
    assert behind and f"surely behind `heuristic@other` after this many measurements: {behind[0].budget} (" in text


def page_text(root: Path) -> str:
    return (root / "docs/search/across-gpus.md").read_text()


def test_the_published_page_says_that_one_split_misses_the_aim() -> None:
    text = page_text(ROOT)
    assert "0.910 on *m=16384*; 0.953 in the mean. The aim is 0.965. It is missed on *m=16384*." in text
    assert "On *m=16384* it is surely behind `heuristic@other` after this many measurements: 0 (-1.45%)" in text
    assert "On *m=16384* it is surely behind `nearest@other` after this many measurements: 2 (-2.43%)" in text


def test_the_report_page_shows_every_arm(tmp_path: Path) -> None:
    write_across(tmp_path / "across.parquet")
    page = render_comparison(read_comparison(tmp_path / "across.parquet"))
    assert all(arm in page for arm in ARMS)
