"""The package as a whole: what importing it costs, and that its parts agree on names and versions."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outblas
from outblas.core.install_hint import install_hint
from support.helpers import ROOT

PROBE = """
import sys, outblas
heavy = {"torch", "cuda", "mcp", "jinja2", "matplotlib", "pyarrow", "typer", "rich", "pydantic", "numpy"}
print(sorted(heavy & set(sys.modules)), outblas.Problem(64, 64, 64).key, "matmul" in dir(outblas))
"""
#: What the packages export, as README.md and docs/ name it.
FACES = {
    "": [
        "OutblasError", "Problem", "__version__", "capture", "disable", "enable", "enabled", "explain", "gated_linear",
        "grouped_mm", "interleave_gate_up", "learned", "linear", "matmul", "mm", "moe_mlp", "optimize", "prepare",
        "restore", "settle", "status", "use", "use_library", "use_workload", "warm",
    ],
    "records": ["Library"],
}  # fmt: skip
#: What the faces load, and what each exports: `__all__`, and public names that are no modules.
FACES_PROBE = """
import importlib, json, sys, types
from pathlib import Path
root = Path("outblas")
exported = {}
for face in sorted(root.rglob("__init__.py")):
    name = ".".join(face.parent.parts)
    module = importlib.import_module(name)
    public = [n for n in vars(module) if not n.startswith("_") and n not in ("annotations", "Any", "TYPE_CHECKING")]
    public = [n for n in public if not isinstance(vars(module)[n], types.ModuleType)]
    names = sorted({*public, *getattr(module, "__all__", ())})
    if names:
        exported[name.partition(".")[2]] = names
heavy = {"torch", "gymnasium", "mcp", "cuda", "jinja2", "matplotlib", "pyarrow", "typer", "rich", "pydantic", "numpy"}
print(json.dumps([exported, sorted(heavy & set(sys.modules))]))
"""
#: What `outblas --help` may load: neither torch nor CUDA nor anything slow.
HELP_PROBE = """
import sys, outblas.cli.main
print(sorted({"torch", "cuda", "mcp", "jinja2", "matplotlib", "pyarrow", "pydantic", "numpy"} & set(sys.modules)))
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run_python(PROBE) == "[] 64_64_64_TN_fp16_fp32 True"


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert run_python(HELP_PROBE) == "[]"


def test_each_face_exports_what_the_documents_name_and_loads_nothing_heavy() -> None:
    exported, heavy = json.loads(run_python(FACES_PROBE))
    assert exported == FACES
    assert heavy == []


#: Face of a package -> its names; outblas itself and those of outblas-lab, too.
NAMED = {f"outblas.{face}".rstrip("."): names for face, names in FACES.items()} | {
    "outblas_lab.recordings": ["Recording", "ReplayEvaluator"],
    "outblas_lab.train": ["Policy", "TuningEnv"],
}


@pytest.mark.parametrize("face", ["outblas_lab.train", "outblas_lab.recordings", "outblas.records"])
def test_a_face_gives_the_names_of_its_modules(face: str) -> None:
    package = importlib.import_module(face)
    assert set(NAMED[face]) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"{face}.*no_such_name"):
        _ = package.no_such_name
    for name in NAMED[face]:
        if name.endswith("Env"):
            pytest.importorskip("gymnasium")
        assert getattr(package, name).__module__.startswith(f"{face}.")


@pytest.mark.parametrize("face", sorted(NAMED))
def test_a_face_lists_its_public_names_alone(face: str) -> None:
    package = importlib.import_module(face)
    assert dir(package) == sorted(NAMED[face])


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="gemm"):
        _ = outblas.gemm
    assert not hasattr(outblas, "no_such_name")


def test_a_product_without_torch_is_one_clear_line() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if not installed
import outblas
from outblas.core.install_hint import install_hint
from outblas.core.errors import ToolchainMissing
for call in (outblas.matmul, outblas.explain):
    try:
        call(object(), object())
    except ToolchainMissing as error:
        print(error)
"""
    line = f"torch is not installed; expected a torch build for CUDA; {install_hint('gpu')}"
    assert run_python(code).splitlines() == [line, line]


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\w+)?", outblas.__version__)


def modules() -> list[Path]:
    return sorted(p for folder in ("src", "lab/src") for p in (ROOT / folder).rglob("*.py") if p.name != "__main__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""'), "a module starts with a docstring"


def test_the_readme_has_the_markers_once_each() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- results:begin -->") == text.count("<!-- results:end -->") == 1


DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
#: Probes that git history keeps, as the documents say where they name them.
GONE = {"probe_gemv.py", "wave_efficiency.py", "calibrate_bound.py"}
REPOSITORY = re.compile(r"https://github\.com/outblas/outblas/(?:blob|tree|raw)/main/([^#?]*)")
RAW = re.compile(r"https://raw\.githubusercontent\.com/outblas/outblas/main/([^#?]*)")
SITE = re.compile(r"https://outblas\.github\.io/outblas/([^#?]*)")


def leads_somewhere(document: Path, target: str) -> bool:
    """Return whether a link is to a file of the tree, relative or by its public address. Other hosts count as there."""
    for pattern in (REPOSITORY, RAW):
        if found := pattern.fullmatch(target.partition("#")[0]):
            return (ROOT / found[1]).exists()
    if found := SITE.fullmatch(target.partition("#")[0]):
        page = ROOT / "docs" / found[1]
        return (page / "index.md").is_file() or page.with_suffix(".md").is_file()
    return target.startswith(("http", "mailto:", "#")) or (document.parent / target.partition("#")[0]).exists()


def test_a_link_to_nothing_is_found() -> None:
    readme, site = ROOT / "README.md", "https://outblas.github.io/outblas/"
    for there in ("LICENSE", f"{site}use/install/", f"{site}", "https://github.com/outblas/outblas/blob/main/src"):
        assert leads_somewhere(readme, there), there
    for gone in ("LICENCE.txt", f"{site}use/nothing/", "https://github.com/outblas/outblas/tree/main/nothing"):
        assert not leads_somewhere(readme, gone), gone


def test_links_of_the_documents_lead_somewhere() -> None:
    wrong = [
        f"{name} links to {target}"
        for name in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8"))
        if not leads_somewhere(ROOT / name, target)
    ]
    assert wrong == []


def test_files_that_the_documents_name_are_there() -> None:
    folders = [ROOT / name for name in ("src", "lab", "tests", "benchmarks", "tools", "examples")]
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    wrong = []
    for name in DOCUMENTS:
        if name == "CHANGELOG.md" or name.startswith("docs/journal/"):  # they tell of what was, too
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"`(?:python )?([\w/]+\.(?:py|c|h|cpp|cuh|sh))\b", text)) - GONE
        wrong += [f"{name} names {file}" for file in named if not any(path.endswith(f"/{file}") for path in there)]
    assert wrong == []
