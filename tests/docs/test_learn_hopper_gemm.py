"""*Learn Hopper GEMM*: its excerpts are whole, its kernels compile, and its speeds are those of the result file."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outblas.core.errors import OutblasError
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.kernels.source import make_source
from outblas.runtime.nvrtc import compile_source
from outblas_lab.custom.examples.example_kernels import example
from outblas_lab.jail.build import build
from support.gpus.known import H200

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "kernels" / "learn-hopper-gemm.md"
RESULT = ROOT / "results" / "h200" / "learn_hopper_gemm.json"
EXCERPTS = re.findall(r'--8<-- "([^":]+):(\d+):(\d+)"', PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("learn_hopper_gemm")


def test_every_chapter_but_the_introduction_shows_code() -> None:
    _, *chapters = re.split(r"^## (?=\d)", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert len(chapters) == 6 and all("--8<--" in chapter for chapter in chapters)


@pytest.mark.parametrize(("path", "first", "last"), EXCERPTS)
def test_an_excerpt_is_a_whole_block(path: str, first: str, last: str) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    shown = lines[int(first) - 1 : int(last)]
    assert len(shown) == int(last) - int(first) + 1, f"{path} has {len(lines)} lines"
    text = "\n".join(shown)
    assert text.count("{") == text.count("}") > 0
    assert shown[0].strip() and shown[-1].strip(), "an excerpt begins and ends with code"
    assert "void " in text or "for (" in text


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "img" / "learn").glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_has_a_title_and_a_margin(path: Path) -> None:
    space = "{http://www.w3.org/2000/svg}"
    figure = ElementTree.parse(path).getroot()
    left, top, width, height = map(float, figure.get("viewBox", "").split())
    background, *boxes = figure.findall(f"{space}rect")
    assert figure.find(f"{space}text").text == figure.findtext(f"{space}title"), "readers see the title, too"
    for box in boxes:
        x, y, wide, high = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        assert left + 10 <= x and x + wide <= left + width - 10
        assert top + 34 <= y and y + high <= top + height - 5


def test_the_page_has_the_tables_of_the_result_file(benchmark: Any) -> None:
    result = json.loads(RESULT.read_text())
    text = PAGE.read_text(encoding="utf-8")
    for chapter in benchmark.CHAPTERS:
        assert text == benchmark.page_with_table(text, result, chapter), (
            "run benchmarks/learn_hopper_gemm.py --page-only"
        )


def test_a_page_without_markers_is_refused(benchmark: Any) -> None:
    with pytest.raises(OutblasError, match="no place for its table"):
        benchmark.page_with_table("# a page", json.loads(RESULT.read_text()), "ring")


def test_every_kernel_of_the_result_file_is_the_one_of_today(benchmark: Any) -> None:
    for row in json.loads(RESULT.read_text())["rows"]:
        name = benchmark.CHAPTERS[row["chapter"]]
        if name:
            assert row["kernel"] == example(name).name, f"{name} has changed: measure it again"
        else:
            config_from_name(row["kernel"])


def test_every_chapters_kernel_compiles(benchmark: Any) -> None:
    pytest.importorskip("cuda.bindings")
    for row in json.loads(RESULT.read_text())["rows"]:
        name, problem = benchmark.CHAPTERS[row["chapter"]], Problem.from_key(row["problem"])
        if name:
            assert build(example(name), problem, H200).counters()["hgmma"] > 0
        else:
            assert compile_source(make_source(problem, config_from_name(row["kernel"]))).registers > 0
