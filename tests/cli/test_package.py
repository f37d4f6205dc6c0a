"""The package as a whole: what importing it costs, and that its parts agree on names and versions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import outblas
from support.helpers import ROOT

PROBE = """
import sys, outblas
heavy = {"torch", "cuda", "plotly", "pyarrow", "typer", "rich", "pydantic", "numpy"} & set(sys.modules)
print(sorted(heavy), outblas.Problem(64, 64, 64).key, "matmul" in dir(outblas))
"""
#: What `outblas --help` may load: neither torch nor CUDA nor anything slow.
HELP_PROBE = """
import sys, outblas.cli
print(sorted({"torch", "cuda", "plotly", "pyarrow", "pydantic", "numpy"} & set(sys.modules)))
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run_python(PROBE) == "[] 64_64_64_TN_fp16_fp32 True"


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert run_python(HELP_PROBE) == "[]"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="gemm"):
        _ = outblas.gemm
    assert not hasattr(outblas, "no_such_name")


def test_a_product_without_torch_is_one_clear_line() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if not installed
import outblas
from outblas.core.errors import ToolchainMissing
for call in (outblas.matmul, outblas.explain):
    try:
        call(object(), object())
    except ToolchainMissing as error:
        print(error)
"""
    line = "torch is not installed; expected torch built for CUDA; pip install 'outblas[gpu]'"
    assert run_python(code).splitlines() == [line, line]


def test_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\w+)?", outblas.__version__)


def modules() -> list[Path]:
    return sorted(p for p in (ROOT / "src" / "outblas").rglob("*.py") if p.name != "__main__.py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""'), "a module starts with a docstring"


def test_the_readme_has_the_markers_once_each() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- results:begin -->") == text.count("<!-- results:end -->") == 1


DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
#: Probes that git history keeps, as the documents say where they name them.
GONE = {"probe_gemv.py", "wave_efficiency.py", "calibrate_bound.py"}


def test_links_of_the_documents_lead_somewhere() -> None:
    for name in DOCUMENTS:
        document = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{name} links to {target}"


def test_files_that_the_documents_name_are_there() -> None:
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "tools", "examples")]
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    for name in DOCUMENTS:
        if name == "CHANGELOG.md":  # it tells of what was, too
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for file in set(re.findall(r"`(?:python )?([\w/]+\.(?:py|c|h|cpp|cuh|sh))\b", text)) - GONE:
            assert any(path.endswith(f"/{file}") for path in there), f"{name} names {file}"
