from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.publish.html.figures import group_figures
from outblas.publish.html.run_data import ReportedRun, load_run
from outblas.publish.html.tune_page import render, write_report
from outblas.publish.palette import ratio_ticks
from outblas.publish.tables.publish_results import BEGIN, END, NCU_BEGIN, NCU_END, check_published, publish
from outblas.records.results import Result, read_result, write_result
from outblas.records.summary import summarise
from support.bench_fixture import META, make_rows, write_bench


def embedded(html: str) -> dict:
    return json.loads(re.search(r'id="outblas-data">(.*?)</script>', html, re.S).group(1))


def without_plotly(html: str) -> str:
    """The page less its largest script, which is Plotly's own text."""
    return html.replace(max(re.findall(r"<script>(.*?)</script>", html, re.S), key=len), "")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "grid.parquet"
    write_bench(path)
    return path


@pytest.fixture(scope="module")
def page(bench):
    return write_report(bench, bench.with_suffix(".html")).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(bench):
    return read_result(bench).rows


def test_the_page_is_one_file_that_asks_for_nothing(page):
    body = without_plotly(page)
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in body
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=(?![\"']?data:)", body)
    assert "http://" not in body and "https://" not in body


def test_the_embedded_rows_are_the_files_rows(page, rows):
    (group,) = embedded(page)["groups"]
    assert [dict(zip(group["columns"], row, strict=True)) for row in group["rows"]] == [
        {c: r[c] for c in group["columns"]} for r in rows
    ]


def test_cards_and_embedded_summary_are_the_summary_rows(page, bench):
    (group,) = embedded(page)["groups"]
    for got, want in zip(group["summary"], summarise(bench), strict=True):
        assert {k: want[k] for k in got} == got
        flag = "on" if want["pdl"] else "off"
        for name, text in (
            ("geomean", f"{want['geomean']:.3f}×"),
            ("flop_weighted", f"{want['flop_weighted']:.3f}×"),
            ("losses", f"{want['losses']} of 64"),
            ("fallbacks", f"{want['fallbacks']} of 64"),
        ):
            assert f"data-figure='{name}' data-pdl='{flag}'><strong>{text}</strong>" in page


def test_figures_hold_the_recorded_numbers(page, rows):
    made = embedded(page)["groups"][0]["figures"]
    for pdl, curve, bars in zip((False, True), made["curve"]["data"], made["histogram"]["data"], strict=True):
        mine = [r for r in rows if r["pdl"] is pdl]
        assert curve["y"] == sorted(r["published"] for r in mine)
        assert sum(bars["y"]) == len(mine)
        edges = [(x - bars["width"] / 2, x + bars["width"] / 2) for x in bars["x"]]
        logs = [math.log2(r["published"]) for r in mine]
        assert bars["y"] == [sum(low - 1e-9 <= v < high - 1e-9 for v in logs) for low, high in edges]
    cells = {
        (int(m), int(n), trace["meta"]["k"], trace["meta"]["pdl"]): trace["customdata"][i][j]
        for trace in made["heat"]["data"]
        for i, m in enumerate(trace["y"])
        for j, n in enumerate(trace["x"])
    }
    assert cells == {(r["m"], r["n"], r["k"], r["pdl"]): [r["published"], r["fallback"]] for r in rows}
    roof = {t["name"]: t for t in made["roofline"]["data"]}
    ours = [r for r in rows if r["pdl"]]
    assert roof["OutBLAS with PDL"]["y"] == pytest.approx(
        [Problem.from_json(r).flops / (r["baseline_us"] if r["fallback"] else r["ours_us"]) / 1e6 for r in ours]
    )
    once = [r for r in rows if not r["pdl"]]
    assert roof["best baseline"]["y"] == pytest.approx(
        [Problem.from_json(r).flops / r["baseline_us"] / 1e6 for r in once]
    )


def test_decade_bars_and_the_torch_card_are_the_summarys(page, bench):
    bars = embedded(page)["groups"][0]["figures"]["decades"]["data"]
    for bar, want in zip(bars, summarise(bench), strict=True):
        assert dict(zip(bar["x"], bar["customdata"], strict=True)) == {
            name: [part["geomean"], part["n"]] for name, part in want["by_decade"].items()
        }
        assert bar["y"] == pytest.approx([mean - 1 for mean, _ in bar["customdata"]])
        flag = "on" if want["pdl"] else "off"
        assert f"data-figure='torch' data-pdl='{flag}'><strong>{want['geomean_torch']:.3f}×</strong>" in page


def test_the_heat_scale_is_symmetric_about_one(page):
    for trace in embedded(page)["groups"][0]["figures"]["heat"]["data"]:
        assert trace["zmid"] == 0 and trace["zmin"] == -trace["zmax"]
        for line, cells in zip(trace["z"], trace["customdata"], strict=True):
            assert line == [math.log2(cell[0]) for cell in cells]


def test_plotly_accepts_every_figure(page):
    go = pytest.importorskip("plotly.graph_objects")
    made = embedded(page)["groups"][0]["figures"]
    assert set(made) == {"curve", "histogram", "heat", "decades", "roofline"}
    for figure in made.values():
        go.Figure(data=figure["data"], layout=figure["layout"])


def test_every_loss_and_every_fallback_is_listed(page, rows):
    for caption, wanted in (
        ("Losses", [r for r in rows if r["published"] < 0.99]),
        ("Fall-backs", [r for r in rows if r["fallback"]]),
    ):
        assert wanted, "the fixture has some of each"
        table = re.search(rf"<caption><span>{caption}: {len(wanted)} of 128 .*?</table>", page, re.S).group(0)
        listed = re.findall(r"<tr><th scope='row'>(.*?)</th><td class='text'>(on|off)</td>", table)
        assert sorted(listed) == sorted((f"{r['m']}×{r['n']}×{r['k']}", "on" if r["pdl"] else "off") for r in wanted)


def test_no_losses_is_said_in_words(tmp_path):
    rows = [r for r in make_rows((64,)) if r["published"] >= 0.99 and not r["fallback"]]
    write_result(rows, META, tmp_path / "r.parquet")
    html = render(load_run(tmp_path / "r.parquet"))
    assert "Losses: none of 2 rows" in html and "Fall-backs: none of 2 rows" in html


class Outline(HTMLParser):
    """Heading levels, tables without caption and header cells without scope, unclosed tags."""

    def __init__(self):
        super().__init__()
        self.levels, self.tables, self.captions, self.bare, self.lang, self.stack = [], 0, 0, 0, None, []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.lang = attrs.get("lang", self.lang)
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        self.tables += tag == "table"
        self.captions += tag == "caption"
        self.bare += tag == "th" and "scope" not in attrs
        if tag not in ("meta", "link", "input"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_page_is_outlined_and_its_tables_captioned(page):
    outline = Outline()
    outline.feed(without_plotly(page))
    assert outline.stack == [] and outline.lang == "en"
    assert outline.levels[0] == 1 and outline.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(outline.levels, outline.levels[1:], strict=False))
    assert outline.tables == outline.captions == 4 and outline.bare == 0


def test_hostile_text_is_escaped_everywhere(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>&\"'\u2028"
    rows = make_rows((64, 128), seed=3)
    for row in rows:
        row |= {"baseline": evil, "baseline_detail": evil, "regime": "launch"}
        row["config"] = row["config"] and evil
    meta = {"suite": evil, "provenance": {key: evil for key in META["provenance"]}}
    write_result(rows, meta, tmp_path / "result.parquet")
    (tmp_path / "run.json").write_text(json.dumps({"agent": evil, evil: [evil]}))
    html = render(load_run(tmp_path))
    assert "<img" not in without_plotly(html)
    data = embedded(html)
    assert data["suite"] == evil and data["groups"][0]["rows"][0][8] == evil
    assert not any("<img" in text for t in data["groups"][0]["figures"]["curve"]["data"] for text in t["text"])


def run_directory(tmp_path, run):
    rows = [{**r, "sm_clock_mhz": None, "temperature_c": None} for r in make_rows((64, 512))]
    write_result(rows, META, tmp_path / "result.parquet")
    (tmp_path / "run.json").write_text(json.dumps(run))
    return tmp_path


def test_a_replay_says_so_plainly(tmp_path):
    run = {
        "agent": "random",
        "device": "replay:h200",
        "recording": {"name": "h200", "provenance": {"gpu": "Recorded GPU", "date": "1999-12-31"}},
    }
    html = render(load_run(run_directory(tmp_path, run)))
    assert "replayed recorded measurements of Recorded GPU, 1999-12-31" in html
    assert "Nothing was timed" in html and "Measured on" not in html
    assert "Selection bias" in html and "chosen by" in html and "run: agent" in html


def test_provenance_is_in_words_and_says_nothing_twice(tmp_path):
    toolchain = {"nvrtc": "13.0", "torch": "2.11"}
    measured = {**META["provenance"], "toolchain": toolchain}
    run = {
        **{"format": 1, "kind": "tune", "agent": "random", "problems": ["TN_fp16_fp32"]},
        **{
            "provenance": measured,
            "recording": {"name": "h200", "provenance": {**measured, "command": "the recorder"}},
        },
    }
    write_result(make_rows((64,)), {**META, "provenance": measured}, tmp_path / "result.parquet")
    (tmp_path / "run.json").write_text(json.dumps(run))
    table = without_plotly(render(load_run(tmp_path))).split("Where these figures come from</span>")[1]
    facts = dict(re.findall(r"<th scope='row'>(.*?)</th><td[^>]*>(.*?)</td>", table))
    assert facts["toolchain"] == "nvrtc 13.0, torch 2.11" and facts["run: agent"] == "random"
    assert facts["run: problems"] == "TN_fp16_fp32"
    assert [f for f in facts if f.startswith("recording")] == ["recording: name", "recording: command"]
    assert facts["recording: command"] == "the recorder" and "{" not in "".join(facts.values())


def test_a_time_of_day_is_readable(tmp_path):
    provenance = {**META["provenance"], "date": "2026-01-02T03:04:05+00:00"}
    write_result(make_rows((64,)), {**META, "provenance": provenance}, tmp_path / "r.parquet")
    assert "Measured on Synthetic H200 (test fixture), 2026-01-02 03:04 UTC." in render(
        load_run(tmp_path / "r.parquet")
    )


def test_a_live_run_does_not_claim_a_replay(tmp_path, page):
    html = render(load_run(run_directory(tmp_path, {"device": "cuda:0"})))
    assert "replayed" not in without_plotly(html) and "Measured on Synthetic H200" in html
    assert "replayed" not in without_plotly(page) and "chosen by" not in page


def test_a_replayed_result_file_says_so_without_its_run(tmp_path):
    write_result(make_rows((64,)), {**META, "device": "replay:h200"}, tmp_path / "r.parquet")
    html = render(load_run(tmp_path / "r.parquet"))
    assert "replayed recorded measurements of Synthetic H200 (test fixture), 2000-01-02" in html


def test_a_run_that_is_not_finished_or_damaged_is_one_line(tmp_path):
    with pytest.raises(RecordError, match=r"no result\.parquet"):
        write_report(tmp_path, tmp_path / "out.html")
    run_directory(tmp_path, {})
    for text in ("{", "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RecordError) as error:
            write_report(tmp_path, tmp_path / "out.html")
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out.html").exists()


def test_one_pdl_one_k_and_several_groups_are_all_shown(tmp_path):
    rows = make_rows((64,), pdls=(False,))
    rows += [{**r, "mode": "server"} for r in rows]
    run = ReportedRun(
        Result(tmp_path, META, [dict.fromkeys(("low", "high", "sm_clock_mhz", "temperature_c")) | r for r in rows])
    )
    assert [g.mode for g in run.groups] == ["offline", "server"]
    html = render(run)
    assert html.count("<section") == 4 and "data-pdl-toggle" not in html.split("outblas-data")[0]
    assert [set(g["figures"]) for g in embedded(html)["groups"]] == [
        {"curve", "histogram", "heat", "decades", "roofline"},
        {"curve", "histogram", "heat", "decades"},
    ]


def test_a_gpu_without_a_record_has_no_roof(rows):
    group = ReportedRun(Result("", META, rows)).groups[0]
    names = [t["name"] for t in group_figures(group, "GPU of tomorrow")["roofline"]["data"]]
    assert "floor" in names and not any("roof" in name for name in names)


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
