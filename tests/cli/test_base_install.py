"""The base install: what works without pyarrow, Jinja2 and Matplotlib, and which extra the other commands name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.records.library import Library
from support.helpers import ROOT, SOURCE_PATH

#: Runs the command line in a process that cannot import the optional packages.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyarrow", "jinja2", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
COMMAND = WITHOUT + "from outblas.__main__ import main\nsys.exit(main())\n"


def run_without(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "OUTBLAS_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=240, cwd=folder, env=environment,
    )  # fmt: skip


def test_the_package_and_its_library_need_neither(tmp_path: Path) -> None:
    code = WITHOUT + (
        "import outblas, json\n"
        "from outblas.records.library import Library\n"
        "from outblas.dispatch import decide, enable, matmul  # noqa\n"
        "rows = Library.packaged('h200').rows\n"
        "loaded = sorted({'pyarrow', 'jinja2', 'matplotlib'} & set(sys.modules))\n"
        "print(json.dumps([len(rows), outblas.enabled(), loaded]))\n"
    )
    done = run_without(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [len(Library.packaged("h200").rows), False, []]


@pytest.mark.parametrize("arguments", [("--version",), ("list",), ("export", "--help"), ("tune", "--help")])
def test_commands_that_need_neither(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_without(COMMAND, *arguments, folder=tmp_path)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
    if arguments == ("list",):
        grid = next(line for line in done.stdout.splitlines() if "grid1000" in line)
        assert grid.endswith(f"recordings cannot be read: {install_hint('tune')}"), grid


def test_a_kernel_is_exported_without_them(tmp_path: Path) -> None:
    problem = next(row.problem for row in Library.packaged("h200").rows if row.plain is not None)
    options = ("--mnk", problem.mnk, "--layout", problem.layout, "--dtype", problem.dtype, "--acc", problem.acc)
    done = run_without(COMMAND, "export", *options, "--format", "cu", "--out", str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(path.suffix == ".cu" for path in (tmp_path / "out").rglob("*")), done.stdout


def test_doctor_names_the_extra_for_recordings(tmp_path: Path) -> None:
    done = run_without(COMMAND, "doctor", folder=tmp_path)
    optional = done.stdout.partition("not here, and optional:")[2]
    (line,) = re.findall(r"^ +recording .*", optional, re.M)
    assert "pyarrow" in line and install_hint("tune") in line


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "tune",
            "--suite",
            "grid1000",
            "--agent",
            "random",
            "--budget",
            "2",
            "--device",
            "replay:h200",
            "--run",
            "run",
        ),
        ("compare", "--agents", "random", "--sample", "2"),
        ("results", "--dir", str(ROOT / "results" / "h200")),
        ("export-t4", "--mnk", Problem(64, 4096, 64).mnk, "--out", "t4.json"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_needs_pyarrow_names_the_extra(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run_without(COMMAND, *arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert last.startswith("error: pyarrow is not installed") and install_hint("tune") in last
    assert not (tmp_path / "run").exists()


def test_no_module_imports_an_optional_package_when_it_is_imported_itself() -> None:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found += [
            f"{path.name}: {line}"
            for line in re.findall(r"^(?:import|from) (?:pyarrow|jinja2|matplotlib)\b.*", text, re.M)
        ]
    assert found == []
