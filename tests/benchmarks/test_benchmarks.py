"""Every benchmark says what it answers, and can be run by its path from any folder."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.helpers import ROOT

FOLDER = ROOT / "benchmarks"
COMMANDS = sorted(
    [*FOLDER.glob("*.py"), *(FOLDER / "transformer" / name for name in ("model_steps.py", "moe_model.py"))]
)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_benchmark_begins_with_question_command_and_result_file(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    question, command, result = (told.find(word) for word in ("Question: ", "\nCommand:\n", "\nResult file: "))
    assert 0 == question < command < result, told[:400]
    assert f"python {path.relative_to(ROOT)}" in told[command:result]
    assert told.splitlines()[0].endswith("?")


def test_the_readme_of_the_transformer_names_every_file() -> None:
    folder = FOLDER / "transformer"
    told = (folder / "README.md").read_text()
    assert all(word in told for word in ("**Question.**", "**Command.**", "**Result file.**"))
    assert {path.name for path in folder.glob("*.py")} == {
        line.split("`")[1] for line in told.splitlines() if line.startswith("| `")
    }


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_from_outblas_is_there(path: Path) -> None:
    """Those of functions that need a GPU, too: no other test imports them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outblas":
            assert (spec := find_spec(node.module or "")) is not None and spec.origin, node.module
            words = set(re.findall(r"\w+", Path(spec.origin).read_text()))
            missing = {each.name for each in node.names} - words
            assert all(find_spec(f"{node.module}.{name}") for name in missing), f"{node.module} has no {missing}"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_changes_no_search_path(path: Path) -> None:
    assert "sys.path" not in path.read_text()


def test_a_benchmark_of_several_files_runs_from_another_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")
    command = [sys.executable, str(FOLDER / "transformer" / "model_steps.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Question: how long do a transformer's steps take" in done.stdout and "--tune" in done.stdout
