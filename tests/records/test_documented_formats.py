"""The reference of file formats and of the Python interface agrees with the code."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

import outblas
import outblas.records
import outblas_lab.recordings
import outblas_lab.train
from outblas.records.results import COLUMNS as RESULT_COLUMNS
from outblas_lab.recordings.recording_files import BASELINES, CELLS
from outblas_lab.recordings.recording_files import COLUMNS as RECORDING_COLUMNS
from support.helpers import ROOT

FORMATS = (ROOT / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
#: (version as the page has it, dotted name of the constant): in a package, or below the folder of the program.
ROWS = re.findall(r"^\|.*\| (\S+) \| `((?:\w+\.)+[A-Z][A-Z0-9_]*)` \|$", FORMATS, re.M)


def constant(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def section(title: str) -> str:
    return FORMATS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_table_has_each_format_of_the_package() -> None:
    files = {path: root for root in (ROOT / "src", ROOT / "lab" / "src") for path in root.rglob("*.py")}
    assert len(ROWS) == len({(name, version) for version, name in ROWS}) + 1  # results and comparisons share a number
    named = {name for _, name in ROWS}
    for package in ("outblas/records", "outblas/predict", "outblas_lab/train"):
        for path in (path for path in files if f"/{package}/" in path.as_posix()):
            if re.search(r"^FORMAT = \d+$", path.read_text(encoding="utf-8"), re.M):
                module = ".".join(path.relative_to(files[path]).with_suffix("").parts)
                assert f"{module}.FORMAT" in named, f"{module} is not in the table of formats"


@pytest.mark.parametrize(("version", "name"), ROWS, ids=lambda value: value)
def test_a_version_is_the_one_of_the_code(version: str, name: str) -> None:
    found = constant(name)
    text = found.decode() if isinstance(found, bytes) else str(found)
    assert version.strip("`") == text


def test_the_columns_of_a_result_are_all_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", section("Result")))
    assert set(RESULT_COLUMNS) <= explained


def test_the_columns_of_a_recording_are_all_explained() -> None:
    explained = set(re.findall(r"`(\w+)`", section("Recording")))
    assert {*RECORDING_COLUMNS[CELLS], *RECORDING_COLUMNS[BASELINES]} <= explained


def test_the_fields_of_a_library_are_all_explained() -> None:
    from outblas.records.library_file import _file_model

    lists = (_file_model().model_fields[name].annotation for name in ("rows", "intervals"))
    fields = {field for each in lists for field in each.__args__[0].model_fields}  # type: ignore[union-attr]
    explained = set(re.findall(r"`(\w+)`", section("Library")))
    assert {name for name in fields if not name.endswith(("_pdl", "_weights"))} <= explained


def test_the_reference_has_each_public_name_once() -> None:
    listed = re.findall(r"^::: ([\w.]+)$", API, re.M)
    public = [
        f"{face.__name__}.{name}"
        for face in (outblas, outblas_lab.recordings, outblas_lab.train, outblas.records)
        for name in face.__all__
        if name != "__version__"
    ]
    assert sorted(listed) == sorted(public)
