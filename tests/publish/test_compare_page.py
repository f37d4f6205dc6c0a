"""The page of a comparison, its picture and its block in the README."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages.compare_block import compare_block
from pages.compare_picture import compare_svg
from pages.publish_results import check_published, publish

from outblas.core.errors import RecordError
from outblas.tune.agents.agent_registry import agents
from outblas_lab.compare.compare_result import figures, noise_regret, paired_gains
from outblas_lab.publish.html.compare_page import curves, render_comparison
from outblas_lab.publish.html.tune_page import write_report
from outblas_lab.publish.palette import SHOWN_AGENTS
from support.bench_fixture import write_bench, write_made

SVG = "{http://www.w3.org/2000/svg}"
#: Ten agents, one of them with a name that is markup.
LEVEL = {"best": 0.05, **{f"agent{i}": 0.2 + 0.1 * i for i in range(8)}, "<b>&": 1.5}


def test_the_page_has_every_figure_and_asks_for_nothing(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    page = write_report(c.path, tmp_path / "c.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="outblas-data">(.*?)</script>', page, re.S).group(1))
    assert [g["title"] for g in data["groups"]] == ["shapes", "families"]
    for group in data["groups"]:
        made = figures(c, group["title"])
        lines = {s["name"]: s["tips"] for s in group["figures"]["curve"]["series"] if s["tips"]}
        assert set(lines) == set(LEVEL)
        for agent, tips in lines.items():
            for budget, tip in zip(c.budgets, tips, strict=True):
                assert tip.startswith(f"{agent} after {budget} measurements: {made[agent, budget].quality:.3f} (")
        for agent in ("best", "agent3"):
            f = made[agent, 4]
            assert f"<td>{f.quality:.3f} ({f.low:.3f} to {f.high:.3f})</td>" in page
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "https://" not in page
    assert "invented figures &amp; no GPU" in page and "Quality by regime" in page
    assert write_report(c.path, tmp_path / "d.html").read_text(encoding="utf-8") == page


def test_the_page_opens_with_the_best_agent_and_shows_four_of_many_until_asked(tmp_path: Path) -> None:
    levels = {"greedy": 0.5, "regressor": 0.05, "heuristic": 0.1, "tpe": 0.8, "random": 1.0}
    levels |= {name: 1.1 for name in ("evolution", "surrogate", "nvmmh")}
    page = render_comparison(write_made(tmp_path / "c.parquet", levels))
    assert page.index("<strong>Best: regressor.</strong>") < page.index("Best agent") < page.index("<svg")
    assert page.index("<svg") < page.index("Words on this page") < page.index("<dt>Quality")
    assert "<strong>regressor</strong>" in page and "outblas tune --agent regressor" in page
    boxes = re.findall(r"data-toggles='[\d ]+'( checked)?><i[^>]*></i>(\w+)", page)[: len(levels)]
    assert {name: bool(ticked) for ticked, name in boxes} == {name: name in SHOWN_AGENTS for name in levels}


def test_a_few_agents_are_all_shown(tmp_path: Path) -> None:
    """A reader asked for each of them, and each has a colour of its own."""
    levels = {"greedy": 0.5, "regressor": 0.05, "heuristic": 0.1, "tpe": 0.8, "random": 1.0}
    page = render_comparison(write_made(tmp_path / "c.parquet", levels))
    boxes = re.findall(r"data-toggles='[\d ]+'( checked)?><i[^>]*></i>(\w+)", page)[: len(levels)]
    assert {name for ticked, name in boxes if ticked} == set(levels)


def test_the_curve_draws_the_interval_of_every_agent(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    made = figures(c, "shapes")
    chart = curves(c, "shapes", made)
    bands = {s.name: s.artists[0].get_paths()[0].vertices for s in chart.series if not s.mark}
    lines = {s.name: s.artists[0].get_ydata() for s in chart.series if s.mark}
    assert set(bands) == set(lines) == set(LEVEL)
    for agent, corners in bands.items():
        assert list(lines[agent]) == [made[agent, b].quality for b in c.budgets]
        for place, budget in enumerate(c.budgets):
            ends = {y for x, y in corners if x == place}
            assert ends == {made[agent, budget].low, made[agent, budget].high}


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in root.iter(f"{SVG}g") if one.get("class") == name]


def corners(one: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the points of the one path that is drawn."""
    (path,) = one.iter(f"{SVG}path")
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d", ""))]


def text_of(one: ElementTree.Element) -> str | None:
    return next(one.iter(f"{SVG}text")).text


def test_the_picture_draws_four_agents_in_colour_and_the_rest_in_grey(tmp_path: Path) -> None:
    levels = {**LEVEL, "random": 1.0, "tpe": 0.8, "heuristic": 0.1, "regressor": 0.02}
    c = write_made(tmp_path / "c.parquet", levels)
    svg = compare_svg(c)
    assert svg == compare_svg(c)
    root = ElementTree.fromstring(svg)
    lines, grey, bands = (of_class(root, name) for name in ("line", "quiet", "band"))
    assert len(lines) == len(bands) == 2 * 4 and len(grey) == 2 * len(LEVEL)
    colours = [re.findall(r"stroke: (#\w+)", next(one.iter(f"{SVG}path")).get("style", "")) for one in lines]
    assert len({colour for (colour,) in colours}) == 4
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for one in lines + grey:
        points = corners(one)
        assert len(points) == len(c.budgets)
        assert all(0 < x < width and 80 < y < height - 50 for x, y in points)
        heights = [y for _, y in points]
        assert heights == sorted(heights, reverse=True), "the better, the higher"
    for line, band in zip(lines, bands, strict=True):
        for x, y in corners(line):
            (use,) = band.iter(f"{SVG}use")
            shift = float(use.get("y", ""))
            ends = [v + shift for u, v in corners(band) if abs(u + float(use.get("x", "")) - x) < 0.2]
            assert min(ends) - 0.2 <= y <= max(ends) + 0.2, "the band is around its line"


def test_the_picture_names_its_axes_and_the_ends_of_its_lines(tmp_path: Path) -> None:
    levels = {"random": 1.0, "tpe": 0.8, "greedy": 0.5, "heuristic": 0.1, "regressor": 0.02}
    levels |= {f"grey{i}": 1.1 + 0.1 * i for i in range(8)}
    c = write_made(tmp_path / "c.parquet", levels)
    root = ElementTree.fromstring(compare_svg(c))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"shapes", "families", "measurements of a problem", "share of the best speed"} <= set(texts)
    assert any((text or "").startswith("1.00: the agent's kernel is the fastest recorded one") for text in texts)
    names = of_class(root, "name")
    assert [text_of(one) for one in names] == sorted(levels, key=levels.__getitem__), "all, and the best ends highest"
    heights = [float(next(one.iter(f"{SVG}text")).get("y", "")) for one in names]
    assert all(b - a >= 15 for a, b in pairwise(heights)), "names do not overlap"
    width = float(root.get("width", ""))
    assert all(float(next(one.iter(f"{SVG}text")).get("x", "")) < 0.8 * width for one in names)
    ends = [corners(one)[-1] for name in ("line", "quiet") for one in of_class(root, name)]
    ends = [end for end in ends if end[0] == max(x for x, _ in ends)]
    starts = [corners(one)[-1] for one in of_class(root, "leader")]
    assert len(starts) == len(ends) == len(names)
    for end, start in zip(sorted(ends), sorted(starts), strict=True):
        assert start == pytest.approx(end, abs=0.2), "a leader begins at the end of each line"


def test_the_noise_floor_is_drawn_and_named(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    assert not of_class(ElementTree.fromstring(compare_svg(c)), "noise")
    assert "noise floor" not in [s.name for s in curves(c, "shapes", figures(c, "shapes")).series]
    assert noise_regret(c) is None and "Not told apart" not in compare_block(c, None)
    for about in c.meta["splits"].values():
        about["noise_floor"] = 0.995
    root = ElementTree.fromstring(compare_svg(c))
    assert len(of_class(root, "noise")) == len(c.splits)
    assert any("Dashed: noise" in (t.text or "") for t in root.iter(f"{SVG}text"))
    (line,) = [s for s in curves(c, "shapes", figures(c, "shapes")).series if s.name == "noise floor"]
    assert set(line.artists[0].get_ydata()) == {0.995}
    assert noise_regret(c) == pytest.approx(1 / 0.995 - 1, abs=1e-6)
    assert "The noise floor is a regret of 0.50%" in compare_block(c, None)


def test_the_block_credits_a_method_with_what_its_ablation_shows(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", {"ppo": 0.1, "regressor": 0.1, "random": 0.3, "random-legal": 0.6})
    block = compare_block(c, None)
    lines = [line for line in block.splitlines() if line.startswith(("| reinforcement", "| the ranking"))]
    assert len(lines) == 2 * len(c.splits)
    for line in lines:
        split = line.split("|")[2].strip()
        agent, without = ("ppo", "regressor") if "ppo" in line else ("random", "random-legal")
        cells = [cell.strip() for cell in line.split("|")[3:-1]]
        gains = paired_gains(c, split, agent, without)
        assert cells == [f"{100 * g.mean:+.2f} [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" for g in gains]
    assert "What a method adds" not in compare_block(write_made(tmp_path / "d.parquet", LEVEL), None)


def test_without_the_four_agents_the_first_ones_stand_out(tmp_path: Path) -> None:
    root = ElementTree.fromstring(compare_svg(write_made(tmp_path / "c.parquet", LEVEL)))
    bold = {
        text_of(one) for one in of_class(root, "name") if "font-weight: 700" in ElementTree.tostring(one, "unicode")
    }
    assert bold == set(list(LEVEL)[:4])


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    folder, agents = tmp_path / "results" / "h200", tmp_path / "docs" / "search" / "agents.md"
    write_bench(folder / "grid.parquet")
    agents.parent.mkdir(parents=True)
    blocks = "\n".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->" for name in ("compare", "agents", "budgets"))
    agents.write_text(f"# Title\n{blocks}\nrest\n")
    return folder, tmp_path


def test_without_a_comparison_nothing_is_published_of_it(published: tuple[Path, Path]) -> None:
    folder, root = published
    picture, agents = root / "docs/img/speedup.svg", root / "docs/search/agents.md"
    assert publish(*published) == [folder / "summary.json", picture, picture.with_name("headline.svg"), agents]
    assert "Split" not in agents.read_text() and not picture.with_name("compare.svg").exists()


def test_a_comparison_gets_a_table_and_a_picture(published: tuple[Path, Path]) -> None:
    folder, root = published
    picture, agents = root / "docs/img/compare.svg", root / "docs/search/agents.md"
    c = write_made(folder / "compare.parquet", LEVEL)
    stale = check_published(*published)
    assert any("compare.svg is missing" in line for line in stale)
    assert any("agents.md is stale" in line for line in stale)
    assert picture in publish(*published)
    text = agents.read_text()
    assert text.startswith("# Title\n") and text.endswith("rest\n") and "(../img/compare.svg)" in text
    made = figures(c, "families")
    cells = [f"{made['agent5', b].quality:.3f} ± {made['agent5', b].half_width:.3f}" for b in c.budgets]
    assert f"| agent5 | {' | '.join(cells)} |" in text
    assert f"| best | **{made['best', 0].quality:.3f} ± " in text and "`best`" in text
    assert check_published(*published) == []
    publish(*published)
    assert agents.read_text() == text


def test_every_agent_has_its_line(published: tuple[Path, Path]) -> None:
    publish(*published)
    text = (published[1] / "docs/search/agents.md").read_text()
    for name in agents():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert len(line.split("|")[2].strip()) > 15


def test_another_comparison_makes_block_and_picture_stale(published: tuple[Path, Path]) -> None:
    folder, root = published
    agents = root / "docs/search/agents.md"
    write_made(folder / "compare.parquet", LEVEL)
    publish(*published)
    write_made(folder / "compare.parquet", {"only": 0.3}, splits=("shapes",))
    stale = {line.split()[0] for line in check_published(*published)}
    assert stale == {str(agents), str(root / "docs/img/compare.svg")}
    publish(*published)
    assert "Split *shapes*" in agents.read_text() and "agent5" not in agents.read_text()


def test_a_page_with_one_marker_only_is_left_alone(published: tuple[Path, Path]) -> None:
    folder, root = published
    agents = root / "docs/search/agents.md"
    write_made(folder / "compare.parquet", LEVEL)
    agents.write_text("# Title\n<!-- compare:end -->\n")
    with pytest.raises(RecordError, match="no markers"):
        publish(*published)
    assert agents.read_text() == "# Title\n<!-- compare:end -->\n" and not (folder / "summary.json").exists()


def test_a_damaged_comparison_stops_everything(published: tuple[Path, Path]) -> None:
    folder, root = published
    agents = root / "docs/search/agents.md"
    c = write_made(folder / "compare.parquet", LEVEL)
    c.path.write_bytes(c.path.read_bytes()[:-20])
    before = agents.read_text()
    with pytest.raises(RecordError, match="compare.parquet"):
        publish(*published)
    assert agents.read_text() == before


def test_a_page_names_the_unit_of_its_budgets(tmp_path: Path) -> None:
    made = write_made(tmp_path / "c.parquet", LEVEL)
    by_count = render_comparison(made)
    by_time = render_comparison(replace(made, meta={**made.meta, "unit": "gpu-ms"}))
    assert "by budget b (measurements)" in by_count and "modelled from the recorded times" not in by_count
    assert "by budget b (ms of the GPU)" in by_time and "modelled from the recorded times" in by_time


def test_a_page_of_a_recording_without_pdl_claims_none(tmp_path: Path) -> None:
    made = write_made(tmp_path / "c.parquet", LEVEL)
    assert "splits, with and without PDL, " in render_comparison(made)
    assert "splits, without PDL, " in render_comparison(replace(made, launches=("plain",)))
