"""The map of the code: its diagrams are of today, and its places exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
PAGE = (ROOT / "docs/develop/map.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?!Where|---)(.+?) \| (.+?) \|$", re.MULTILINE)


@pytest.fixture(name="tool", scope="module")
def tool_fixture() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/draw_map.py"))


def test_the_diagrams_are_of_todays_packages(tool: dict[str, Any]) -> None:
    assert tool["drawn"](PAGE) == PAGE, "run `make map`"


@pytest.mark.parametrize(("thing", "places"), ROW.findall(PAGE))
def test_each_place_exists(thing: str, places: str) -> None:
    named = re.findall(r"`([^`]+)`", places)
    folders = {"lab:": ROOT / "lab/src/outblas_lab", "": ROOT / "src/outblas"}
    for place in named:
        prefix = "lab:" if place.startswith("lab:") else ""
        assert (folders[prefix] / place.removeprefix(prefix)).exists(), f"{thing}: {place}"
    assert named


def test_the_map_answers_at_least_thirty_questions() -> None:
    assert len(ROW.findall(PAGE)) >= 30


def test_arrows_show_imports_inside_functions_and_leave_out_what_a_longer_way_implies(
    tool: dict[str, Any], tmp_path: Path
) -> None:
    package = tmp_path / "outblas"
    texts = {
        "top": "def f():\n    from outblas.middle import g\n    import outblas.bottom.h\n",
        "middle": "from outblas import bottom\n",
        "bottom": "import json\n",
    }
    for name, text in texts.items():
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text(text)
    assert tool["imports_of_packages"](package) == {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert tool["diagram"](package).splitlines()[2:-1] == ["    middle --> bottom", "    top --> middle"]
