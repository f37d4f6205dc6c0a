"""A comparison's page, picture and place in the README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outblas.core.errors import RecordError
from outblas.publish.html.tune_page import write_report
from outblas.publish.tables.compare_block import COMPARE_BEGIN, COMPARE_END
from outblas.publish.tables.compare_picture import compare_svg
from outblas.publish.tables.publish_results import BEGIN, END, NCU_BEGIN, NCU_END, check_published, publish
from outblas.search.compare.compare_stats import figures
from support.bench_fixture import write_bench, write_made

#: More agents than a line of the legend holds, one of them with a name that is markup.
LEVEL = {"best": 0.05, **{f"agent{i}": 0.2 + 0.1 * i for i in range(8)}, "<b>&": 1.5}


def test_the_page_has_every_figure_and_asks_for_nothing(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    page = write_report(c.path, tmp_path / "c.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="outblas-data">(.*?)</script>', page, re.S).group(1))
    assert [g["title"] for g in data["groups"]] == ["shapes", "families"]
    for group in data["groups"]:
        made = figures(c, group["title"])
        lines = [t for t in group["figures"]["curve"]["data"] if "name" in t]
        assert {t["name"]: t["y"] for t in lines} == {a: [made[a, b].quality for b in c.budgets] for a in LEVEL}
        for agent in ("best", "agent3"):
            f = made[agent, 4]
            assert f"<td>{f.quality:.3f} ({f.low:.3f} to {f.high:.3f})</td>" in page
    text = page.replace(max(re.findall(r"<script>(.*?)</script>", page, re.S), key=len), "")
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text and "https://" not in text
    assert "invented figures &amp; no GPU" in text and "Quality by regime" in text
    assert write_report(c.path, tmp_path / "d.html").read_text(encoding="utf-8") == page


def test_the_picture_draws_a_line_and_a_band_of_every_agent_inside_the_card(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    svg = compare_svg(c)
    assert svg == compare_svg(c)
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    lines, bands = root.findall(f"{space}polyline"), root.findall(f"{space}polygon")
    assert len(lines) == len(bands) == 2 * len(LEVEL)
    assert len({(e.get("stroke"), e.get("stroke-dasharray")) for e in lines}) == len(LEVEL)
    width, height = float(root.get("width")), float(root.get("height"))
    for shape, corners in [*((e, 4) for e in lines), *((e, 8) for e in bands)]:
        points = [tuple(map(float, p.split(","))) for p in shape.get("points").split()]
        assert len(points) == corners and all(0 < x < width and 100 < y < height - 50 for x, y in points)
    texts = [t.text for t in root.findall(f"{space}text")]
    assert {*LEVEL, "split shapes", "split families", "measurements"} <= set(texts)
    first = [float(p.split(",")[1]) for p in lines[0].get("points").split()]
    assert first == sorted(first, reverse=True), "the better, the higher"


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path, Path, Path]:
    directory, readme = tmp_path / "results", tmp_path / "README.md"
    write_bench(directory / "grid.parquet")
    readme.write_text(f"# Title\n{BEGIN}\n{END}\n\n## Use\n\nrest\n")
    notes = tmp_path / "kernels.md"
    notes.write_text(f"{NCU_BEGIN}\n{NCU_END}\n")
    return directory, readme, tmp_path / "img" / "speedup.svg", notes


def test_without_a_comparison_nothing_is_published_of_it(published: tuple[Path, ...]) -> None:
    directory, readme, picture, _ = published
    assert publish(*published) == [directory / "summary.json", readme, picture, published[3]]
    assert "compare" not in readme.read_text() and not picture.with_name("compare.svg").exists()


def test_a_comparison_gets_a_section_a_table_and_a_picture(published: tuple[Path, ...]) -> None:
    directory, readme, picture, _ = published
    c = write_made(directory / "compare.parquet", LEVEL)
    stale = check_published(*published)
    assert any("compare.svg is missing" in line for line in stale) and any(
        "README.md is stale" in line for line in stale
    )
    assert picture.with_name("compare.svg") in publish(*published)
    text = readme.read_text()
    assert text.index("# Title") < text.index("## Agents compared") < text.index(COMPARE_BEGIN) < text.index("## Use")
    assert text.endswith("## Use\n\nrest\n") and "(img/compare.svg)" in text
    made = figures(c, "families")
    cells = [f"{made['agent5', b].quality:.3f} ± {made['agent5', b].half_width:.3f}" for b in c.budgets]
    assert f"| agent5 | {' | '.join(cells)} |" in text
    assert f"| best | **{made['best', 0].quality:.3f} ± " in text and "`best`" in text
    assert check_published(*published) == []
    publish(*published)
    assert readme.read_text() == text


def test_another_comparison_makes_block_and_picture_stale(published: tuple[Path, ...]) -> None:
    directory, readme, picture, _ = published
    write_made(directory / "compare.parquet", LEVEL)
    publish(*published)
    write_made(directory / "compare.parquet", {"only": 0.3}, splits=("shapes",))
    assert {line.split()[0] for line in check_published(*published)} == {
        str(readme),
        str(picture.with_name("compare.svg")),
    }
    publish(*published)
    assert "Split *shapes*" in readme.read_text() and "agent5" not in readme.read_text()


def test_a_readme_with_one_marker_only_is_left_alone(published: tuple[Path, ...]) -> None:
    directory, readme, _, _ = published
    write_made(directory / "compare.parquet", LEVEL)
    text = readme.read_text() + COMPARE_END
    readme.write_text(text)
    with pytest.raises(RecordError, match="no place"):
        publish(*published)
    assert readme.read_text() == text and not (directory / "summary.json").exists()


def test_a_damaged_comparison_stops_everything(published: tuple[Path, ...]) -> None:
    directory, readme, _, _ = published
    c = write_made(directory / "compare.parquet", LEVEL)
    c.path.write_bytes(c.path.read_bytes()[:-20])
    before = readme.read_text()
    with pytest.raises(RecordError, match="compare.parquet"):
        publish(*published)
    assert readme.read_text() == before
