"""The tables of live comparisons: only from result files that a GPU measured, one for each GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outblas.core.errors import RecordError
from outblas.publish.html.tune_page import write_report
from outblas.publish.tables.live_block import NOT_MEASURED
from outblas.publish.tables.publish_results import check_published, publish
from outblas.search.live_compare.live_result import COLUMNS, LiveResult, read_live, write_live
from outblas.search.live_compare.live_tables import table_rows
from support.bench_fixture import PROVENANCE, write_bench

PAGE = "docs/search/compare-live.md"
SAME = {"ppo@pool": 1.10, "regressor@pool": 1.08, "random-legal@pool": 0.9}
NATIVE = {"regressor@catalogue": 1.12, "regressor@pool": 1.08, "random-legal@knobs": 0.8}
BUDGETS = (4, 8)


def made_live(path: Path, gpu: str, rehearsal: bool = False) -> LiveResult:
    rows: list[dict[str, Any]] = []
    levels = SAME | NATIVE
    for place, problem in enumerate(
        ("64_4096_64_TN_fp16_fp32", "4096_4096_4096_TN_fp16_fp32", "8_512_512_TN_fp16_fp32")
    ):
        for arm, level in levels.items():
            for budget in BUDGETS:
                speedup = level * (1 + 0.01 * place) * (1 - 0.1 / budget)
                agent, _, space = arm.partition("@")
                figures = (speedup, speedup * 0.99, speedup * 1.01, speedup / 1.2, 10 / speedup)
                values = (
                    arm,
                    agent,
                    space,
                    0,
                    problem,
                    "launch",
                    budget,
                    budget,
                    "kernel",
                    True,
                    *figures,
                    "lt_auto",
                    10.0,
                )
                rows.append(dict(zip(COLUMNS, values, strict=True)))
    meta = {
        "provenance": {**PROVENANCE, "gpu": gpu, "commit": "1111111"}, "gpu": "h200", "device": "cuda:0",
        "rehearsal": rehearsal, "same": list(SAME), "native": list(NATIVE), "space": "pool", "budgets": list(BUDGETS),
        "seeds": 3, "problem_seed": 0, "problems": 4, "left_out": {"8_8_8_TN_fp16_fp32": "no agent found a kernel"},
        "costs": dict.fromkeys(levels, 1.25), "totals": {"gpu_s": 61.0, "kernels": 300, "measurements": 900},
    }  # fmt: skip
    write_live(rows, meta, path)
    return read_live(path)


@pytest.fixture(name="published")
def published_fixture(tmp_path: Path) -> tuple[Path, Path]:
    folder, page = tmp_path / "results" / "h200", tmp_path / PAGE
    write_bench(folder / "grid.parquet")
    page.parent.mkdir(parents=True)
    page.write_text("# Title\n<!-- live:begin -->\n<!-- live:end -->\nrest\n")
    return folder, tmp_path


def test_without_a_result_file_the_page_says_that_nothing_was_measured(published: tuple[Path, Path]) -> None:
    publish(*published)
    assert (
        published[1] / PAGE
    ).read_text() == f"# Title\n<!-- live:begin -->\n{NOT_MEASURED}\n<!-- live:end -->\nrest\n"
    assert not (published[1] / "docs/img/compare-live.svg").exists()


def test_each_gpu_has_both_tables_and_the_reinforcement(published: tuple[Path, Path]) -> None:
    folder, root = published
    result = made_live(folder / "live.parquet", "NVIDIA H200")
    made_live(folder.parent / "h100" / "live.parquet", "NVIDIA H100")
    assert any("compare-live.md is stale" in line for line in check_published(*published))
    publish(*published)
    text = (root / PAGE).read_text()
    assert (
        "NVIDIA H200: 3 unseen problems" in text
        and "NVIDIA H100: 3 unseen problems" in text
        and NOT_MEASURED not in text
    )
    for table in ("same", "native"):
        for figure in ("speedup", "share"):
            for row in table_rows(result, table, figure, bold="**")[1:]:
                assert text.count("| " + " | ".join(row) + " |") == 2
    assert "`ppo` over `regressor` | all | 3 | +1.8" in text and "pays |" in text and "`knob` over" not in text
    assert "The default agent on a GPU is `heuristic`" in text and "900 measurements of agents took 300 kernels" in text
    assert "8_8_8_TN_fp16_fp32, no agent found" in text and "](../img/compare-live.svg)" in text
    picture = (root / "docs/img/compare-live.svg").read_text()
    ElementTree.fromstring(picture)
    assert "unseen problems" in picture and "random-legal" in picture and "split" not in picture
    assert check_published(*published) == []


def test_the_report_has_every_figure_of_both_tables_and_asks_for_nothing(tmp_path: Path) -> None:
    result = made_live(tmp_path / "live.parquet", "NVIDIA H200 <i>")
    page = write_report(result.path, tmp_path / "live.html").read_text(encoding="utf-8")
    found = re.search(r'id="outblas-data">(.*?)</script>', page, re.S)
    assert found is not None and [g["title"] for g in json.loads(found[1])["groups"]] == ["same", "native"]
    for table in ("same", "native"):
        for figure in ("speedup", "share"):
            for agent, *cells in table_rows(result, table, figure)[1:]:
                assert f"<th scope='row'>{agent}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}" in page
    assert "Where reinforcement pays" in page and "ppo over regressor" in page and "no agent found a kernel" in page
    assert "H200 <i>" not in page and "H200 &lt;i&gt;" in page and "https://" not in page and "rehearsal" not in page
    assert write_report(result.path, tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_the_report_of_a_rehearsal_says_that_nothing_was_measured(tmp_path: Path) -> None:
    result = made_live(tmp_path / "live.parquet", "NVIDIA H200", rehearsal=True)
    page = write_report(result.path, tmp_path / "live.html").read_text(encoding="utf-8")
    assert "A rehearsal on <strong>cuda:0</strong>: no figure was measured" in page


def test_a_rehearsal_is_not_published(published: tuple[Path, Path]) -> None:
    made_live(published[0] / "live.parquet", "NVIDIA H200", rehearsal=True)
    with pytest.raises(RecordError, match="rehearsal"):
        publish(*published)
