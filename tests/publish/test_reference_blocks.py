"""Tables that are generated from the code name all that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages.publish_results import attribute_texts, knob_table

from outblas.core.config import knob_schema
from outblas.kernels.families.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
#: Macros of C and CUDA sources, which are no variables of the environment.
MACROS = {"OUTBLAS_CXX", "OUTBLAS_NN", "OUTBLAS_BF16", "OUTBLAS_SOURCE_ID"}


def test_every_variable_that_the_code_names_has_its_row_and_the_other_way_round() -> None:
    named = set()
    for path in (path for folder in ("src", "lab/src") for path in (ROOT / folder).rglob("*.py")):
        named |= set(re.findall(r"OUTBLAS_[A-Z0-9_]*[A-Z0-9]", path.read_text(encoding="utf-8")))
    rows = [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in (ROOT / "docs/use/environment-variables.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `OUTBLAS_")
    ]
    assert sorted(named - MACROS) == sorted(row[0].strip("`") for row in rows)
    assert all(len(row) == 5 and all(row) for row in rows), "values, default, effect, and when it is read"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_knob_has_its_line_and_its_meaning(family: str) -> None:
    lines = knob_table(family).splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [knob.name for knob in knob_schema(FAMILIES[family].config)]
    for line in lines:
        assert len(line.rsplit("|", 2)[1].strip()) > 8, f"{family}: no meaning in {line}"
        assert ":`" not in line, f"{family}: a role of Sphinx in {line}"


def test_entries_of_a_section_are_read_with_their_next_lines() -> None:
    doc = "Title.\n\nAttributes:\n    bm: rows of a tile,\n        in elements.\n    wm, wn: warps.\n\nAfter it.\n"
    assert attribute_texts(doc) == {"bm": "rows of a tile, in elements.", "wm": "warps.", "wn": "warps."}
    assert attribute_texts("No section.") == {}
