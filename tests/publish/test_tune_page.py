"""The page of a bench result or a tune run."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.stats import geomean
from outblas.records.results import Result, read_result, write_result
from outblas_lab.publish.html.heat import heat_level
from outblas_lab.publish.html.page import SEARCHED_ROWS, templates
from outblas_lab.publish.html.run_data import ReportedRun, load_run
from outblas_lab.publish.html.tune_charts import group_charts
from outblas_lab.publish.html.tune_page import render, write_report
from outblas_lab.publish.html.tune_tables import verdict
from outblas_lab.publish.summary import summarise
from outblas_lab.publish.words import regime_words
from support.bench_fixture import META, make_rows, write_bench
from support.gpus.known import H200

RESULTS = Path(__file__).parents[2] / "results" / "h200"


def embedded(html: str) -> dict:
    return json.loads(re.search(r'id="outblas-data">(.*?)</script>', html, re.S).group(1))


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
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=(?![\"']?data:)", page)
    assert "http://" not in page and "https://" not in page


def test_the_full_grid_fits_in_an_attachment(tmp_path):
    """The largest committed result file, and the comparison, have pages of less than 1.5 MB."""
    for name in ("grid1000_tn_fp16_fp32_offline_cold.parquet", "compare.parquet"):
        page = write_report(RESULTS / name, tmp_path / "page.html")
        assert 50_000 < page.stat().st_size < 1_500_000, name


def test_the_embedded_rows_are_the_files_rows(page, rows):
    (group,) = embedded(page)["groups"]
    assert len(group["rows"]) == len(rows)
    for values, row in zip(group["rows"], rows, strict=True):
        got = dict(zip(group["columns"], values, strict=True))
        assert {c: got[c] for c in ("m", "n", "k", "pdl", "fallback")} == {
            c: row[c] for c in ("m", "n", "k", "pdl", "fallback")
        }
        for column in ("baseline_us", "published", "floor_us", "low", "high"):
            assert got[column] == (row[column] and pytest.approx(row[column], rel=1e-5))
        assert got["us"] == pytest.approx(row["baseline_us"] if row["fallback"] else row["ours_us"], rel=1e-5)
        assert (got["kernel"] is None) == row["fallback"] and got["regime"] == regime_words(row["regime"])
        if got["kernel"] is not None:
            assert group["kernels"][got["kernel"]].startswith("sm90_wgmma_gemm")


def figure_of(page, name, pdl):
    return re.search(rf"data-figure='{name}' data-pdl='{pdl}'>([^<]*)<", page).group(1)


def test_cards_and_embedded_summary_are_the_summary_rows(page, bench):
    (group,) = embedded(page)["groups"]
    cards = dict(re.findall(r"<li class='card (\w+)'[^>]*><span>[^<]*</span><strong>([^<]*)</strong>", page))
    assert list(cards) == ["geomean", "flop_weighted", "losses"], "three large cards"
    for got, want in zip(group["summary"], summarise(bench), strict=True):
        assert {k: want[k] for k in got} == got
        texts = {
            "geomean": f"{want['geomean']:.3f}×",
            "flop_weighted": f"{want['flop_weighted']:.3f}×",
            "losses": f"{want['losses']} of 64",
        }
        assert texts == ({name: figure_of(page, name, "on") for name in texts} if want["pdl"] else cards)
        flag = "on" if want["pdl"] else "off"
        assert figure_of(page, "fallbacks", flag) == f"{want['fallbacks']} of 64"
        assert figure_of(page, "min", flag) == f"{want['min']:.3f}×"
        assert figure_of(page, "torch", flag) == f"{want['geomean_torch']:.3f}×"


def run_of(rows, folder):
    write_result(rows, META, folder / "r.parquet")
    return load_run(folder / "r.parquet")


def with_speedups(*speedups):
    rows = make_rows((64, 512), pdls=(False,))[: len(speedups)]
    won = {"status": "passed", "fallback": False, "config": "sm90_wgmma_gemm:"}
    for row, s in zip(rows, speedups, strict=True):
        row |= {**won, "ours_us": row["baseline_us"] / s, "speedup": s, "low": s, "high": s, "published": s}
    return rows


@pytest.mark.parametrize(
    ("speedups", "sentence"),
    [
        ((1.3, 1.05, 1.0, 0.98), "7.5% faster than RIVALS on average (geometric mean); 2 faster, 1 level, 1 slower."),
        ((0.9, 0.95, 1.02), "4.5% slower than RIVALS on average (geometric mean); 1 faster, 0 level, 2 slower."),
        ((1.004, 0.999), "level (1.001×) with RIVALS on average (geometric mean); 0 faster, 2 level, 0 slower."),
        ((0.996,), "level (0.996×) with RIVALS on average (geometric mean); 0 faster, 1 level, 0 slower."),
    ],
)
def test_the_verdict_says_a_win_a_loss_and_a_draw(speedups, sentence, tmp_path):
    run = run_of(with_speedups(*speedups), tmp_path)
    (said,) = verdict(run.groups[0], "NVIDIA H200")
    problems = f"{len(speedups)} problem{'s' if len(speedups) > 1 else ''} on NVIDIA H200, without PDL: "
    assert said == problems + sentence.replace("RIVALS", "the fastest of torch, cuBLAS and autotuned cuBLASLt")
    page = render(run)
    assert page.index(sentence.split(" on average ")[1]) < page.index("class='card"), "it opens the page"
    assert "programmatic dependent launch" not in page.split("class='card")[0], "no word of an absent launch option"


def test_the_verdict_has_both_launch_options(page, bench):
    opening = re.search(r"<p class='verdict'>(.*?)</p>", page, re.S).group(1)
    for pdl in (False, True):
        speedups = [row["published"] for row in read_result(bench).rows if row["pdl"] is pdl]
        faster, slower = sum(s > 1 / 0.99 for s in speedups), sum(s < 0.99 for s in speedups)
        name = f"The same with PDL: {100 * (geomean(speedups) - 1):.1f}% faster;" if pdl else "64 problems on "
        assert name in opening and f"{faster} faster, {64 - faster - slower} level, {slower} slower." in opening
    assert slower > 0, "a loss is said"
    assert page.index("programmatic dependent launch") < page.index("class='card"), "PDL is explained at its first use"


def test_every_group_has_its_verdict(tmp_path):
    rows = with_speedups(1.2, 1.2)
    run = run_of(rows + [{**row, "layout": "NN"} for row in with_speedups(0.9, 0.9)], tmp_path)
    found = re.findall(r"<p class='verdict'>(\w\w) · fp16.*?(\d+\.\d% \w+) than", render(run))
    assert found == [("NN", "10.0% slower"), ("TN", "20.0% faster")]


def test_definitions_stand_at_the_end(page):
    terms = re.findall(r"<dt>(.*?)</dt>", page)
    assert {"Speed-up", "PDL", "TN, NN", "Floor", "FLOP-weighted mean", "Regime", "Loss"} <= set(terms)
    assert page.index("class='card") < page.index("Every problem") < page.index("<dt>")
    floor = re.search(r"<dt>Floor</dt><dd>(.*?)</dd>", page, re.S).group(1)
    assert f"{H200.tflops:g} TFLOP/s" in floor and f"{H200.hbm_tbs:g} TB/s" in floor and "more than 100%" in floor


def test_charts_hold_the_recorded_numbers(rows):
    group = ReportedRun(Result("", META, rows)).groups[0]
    made = group_charts(group, "NVIDIA H200")
    assert set(made) == {"curve", "histogram", "decades", "roofline"}
    for pdl, curve, histogram in zip((False, True), made["curve"].series, made["histogram"].series, strict=True):
        mine = [r for r in rows if r["pdl"] is pdl]
        line = list(curve.artists[0].get_ydata())
        assert line == sorted(r["published"] for r in mine)
        assert [group.rows[i]["published"] for i in curve.rows] == line
        bars = [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_height()) for bar in histogram.artists]
        assert sum(height for *_, height in bars) == len(mine)
        logs = [math.log2(r["published"]) for r in mine]
        for left, right, height in bars:  # a launch option has its half of a bin
            low, high = (left, right * right / left) if not pdl else (left * left / right, right)
            assert height == sum(math.log2(low) - 1e-9 <= v < math.log2(high) - 1e-9 for v in logs)
        assert [tip.split()[0] for tip in histogram.tips] == [f"{height:g}" for *_, height in bars]
    ends = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for s in made["histogram"].series for bar in s.artists)
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(ends)), "no bar lies over another one"
    roof = {s.name: s.artists[0].get_ydata() for s in made["roofline"].series}
    ours = [r for r in rows if r["pdl"]]
    assert roof["OutBLAS with PDL"] == pytest.approx(
        [Problem.from_json(r).flops / (r["baseline_us"] if r["fallback"] else r["ours_us"]) / 1e6 for r in ours]
    )
    once = [r for r in rows if not r["pdl"]]
    assert roof["best baseline"] == pytest.approx([Problem.from_json(r).flops / r["baseline_us"] / 1e6 for r in once])


def test_the_roofline_shows_one_set_of_dots_until_asked(rows):
    drawn = group_charts(ReportedRun(Result("", META, rows)).groups[0], "NVIDIA H200")["roofline"].series
    assert [s.name for s in drawn if s.shown] == ["OutBLAS without PDL", "roof of memory and arithmetic"]
    assert {"OutBLAS with PDL", "best baseline", "floor"} == {s.name for s in drawn if not s.shown}


def test_decade_bars_are_the_summarys(rows, bench):
    chart = group_charts(ReportedRun(Result("", META, rows)).groups[0], "NVIDIA H200")["decades"]
    for bars, want in zip(chart.series, summarise(bench), strict=True):
        parts = want["by_decade"].values()
        ends = [(bar.get_y(), bar.get_y() + bar.get_height()) for bar in bars.artists]
        assert ends == [(1.0, pytest.approx(part["geomean"])) for part in parts]
        assert [tip.split("×")[0] for tip in bars.tips] == [f"{part['geomean']:.3f}" for part in parts]
        assert len(chart.axes.get_xticks()) == len(want["by_decade"])
    assert all(label.get_text().endswith("FLOP") for label in chart.axes.get_xticklabels())


def test_heat_maps_have_every_row_once(page, rows):
    cells = {}
    for place, text in re.findall(r"data-at='(\d+ \w+)'.*?<table(.*?)</table>", page, re.S):
        k, pdl = place.split()
        ns = [int(n) for n in re.findall(r"<th scope='col'>(\d+)</th>", text)]
        for m, line in re.findall(r"<tr><th scope='row'>(\d+)</th>(.*?)</tr>", text):
            for n, cell in zip(ns, re.findall(r"<td class='h\d+' data-row='\d+'>(.*?)</td>", line), strict=True):
                cells[int(m), n, int(k), pdl == "on"] = cell
    assert cells == {(r["m"], r["n"], r["k"], r["pdl"]): f"{r['published']:.2f}" for r in rows}
    assert len(re.findall(r"class='scroll heatbox'[^>]*hidden", page)) == 2 * 4 - 1, "one is shown"


@pytest.mark.parametrize("published", [0.5, 0.8, 0.97, 1.0, 1.3, 1.9])
def test_the_heat_scale_is_symmetric_about_one(published):
    assert heat_level(published, 2.0) == -heat_level(1 / published, 2.0)
    assert (heat_level(published, 2.0) < 0) == (published < 0.966)
    assert abs(heat_level(published, 1.1)) <= 10


def test_problems_without_a_grid_have_no_heat_map(tmp_path):
    rows = [{**r, "k": r["k"] + i} for i, r in enumerate(make_rows((64, 512), pdls=(False,)))]
    write_result(rows, META, tmp_path / "r.parquet")
    assert "no heat map is drawn" in render(load_run(tmp_path / "r.parquet"))


@pytest.mark.parametrize(("kept", "drawn"), [(40, True), (20, False)])
def test_a_heat_map_that_would_be_mostly_empty_is_not_drawn(kept, drawn, tmp_path):
    rows = [r for r in make_rows(pdls=(False,)) if r["k"] != 64]  # 48 problems of three K
    chosen = [rows[(7 * i) % len(rows)] for i in range(kept)]
    html = render(run_of(chosen, tmp_path))
    assert ("no heat map is drawn" not in html) == ("class='heat'" in html) == drawn


def test_top_wins_are_the_fastest_problems_with_their_kernels(page, rows):
    wins = re.search(r"The 10 problems with the largest.*?</table>", page, re.S).group(0)
    listed = re.findall(r"<th scope='row'>(.*?)</th><td class='text'>(on|off)</td><td>(.*?)×</td>", wins)
    best = {}
    for r in rows:
        best[r["m"], r["n"], r["k"]] = max(r["published"], best.get((r["m"], r["n"], r["k"]), 0))
    assert [float(x) for *_, x in listed] == [round(v, 3) for v in sorted(best.values(), reverse=True)[:10]]
    assert len({problem for problem, *_ in listed}) == 10
    assert wins.count("sm90_wgmma_gemm 128x128") == 10


def test_a_page_has_a_line_that_uses_the_library(tmp_path, page):
    assert "outblas.enable()" in page and "use_library" not in page
    run_directory(tmp_path, {"agent": "random"})
    assert "use_library" not in render(load_run(tmp_path)), "the run has no library"
    (tmp_path / "library.json").write_text("{}")
    line = f"import outblas; outblas.use_library(&#34;{tmp_path.as_posix()}/library.json&#34;)"
    assert line in render(load_run(tmp_path))


def test_long_tables_are_searched_and_short_ones_are_not(page):
    boxes = re.findall(r"<div class='box( searched)?'[^>]*><div[^>]*aria-label='(\S+)", page)
    assert [name for searched, name in boxes if searched] == ["All"]
    for count in (SEARCHED_ROWS - 1, SEARCHED_ROWS):
        table = templates().get_template("parts.html.j2").module.table
        made = table("Fall-backs", ("Problem",), [(i,) for i in range(count)])
        assert ("class='box searched'" in made) == (count == SEARCHED_ROWS)


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
    outline.feed(page)
    assert outline.stack == [] and outline.lang == "en"
    assert outline.levels[0] == 1 and outline.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(outline.levels))
    assert outline.tables == outline.captions == 7 + 2 * 4 and outline.bare == 0


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
    assert "<img" not in html
    data = embedded(html)
    (group,) = data["groups"]
    assert data["suite"] == evil and group["rows"][0][group["columns"].index("baseline")] == evil


def test_a_replays_library_is_offered_for_a_bench_first(tmp_path):
    run = {"device": "replay:h200", "recording": {"provenance": {"commit": f"{'a1b2c3d4' * 5}; 1dff4da"}}}
    path = run_directory(tmp_path, run)
    (path / "library.json").write_text("{}")
    html = render(load_run(path))
    use = html.split("<h2 id='use'>")[1].split("</section>")[0]
    assert "nothing was timed here" in use and "<code>outblas bench --library</code>" in use and "use_library" in use
    table = html.split("Where these figures come from</span>")[1]
    facts = dict(re.findall(r"<th scope='row'>(.*?)</th><td[^>]*>(.*?)</td>", table))
    assert {f"recorded: {name}" for name in ("gpu", "driver", "toolchain", "date", "commit")} < set(facts)
    assert "command" in facts and facts["recording: commit"] == "a1b2c3d; 1dff4da", "commits are equally long"


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
    assert "replayed recorded measurements of Recorded GPU, 31 December 1999" in html
    assert "Nothing was timed" in html and "Measured on" not in html
    assert "Selection bias" in html and "the search chose" in html and "run: agent" in html


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
    table = render(load_run(tmp_path)).split("Where these figures come from</span>")[1]
    facts = dict(re.findall(r"<th scope='row'>(.*?)</th><td[^>]*>(.*?)</td>", table))
    assert facts["toolchain"] == "nvrtc 13.0, torch 2.11" and facts["run: agent"] == "random"
    assert facts["run: problems"] == "TN_fp16_fp32"
    assert [f for f in facts if f.startswith("recording")] == ["recording: name", "recording: command"]
    assert facts["recording: command"] == "the recorder" and "{" not in "".join(facts.values())


def test_a_time_of_day_is_readable(tmp_path):
    provenance = {**META["provenance"], "date": "2026-01-02T03:04:05+00:00"}
    write_result(make_rows((64,)), {**META, "provenance": provenance}, tmp_path / "r.parquet")
    assert "Measured on NVIDIA H200 (test fixture), 2 January 2026, 03:04 UTC." in render(
        load_run(tmp_path / "r.parquet")
    )


def test_a_live_run_does_not_claim_a_replay(tmp_path, page):
    html = render(load_run(run_directory(tmp_path, {"device": "cuda:0"})))
    assert "replayed" not in html and "Measured on NVIDIA H200" in html
    assert "replayed" not in page and "the search chose" not in page


def test_a_replayed_result_file_says_so_without_its_run(tmp_path):
    write_result(make_rows((64,)), {**META, "device": "replay:h200"}, tmp_path / "r.parquet")
    html = render(load_run(tmp_path / "r.parquet"))
    assert "replayed recorded measurements of NVIDIA H200 (test fixture), 2 January 2000" in html


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
    assert html.count("<section") == 5 and "data-pdl-toggle" not in html.split("outblas-data")[0]
    assert [set(g["figures"]) for g in embedded(html)["groups"]] == [
        {"curve", "histogram", "decades", "roofline"},
        {"curve", "histogram", "decades"},
    ]


def test_a_gpu_without_a_record_has_no_roof(rows):
    group = ReportedRun(Result("", META, rows)).groups[0]
    names = [s.name for s in group_charts(group, "GPU of tomorrow")["roofline"].series]
    assert "floor" in names and not any("roof" in name for name in names)


def test_constant_weights_are_named_and_defined(tmp_path):
    write_result([{**r, "early": True} for r in make_rows((64, 512), pdls=(True,))], META, tmp_path / "r.parquet")
    html = render(load_run(tmp_path / "r.parquet"))
    assert "<small>with constant weights</small>" in html and "<dt>Constant weights</dt>" in html
    assert "<th scope='col'>with constant weights</th>" in html
