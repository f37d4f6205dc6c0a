from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from outblas.core.errors import RecordError
from outblas.publish.palette import ratio_ticks
from outblas.publish.tables.publish_results import BEGIN, END, NCU_BEGIN, NCU_END, check_published, publish
from outblas.records.results import write_result
from support.bench_fixture import META, make_rows, write_bench


@pytest.mark.parametrize(("low", "high"), [(0.97, 1.03), (0.9, 1.3), (0.95, 1.6), (0.5, 2.5), (0.02, 40)])
def test_ratio_axes_have_some_ticks_and_one_at_one(low, high):
    ticks = ratio_ticks(low, high)
    assert 1.0 in ticks and 1 <= len(ticks) <= 12 and all(low <= t <= high for t in ticks)
    assert ticks == sorted(set(ticks))


@pytest.fixture
def published(tmp_path):
    write_bench(tmp_path / "h200" / "grid.parquet")
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nrest\n")
    notes = tmp_path / "kernels.md"
    notes.write_text(f"# Notes\n\n{NCU_BEGIN}\n{NCU_END}\n\nrest\n")
    return tmp_path / "h200", readme, tmp_path / "img" / "speedup.svg", notes


def test_publishing_writes_four_files_and_twice_the_same_bytes(published):
    directory, readme, picture, notes = published
    files = [directory / "summary.json", readme, picture, notes]
    assert len(check_published(*published)) == 4
    assert publish(*published) == files
    first = [p.read_bytes() for p in files]
    assert check_published(*published) == []
    publish(*published)
    assert [p.read_bytes() for p in files] == first


def test_the_readme_has_every_summary_row_and_keeps_its_own_text(published):
    directory, readme, _, _ = published
    publish(*published)
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("rest\n") and "old" not in text
    for row in json.loads((directory / "summary.json").read_text()):
        assert f"| {row['n']} | {row['geomean']:.3f}× | {row['flop_weighted']:.3f}× | {row['min']:.3f}× |" in text


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_left_alone_and_nothing_written(published, text):
    directory, readme, picture, _ = published
    readme.write_text(text)
    with pytest.raises(RecordError, match="no place"):
        publish(*published)
    assert readme.read_text() == text and not picture.exists() and not (directory / "summary.json").exists()


def test_the_picture_draws_every_row_and_tells_its_means(published):
    directory, _, picture, _ = published
    publish(*published)
    root = ElementTree.fromstring(picture.read_text())
    space = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{space}polyline")
    assert sum(len(line.get("points").split()) for line in lines) == 128
    assert {line.get("class") for line in lines} == {"on", "off"}
    launch = [r["by_regime"]["launch"]["geomean"] for r in json.loads((directory / "summary.json").read_text())]
    texts = [t.text for t in root.findall(f"{space}text")]
    assert f"geometric mean {launch[0]:.3f}× / {launch[1]:.3f}×" in texts
    assert "prefers-color-scheme: dark" in root.find(f"{space}style").text


def test_the_picture_prefers_the_headline_suite(published):
    directory, _, picture, _ = published
    rows = [{**r, "layout": "NN"} for r in make_rows((64,))]
    write_result(rows, META, directory / "a_first_by_name.parquet")
    publish(*published)
    assert "grid1000 TN, fp16" in picture.read_text()
