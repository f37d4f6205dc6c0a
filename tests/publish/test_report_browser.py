"""The report in a real browser: Debian's headless Chromium, driven through its own chromedriver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from outblas.records.results import read_result, write_result
from outblas_lab.publish.html.tune_page import write_report
from outblas_lab.publish.summary import summarise
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
WIDTHS = (1400, 400)


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


def test_the_large_card_is_the_recorded_geometric_mean(page, report):
    without, with_pdl = summarise(report[0])
    card = page.find_element("css selector", ".card.geomean strong")
    assert card.text == f"{without['geomean']:.3f}×" and card.is_displayed()
    second = page.find_element("css selector", ".card [data-figure=geomean][data-pdl=on]")
    assert second.text == f"{with_pdl['geomean']:.3f}×" and second.is_displayed()


def test_every_chart_is_really_drawn(page):
    drawn = page.execute_script(
        "return [...document.querySelectorAll('.chart')].map(f => {"
        "const p = f.querySelector('.plot'), b = p.querySelector('svg').getBoundingClientRect();"
        "const m = [...f.querySelectorAll('[data-series]')].filter(g => g.style.display !== 'none')"
        ".map(g => g.getBBox());"
        "const ends = [Math.min(...m.map(g => g.x)), Math.max(...m.map(g => g.x + g.width))];"
        "return [f.id, m.length > 0 && m.every(g => g.width > 0) && ends[1] - ends[0] > 300, b.height > 200,"
        " p.getBoundingClientRect().right <= document.documentElement.clientWidth]})"
    )
    assert [d[0] for d in drawn] == ["curve-0", "histogram-0", "decades-0", "roofline-0"]
    assert all(all(rest) for _, *rest in drawn), drawn


def test_the_pointer_shows_the_problem_under_it(page, report):
    """The last point of the curve without PDL is the best row, and its text says so."""
    best = max((r for r in read_result(report[0]).rows if not r["pdl"]), key=lambda r: r["published"])
    text = page.execute_script(
        "const p = document.querySelector('#curve-0 .canvas'), d = p.querySelector('[data-series=\"0\"] path');"
        "p.scrollIntoView({block: 'center'});"
        "p.parentNode.scrollLeft = 1000;"
        "const [x, y] = d.getAttribute('d').match(/[-\\d.]+ [-\\d.]+(?= *$)/)[0].split(' ').map(Number);"
        "const scale = p.offsetWidth / p.querySelector('svg').viewBox.baseVal.width;"
        "const b = p.getBoundingClientRect();"
        "p.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: b.left + x * scale,"
        " clientY: b.top + y * scale}));"
        "const t = document.querySelector('.tip'), r = t.getBoundingClientRect();"
        "return !t.hidden && r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight && t.textContent"
    )
    assert text and text.startswith(f"{best['m']}×{best['n']}×{best['k']}, without PDL: {best['published']:.3f}×")


def test_a_box_of_the_legend_shows_and_hides_its_series(page):
    def shown():
        return page.execute_script(
            "return [...document.querySelectorAll('#roofline-0 [data-series]')].map(g => g.style.display !== 'none')"
        )

    assert shown() == [True, False, False, False, True]
    set_control(page, "#roofline-0 [data-toggles='2']", "checked", True)
    set_control(page, "#roofline-0 [data-toggles='0']", "checked", False)
    assert shown() == [False, False, True, False, True]


def open_every_problem(page):
    page.execute_script("document.querySelector('details.every').open = true")
    page.execute_async_script("const done = arguments[0]; setTimeout(done, 50)")
    return "details.every .box"


def column_of(page, box, number):
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.children[arguments[1]].textContent)",
        *(box, number),
    )


def test_every_row_can_be_searched(page, report):
    rows = read_result(report[0]).rows
    box = open_every_problem(page)
    assert sorted(column_of(page, box, 0)) == sorted(f"{r['m']}×{r['n']}×{r['k']}" for r in rows)
    set_control(page, f"{box} input", "value", "64x512x launch")
    found = column_of(page, box, 0)
    wanted = [r for r in rows if "64×512×" in f"{r['m']}×{r['n']}×{r['k']}" and r["regime"] == "launch"]
    assert wanted and len(found) == len(wanted) and all("64×512×" in text for text in found)
    assert page.find_element("css selector", f"{box} output").text == f"{len(wanted)} of {len(rows)} rows"


def test_a_heading_sorts_its_column_by_number(page, report):
    box = open_every_problem(page)
    for order in ("ascending", "descending"):
        page.execute_script(f"document.querySelectorAll('{box} th button')[2].click()")
        speedups = [float(text.rstrip("×")) for text in column_of(page, box, 2)]
        assert speedups == sorted(speedups, reverse=order == "descending") and len(set(speedups)) > 10
        heading = page.find_element("css selector", f"{box} th:nth-child(3)")
        assert heading.get_attribute("aria-sort") == order


def test_a_table_that_scrolls_says_so(page):
    box = open_every_problem(page)
    cue = page.find_element("css selector", f"{box} .cue")
    assert "more rows" in cue.text
    narrow = page.execute_script("return innerWidth") < 500
    assert ("more columns" in cue.text) or not narrow
    page.execute_async_script(
        f"const s = document.querySelector('{box} .scroll'); s.scrollTo(s.scrollWidth, s.scrollHeight);"
        "setTimeout(arguments[0], 100)"
    )
    assert cue.text == ""


def test_a_chart_that_scrolls_says_so(page):
    cue = page.find_element("css selector", "#curve-0 .cue")
    narrow = page.execute_script("return innerWidth") < 500
    assert ("whole chart" in cue.text) == narrow
    page.execute_async_script(
        "document.querySelector('#curve-0 .plot').scrollLeft = 1000; setTimeout(arguments[0], 100)"
    )
    assert cue.text == ""


def test_nothing_overflows_the_page(page):
    wide, room = page.execute_script(
        "const d = document.documentElement; return [Math.max(d.scrollWidth, document.body.scrollWidth), d.clientWidth]"
    )
    assert wide <= room
    outside = page.execute_script(
        "const w = document.documentElement.clientWidth; return [...document.querySelectorAll("
        "'h1, h2, h3, p, .card, .plot, .scroll, .controls, .copy, .legend, table.small, figcaption')]"
        ".filter(e => e.getBoundingClientRect().right > w + 1).map(e => e.className || e.textContent.slice(0, 30))"
    )
    assert outside == []


def test_text_is_not_cut_off_in_its_card(page):
    cut = page.execute_script(
        "return [...document.querySelectorAll('.card, figcaption, h1, .legend')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    )
    assert cut == []


def test_slider_and_toggle_show_the_chosen_heat_map(page):
    ks = [64, 512, 4096, 16384]
    for index, pdl in ((0, False), (2, False), (2, True), (3, True), (0, True)):
        set_control(page, "[data-k='0']", "value", str(index))
        set_control(page, "[data-pdl-toggle='0']", "checked", pdl)
        shown = page.execute_script(
            "return [...document.querySelectorAll('.heatbox')].filter(m => m.offsetHeight).map(m => m.dataset.at)"
        )
        assert shown == [f"{ks[index]} {'on' if pdl else 'off'}"]
        assert page.find_element("id", "heat-k-0").text == str(ks[index])


def test_the_heat_map_uses_the_width(page):
    wide, room = page.execute_script(
        "return ['.heatbox:not([hidden]) table', 'main h2'].map("
        "s => document.querySelector(s).getBoundingClientRect().width)"
    )
    assert wide > 0.97 * room


def test_the_button_copies_the_line(page):
    page.find_element("css selector", "[data-copy]").click()
    assert page.execute_script("return String(getSelection())") == "import outblas; outblas.enable()"


def test_the_verdict_is_on_the_first_screen(page):
    verdict = page.find_element("css selector", ".verdict")
    assert verdict.is_displayed() and "faster" in verdict.text and verdict.rect["y"] < 200
    assert verdict.rect["y"] + verdict.rect["height"] < 500


def test_the_problem_stays_in_sight_as_a_table_scrolls(page):
    box = open_every_problem(page)
    left = page.execute_script(
        f"const s = document.querySelector('{box} .scroll'); s.scrollLeft = 10000;"
        "return s.querySelector('tbody th').getBoundingClientRect().left - s.getBoundingClientRect().left"
    )
    assert 0 <= left <= 2


def test_a_bar_under_the_pointer_says_how_many_problems_it_has(page):
    texts = page.execute_script(
        "const bar = document.querySelector('#histogram-0 [data-tip]');"
        "bar.scrollIntoView({block: 'center'});"
        "bar.querySelector('path').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));"
        "return [document.querySelector('.tip').textContent, bar.dataset.tip]"
    )
    assert texts[0] == texts[1] and "problems without PDL" in texts[0]


def test_labels_of_charts_are_legible(page):
    """Text of a chart is nowhere below 9 pixels: a chart that is wider than the window scrolls."""
    sizes = page.execute_script(
        "return [...document.querySelectorAll('.plot svg')].map(s => "
        "12 * s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
    )
    assert sizes and min(sizes) >= 8.9, sizes
