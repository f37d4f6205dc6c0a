"""Refusals of tools/release.py. Its builds and installations take a minute and are not run here."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.helpers import ROOT

GOOD = {
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\n",
    "CHANGELOG.md": "# Changelog\n\n## [0.2.0] - 2026-11-29\n",
}


@pytest.fixture(name="tool", scope="module")
def tool_fixture() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/release.py"))


def tree(folder: Path, **texts: str) -> Path:
    for name, text in {**GOOD, **{key.replace("_", "."): text for key, text in texts.items()}}.items():
        (folder / name).write_text(text)
    return folder


def test_texts_of_one_version_pass(tool: dict[str, Any], tmp_path: Path) -> None:
    tool["check_texts"](tree(tmp_path), "0.2.0", "v0.2.0")


@pytest.mark.parametrize(
    ("texts", "tag", "words"),
    [
        ({}, "v0.3.0", "tag v0.3.0 of version 0.2.0"),
        ({"CITATION_cff": "version: 0.1.0\n"}, None, "CITATION.cff names"),
        ({"CHANGELOG_md": "## [0.2.0] - unreleased\n"}, None, "date 0.2.0"),
        ({"CHANGELOG_md": "## [0.2.0] - 2026-11-29\n" + "- a\n" * 150}, None, "expected at most 150"),
    ],
)
def test_texts_of_another_version_or_too_long_are_refused(
    tool: dict[str, Any], tmp_path: Path, texts: dict[str, str], tag: str | None, words: str
) -> None:
    with pytest.raises(tool["Failed"], match=words):
        tool["check_texts"](tree(tmp_path, **texts), "0.2.0", tag)


def wheel(folder: Path, name: str, *files: str) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as file:
        for each in files:
            file.writestr(each, "")
    return path


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("outblas/data/recordings/h200.parquet", "outblas/data/cubins/kernels.pack"), "move it to lab/"),
        (("outblas/__init__.py",), "lacks outblas/data/cubins/kernels.pack"),
    ],
)
def test_a_wheel_with_a_part_of_the_lab_or_without_kernels_is_refused(
    tool: dict[str, Any], tmp_path: Path, files: tuple[str, ...], words: str
) -> None:
    user, lab = wheel(tmp_path, "outblas-0.2.0-py3-none-any.whl", *files), wheel(tmp_path, "outblas_lab-0.2.0-x.whl")
    with pytest.raises(tool["Failed"], match=words):
        tool["check_wheels"](user, lab, "0.2.0", True)
