"""Charts and pictures as SVG, and the words of the pages."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure
from pages.card import current_picture, picture

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas_lab.publish.drawing import drawing, svg_content
from outblas_lab.publish.html.charts import Chart
from outblas_lab.publish.html.page import templates
from outblas_lab.publish.words import baseline_words, date_words, decade_words, regime_words

SPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
SVG = "{http://www.w3.org/2000/svg}"
NAME = "a & <b> $x$ $\\frac$"


@drawing()
def chart_of_all() -> Chart:
    """A line, dots, bars and a band, with the axes from 0 to 10."""
    chart = Chart(NAME, "seconds")
    chart.axes.set(xlim=(0, 10), ylim=(0, 10))
    chart.add("line", chart.axes.plot([0, 5, 10], [0, 5, 10]), "red", tips=["a", "b", "c"])
    chart.add(NAME, chart.axes.plot([0, 5, 10], [0, 5, 10], "o"), "blue", "dots", rows=[7, 8, 9], shown=False)
    chart.add("bars", chart.axes.bar([2, 4], [3, 6], 1), "green", "bars", tips=["two", "<b>&'\""])
    chart.add(NAME, [chart.axes.fill_between([0, 10], 1, 2)], "blue", "", shown=False)
    return chart


def drawn(chart: Chart) -> dict[str, list[ElementTree.Element]]:
    root = ElementTree.fromstring(f"<svg {SPACES}>{chart.svg('chart-3')}</svg>")
    found: dict[str, list[ElementTree.Element]] = {}
    for one in root.iter():
        if one.get("data-series"):
            found.setdefault(one.get("data-series", ""), []).append(one)
    return found


def test_lines_and_dots_lie_at_their_values() -> None:
    """The page's script finds one point per value: in the path of a line, and in the marks of dots."""
    series = drawn(chart_of_all())
    path = next(series["0"][0].iter(f"{SVG}path")).get("d", "")
    line = [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]
    dots = [(float(u.get("x", "")), float(u.get("y", ""))) for u in series["1"][0].iter(f"{SVG}use")]
    assert line == dots and len(line) == 3
    (left, bottom), middle, (right, top) = line
    assert left < right and top < bottom, "larger values stand further right and higher"
    assert middle == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.2)


def test_each_bar_has_its_own_text_escaped() -> None:
    bars = drawn(chart_of_all())["2"]
    assert [bar.get("data-tip") for bar in bars] == ["two", "<b>&'\""]
    heights = []
    for bar in bars:
        ys = [float(y) for _, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", next(bar.iter(f"{SVG}path")).get("d", ""))]
        heights.append(max(ys) - min(ys))
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)


def test_a_hidden_series_is_drawn_but_not_displayed_and_its_box_is_empty() -> None:
    chart = chart_of_all()
    styles = {number: {one.get("style") for one in found} for number, found in drawn(chart).items()}
    assert styles == {"0": {None}, "1": {"display:none"}, "2": {None}, "3": {"display:none"}}
    html = templates().from_string(
        '{% from "parts.html.j2" import figure %}{{ figure(chart, 3, "curve", "T & <b>", "note") }}'
    )
    text = html.render(chart=chart)
    boxes = re.findall(r"data-toggles='([\d ]+)'( checked)?", text)
    assert boxes == [("0", " checked"), ("1 3", ""), ("2", " checked")], "a box switches all series of its name"
    assert "id='curve-3'" in text and "aria-label='T &amp; &lt;b&gt;. note'" in text
    assert "a &amp; &lt;b&gt; $x$" in text and "<b>$" not in text and "<b>&" not in text


def test_a_chart_is_the_same_text_whatever_the_readers_settings() -> None:
    first = chart_of_all().svg("curve-0")
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": False, "svg.fonttype": "path"}):
        assert chart_of_all().svg("curve-0") == first
    assert ">a &amp; &lt;b&gt; $x$ $\\frac$</text>" in first, "text stays text, dollar signs too"
    assert "<style" not in first and "<metadata" not in first and "font-family" not in first
    ids = set(re.findall(r' id="([^"]+)"', first))
    assert ids and ids.isdisjoint(re.findall(r' id="([^"]+)"', chart_of_all().svg("curve-1"))), "ids are a figure's own"
    assert set(re.findall(r"#(\w{9,})", first)) <= ids, "what is referred to is there"


@drawing()
def a_picture(title: str, drawn: object, size: float = 2.0) -> str:
    figure = Figure(figsize=(4, 3))
    figure.subplots().plot([1, 2, 3], linewidth=size)
    return picture(figure, title, "below", "in <words>", drawn)


def test_a_picture_is_a_whole_file_with_words_and_colours_for_the_dark() -> None:
    text = a_picture(NAME, [1])
    root = ElementTree.fromstring(text)
    assert root.get("width") == "288" and root.get("viewBox") == "0 0 288 216"
    assert root.findtext(f"{SVG}title") == NAME and root.findtext(f"{SVG}desc") == "in <words>"
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme: dark" in style and '[style*="fill: #1f2328"] { fill: #e6edf3 !important; }' in style
    assert "fill: #1f2328" in text.split("</style>")[1], "the colours that are replaced occur"


def test_a_picture_of_the_same_data_stays_and_one_of_other_data_does_not() -> None:
    """Another version of Matplotlib may write other bytes for the same data."""
    old, other_bytes, other_data = a_picture("t", [1.0]), a_picture("t", [1.0], size=3.0), a_picture("t", [1.5])
    assert other_bytes != old and current_picture(old, other_bytes) == old
    assert current_picture(old, other_data) == other_data and current_picture(old, a_picture("u", [1.0])) != old
    assert current_picture("<svg>of an older version</svg>", old) == old


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_what_is_missing_is_one_line_with_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    templates.cache_clear()
    with pytest.raises(ToolchainMissing, match=f"{package} is not installed") as error:
        svg_content(Figure(), "f") if package == "matplotlib" else templates()
    assert install_hint("report") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("launch", "launch-bound"),
        ("memory_1e9", "memory-bound, 1 to 10 GFLOP"),
        ("compute_1e11", "compute-bound, 0.1 to 1 TFLOP"),
        ("compute_1e10", "compute-bound, 10 to 100 GFLOP"),
        ("another", "another"),
    ],
)
def test_regimes_are_in_words(name: str, words: str) -> None:
    assert regime_words(name) == words


def test_decades_have_metric_prefixes() -> None:
    assert [decade_words(e) for e in (5, 6, 8, 12)] == ["0.1 to 1 M", "1 to 10 M", "0.1 to 1 G", "1 to 10 T"]
    assert decade_words(40) == "1e40 to 1e41 "


@pytest.mark.parametrize(
    ("date", "words"),
    [
        ("2026-01-02", "2 January 2026"),
        ("2026-11-02T03:04:05+00:00", "2 November 2026, 03:04 UTC"),
        ("2026-11-22T00:03:00+00:00; 2026-11-21T20:42:50+00:00", "21 to 22 November 2026"),
        ("2026-11-30T00:00:00Z; 2026-12-01", "30 November 2026 to 1 December 2026"),
        ("2026-11-30; 2026-11-30", "30 November 2026"),
        ("2026-13-01", "2026-13-01"),
        ("now", "now"),
        (None, "None"),
    ],
)
def test_dates_are_in_words(date: object, words: str) -> None:
    assert date_words(date) == words


def test_baselines_are_in_words() -> None:
    assert baseline_words("lt_auto") == "autotuned cuBLASLt" and baseline_words("mine") == "mine"
