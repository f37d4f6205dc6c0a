"""Charts as SVG, and the words of the pages."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from outblas_lab.publish.html.charts import Axis, Chart, Series, chart_html, svg
from outblas_lab.publish.html.figures import round_ticks
from outblas_lab.publish.words import baseline_words, date_words, decade_words, regime_words

X, Y = Axis("x", 0, 10, [(0, "0"), (5, "5")]), Axis("y (s)", 1, 100, [(1, "1"), (10, "10")], log=True)


def series_of(chart: Chart) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg(chart, "title & <b>"))
    assert root.get("aria-label") == "title & <b>"
    return [g for g in root if g.get("data-series")]


def drawn(kind: str, **more: object) -> ElementTree.Element:
    one = Series("s", kind, "#123456", x=[0, 5, 10], y=[1, 10, 100], **more)  # type: ignore[arg-type]
    (group,) = series_of(Chart(X, Y, [one]))
    return group


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_a_line_and_dots_lie_at_their_values() -> None:
    for kind in ("line", "dots", "rings"):
        assert points(drawn(kind)[0].get("d")) == [(0, 1000), (500, 500), (1000, 0)]


def test_a_gap_starts_a_new_piece() -> None:
    chart = Chart(X, Y, [Series("s", "line", "red", x=[0, 5, 5, 10], y=[1, 10, None, 100])])
    assert re.sub(r"[^ML]", "", series_of(chart)[0][0].get("d")) == "MLM"


def test_steps_go_along_before_they_go_up() -> None:
    assert drawn("steps")[0].get("d") == "M0.0 1000.0H500.0V500.0H1000.0V0.0"


def test_a_bar_reaches_from_its_base_to_its_value_and_has_its_tip() -> None:
    rects = list(drawn("bars", base=[10, 10, 10], bar_width=2, tips=["a", "<b>", "c"]))
    got = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in rects]
    assert got == [(-100, 500, 200, 500), (400, 500, 200, 0), (900, 0, 200, 500)]
    assert [r.get("data-tip") for r in rects] == ["a", "<b>", "c"]


def test_a_band_goes_there_along_the_top_and_back_along_the_base() -> None:
    path = drawn("band", base=[1, 1, 10])[0]
    assert points(path.get("d")) == [(0, 1000), (500, 500), (1000, 0), (1000, 500), (500, 1000), (0, 1000)]
    assert path.get("class") == "band"


def test_a_hidden_series_is_drawn_but_not_displayed_and_its_box_is_empty() -> None:
    series = [Series(n, "line", "red", [0, 1], [1, 2], shown=n == "a", named=n != "c") for n in "abc"]
    html = chart_html(Chart(X, Y, series), 3, "curve", "T", "note & more")
    assert re.findall(r"data-series='(\d)'( style='display:none')?", html) == [
        ("0", ""),
        ("1", " style='display:none'"),
        ("2", " style='display:none'"),
    ]
    assert re.findall(r"data-toggles='(\d)'( checked)?", html) == [("0", " checked"), ("1", "")]
    assert "id='curve-3'" in html and "note &amp; more" in html and "y (s)" in html


def test_ticks_stand_at_their_values() -> None:
    html = chart_html(Chart(X, Y, []), 0, "n", "T", "")
    assert re.findall(r"class='xt' style='left:([\d.]+)%'>(\d+)", html) == [("0.00", "0"), ("50.00", "5")]
    assert re.findall(r"class='yt' style='top:([\d.]+)%'>(\d+)", html) == [("100.00", "1"), ("50.00", "10")]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7.3), (0.8, 1.0), (0, 900), (-3, 12)])
def test_round_ticks_are_few_and_within(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert 3 <= len(ticks) <= 8 and ticks == sorted(ticks)
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)


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
    assert baseline_words("lt_auto") == "cuBLASLt, autotuned" and baseline_words("mine") == "mine"
