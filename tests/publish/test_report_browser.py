"""The report in a real browser: Debian's headless Chromium, driven through its own chromedriver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from outblas.core.problem import Problem
from outblas.publish.html.tune_page import write_report
from outblas.records.results import read_result, write_result
from outblas.records.summary import summarise
from support.bench_fixture import META, make_rows

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver (apt-get install chromium chromium-driver)"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    write_result(make_rows(), META, directory / "grid.parquet")
    return directory / "grid.parquet", write_report(directory / "grid.parquet", directory / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[webdriver.Chrome]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(params=WIDTHS)
def page(request, browser, report):
    """The loaded page at one width, its charts drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    size = {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(report[1].as_uri())
    WebDriverWait(browser, 60).until(
        lambda b: b.execute_script("return document.documentElement.dataset.ready") == "true"
    )
    return browser


def traces(page, name):
    """What Plotly holds of a chart after drawing it, as plain JSON."""
    return page.execute_script(
        "return JSON.parse(JSON.stringify(document.getElementById(arguments[0]).data.map("
        "t => ({name: t.name, x: t.x, y: t.y, z: t.z, customdata: t.customdata, meta: t.meta, visible: t.visible}))))",
        f"{name}-0",
    )


def set_control(page, selector, name, value):
    page.execute_async_script(
        "const [s, n, v, done] = arguments; const e = document.querySelector(s); e[n] = v;"
        "e.dispatchEvent(new Event(n === 'value' ? 'input' : 'change'));"
        "requestAnimationFrame(() => requestAnimationFrame(done));",
        *(selector, name, value),
    )


def test_no_console_message_and_no_request_but_the_file(page, report):
    assert page.get_log("browser") == []
    sent = [e["message"] for e in page.get_log("performance") if '"Network.requestWillBeSent"' in e["message"]]
    urls = {part.split('"')[0] for m in sent for part in m.split('"url":"')[1:]}
    assert urls and all(u == report[1].as_uri() or u.startswith(("data:", "blob:")) for u in urls), urls


def test_the_drawn_figures_are_the_recorded_ones(page, report):
    rows = read_result(report[0]).rows
    for summary in summarise(report[0]):
        flag = "on" if summary["pdl"] else "off"
        card = page.find_element("css selector", f"[data-figure=geomean][data-pdl={flag}] strong")
        assert card.text == f"{summary['geomean']:.3f}×" and card.is_displayed()
    for pdl, trace in zip((False, True), traces(page, "curve"), strict=True):
        assert trace["y"] == sorted(r["published"] for r in rows if r["pdl"] is pdl)
    assert [sum(t["y"]) for t in traces(page, "histogram")] == [64, 64]
    cells = {
        (int(m), int(n), trace["meta"]["k"], trace["meta"]["pdl"]): trace["customdata"][i][j][0]
        for trace in traces(page, "heat")
        for i, m in enumerate(trace["y"])
        for j, n in enumerate(trace["x"])
    }
    assert cells == {(r["m"], r["n"], r["k"], r["pdl"]): r["published"] for r in rows}
    roof = {t["name"]: t["y"] for t in traces(page, "roofline")}
    assert roof["best baseline"] == pytest.approx(
        [Problem.from_json(r).flops / r["baseline_us"] / 1e6 for r in rows if not r["pdl"]]
    )


def test_every_chart_is_really_drawn(page):
    drawn = page.execute_script(
        "return [...document.querySelectorAll('.plot')].map(p => {"
        "const b = p.querySelector('.main-svg').getBoundingClientRect();"
        "return [p.id, p.querySelectorAll('.scatterlayer path, .barlayer path, .heatmaplayer image').length,"
        " b.width <= p.getBoundingClientRect().width + 1 && b.height > 200]})"
    )
    assert [d[0] for d in drawn] == ["curve-0", "histogram-0", "heat-0", "roofline-0", "decades-0"]
    assert all(marks > 0 and fits for _, marks, fits in drawn), drawn


def test_nothing_overflows_the_page(page):
    wide, room = page.execute_script(
        "const d = document.documentElement; return [Math.max(d.scrollWidth, document.body.scrollWidth), d.clientWidth]"
    )
    assert wide <= room
    outside = page.execute_script(
        "const w = document.documentElement.clientWidth; return [...document.querySelectorAll("
        "'h1, h2, h3, p, .card, .plot, .scroll, .controls, figcaption')]"
        ".filter(e => e.getBoundingClientRect().right > w + 1).map(e => e.className || e.textContent.slice(0, 30))"
    )
    assert outside == []


def test_text_is_not_cut_off_in_its_card(page):
    cut = page.execute_script(
        "return [...document.querySelectorAll('.card, figcaption, h1')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    )
    assert cut == []


def test_slider_and_toggle_show_the_chosen_heat_map(page):
    ks = [64, 512, 4096, 16384]
    for index, pdl in ((0, False), (2, False), (2, True), (3, True), (0, True)):
        set_control(page, "[data-k='0']", "value", str(index))
        set_control(page, "[data-pdl-toggle='0']", "checked", pdl)
        shown = [t["meta"] for t in traces(page, "heat") if t["visible"] is True]
        assert shown == [{"k": ks[index], "pdl": pdl}]
        assert page.find_element("id", "heat-k-0").text == str(ks[index])
