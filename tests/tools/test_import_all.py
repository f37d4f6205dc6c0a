"""tools/import_all.py: the found interpreters, the installations, and the tolerated failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.helpers import ROOT, module_of_file

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHER = "3.11" if HERE != "3.11" else "3.12"


@pytest.fixture(name="tool")
def tool_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "tools" / "import_all.py", monkeypatch)


def interpreter(path: Path, says: str, status: int = 0) -> Path:
    """A program in the place of an interpreter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


def package(folder: Path, **texts: str) -> Path:
    """A source folder with a package ``p`` of these modules."""
    (folder / "p").mkdir(parents=True)
    for name, text in {"__init__": "", **texts}.items():
        (folder / "p" / f"{name}.py").write_text(text)
    return folder


def test_every_module_of_the_package_is_named(tool: Any, tmp_path: Path) -> None:
    (package(tmp_path, one="") / "p" / "in_it").mkdir()
    (tmp_path / "p" / "in_it" / "two.py").touch()
    (tmp_path / "p" / "in_it" / "no-module.py").touch()
    assert tool.modules(tmp_path) == ["p", "p.in_it.two", "p.one"]
    names = tool.modules(ROOT / "src") + tool.modules(ROOT / "lab" / "src")
    assert {"outblas", "outblas.cli", "outblas_lab.jail.elf", "outblas.__main__", "outblas.kernels.kernel_hash"} <= set(
        names
    )


def test_the_base_dependencies_are_those_of_the_project(tool: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tool.base_dependencies() == sorted(project["dependencies"])


def test_a_shim_that_fails_is_passed_over_for_a_real_one(tool: Any, tmp_path: Path) -> None:
    shims, root = tmp_path / "shims", tmp_path / "root"
    interpreter(shims / f"python{OTHER}", "pyenv: command not found", 127)
    environment = {"PATH": f"{tmp_path}/none:{shims}:", "HOME": str(tmp_path), "PYENV_ROOT": str(root)}
    assert shims / f"python{OTHER}" in list(tool.candidates(OTHER, environment))

    interpreter(root / "versions" / f"{OTHER}.1" / "bin" / "python", "3.9")  # another than its folder says
    own = interpreter(tmp_path / ".pyenv" / "versions" / f"{OTHER}.7" / "bin" / "python", OTHER)
    assert tool.find(OTHER, environment) == own
    better = interpreter(root / "versions" / f"{OTHER}.2" / "bin" / "python", OTHER)
    assert tool.find(OTHER, environment) == better
    first = interpreter(tmp_path / "bin" / f"python{OTHER}", OTHER)
    assert tool.find(OTHER, {**environment, "PATH": f"{shims}:{first.parent}"}) == first
    assert tool.find("3.99", environment) is None


def test_the_interpreter_that_runs_it_is_taken_as_it_is(tool: Any) -> None:
    assert tool.find(HERE, {}) == Path(sys.executable)


def test_an_environment_is_made_once(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], *rest: Any) -> str:
        ran.append(command)
        if "venv" in command:
            interpreter(Path(command[-1], "bin", "python"), OTHER)
        return ""

    monkeypatch.setattr(tool, "_run", run)
    python, folder = tmp_path / "python", tmp_path / OTHER
    inside = tool.environment_of(python, folder, ["a>=1"])
    assert inside == folder / "bin" / "python" and len(ran) == 2
    assert ran[1][-1] == "a>=1" and str(inside) in ran[1]
    assert tool.environment_of(python, folder, ["a>=1"]) == inside and len(ran) == 2
    tool.environment_of(python, folder, ["a>=2"])
    assert len(ran) == 4, "other dependencies"
    tool.environment_of(tmp_path / "another", folder, ["a>=2"])
    assert len(ran) == 6, "another interpreter"
    inside.unlink()
    tool.environment_of(tmp_path / "another", folder, ["a>=2"])
    assert len(ran) == 8, "it is gone"


def test_a_registry_that_fails_is_told_and_asked_again(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], trouble: str, *rest: Any) -> str:
        ran.append(command[2])
        if command[2] == "--python":
            raise tool.NotTried(f"{trouble} (no network)")
        return ""

    monkeypatch.setattr(tool, "_run", run)
    monkeypatch.setattr(tool, "find", lambda version, environment: tmp_path / "python")
    for _ in range(2):
        outcome = tool.try_version(OTHER, tmp_path, ["p"], ["a"], tmp_path)
        (line,) = outcome.lines()
        assert line.startswith(f"Python {OTHER} ({tmp_path}/python): not tried: ") and line.endswith("(no network)")
    assert ran == ["venv", "--python"] * 2


def test_a_command_that_fails_is_not_tried_with_its_last_word(tool: Any, tmp_path: Path) -> None:
    failing = interpreter(tmp_path / "failing", "", 3)
    with pytest.raises(tool.NotTried, match=r"^what \(exit status 3\)$"):
        tool._run([str(failing)], "what")
    with pytest.raises(tool.NotTried, match="No such file"):
        tool._run([str(tmp_path / "none")], "what")


@pytest.mark.parametrize(
    ("kind", "missing", "optional"),
    [
        ("ToolchainMissing", "", True),
        ("ModuleNotFoundError", "torch", True),
        ("ModuleNotFoundError", "torch.nn", True),
        ("ModuleNotFoundError", "numpy", False),
        ("ModuleNotFoundError", "importlib.resources.abc", False),
        ("ModuleNotFoundError", "annotationlib", False),
        ("ModuleNotFoundError", "outblas.gone", False),
        ("ModuleNotFoundError", "", False),
        ("ImportError", "torch", False),  # it is there and lacks something
        ("ImportError", "typing", False),
        ("SyntaxError", "", False),
    ],
)
def test_what_a_module_may_lack(tool: Any, kind: str, missing: str, optional: bool) -> None:
    failed = tool.Failed("outblas.one", kind, missing, "words")
    assert tool.is_optional(failed, {"importlib", "typing"}, {"numpy"}) is optional


def test_modules_are_imported_one_by_one_whatever_they_do(tool: Any, tmp_path: Path) -> None:
    source = package(
        tmp_path,
        good="print('a word')",
        wants="import surely_not_installed.here",
        says="class ToolchainMissing(Exception): ...\nraise ToolchainMissing('no compiler; expected one')",
        old="from typing import SurelyNoSuchName",
        torn="def f(:",
        ends="raise SystemExit(0)",
        uses="from p import torn",
        silent="import sys\nsys.stdout = None",
    )
    names = tool.modules(source)
    failed, own = tool.imported(Path(sys.executable), names, source)
    kinds = {f.module: (f.kind, f.missing) for f in failed}
    assert kinds == {
        "p.wants": ("ModuleNotFoundError", "surely_not_installed"),
        "p.says": ("ToolchainMissing", ""),
        "p.old": ("ImportError", "typing"),
        "p.torn": ("SyntaxError", ""),
        "p.ends": ("SystemExit", ""),
        "p.uses": ("SyntaxError", ""),
    }
    assert "typing" in own

    outcome = tool.try_version(HERE, tmp_path, names, ["numpy>=1"], source)
    assert (outcome.imported, len(outcome.wrong)) == (3, 4)
    head, *errors = outcome.lines()
    assert head.endswith(
        "3 modules imported, 4 wrong; without an optional package: ToolchainMissing 1, surely_not_installed 1"
    )
    assert [line.split(":")[0].strip() for line in errors] == ["p.ends", "p.old", "p.torn", "p.uses"]


def test_a_module_that_ends_the_process_is_wrong(tool: Any, tmp_path: Path) -> None:
    source = package(tmp_path, dies="import os\nos._exit(9)")
    outcome = tool.try_version(HERE, tmp_path, ["p.dies"], [], source)
    assert not outcome.not_tried and "the imports end too early (exit status 9)" in outcome.wrong[0].words


def test_what_is_wrong_is_the_exit_status(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tool.Failed("outblas.one", "SyntaxError", "", "invalid syntax")
    outcomes = {"3.11": tool.Outcome("3.11", "/a/python", "", 5, (wrong,)), "3.12": tool.Outcome("3.12", "/b", "", 6)}
    none = {version: tool.Outcome(version, "", "no interpreter") for version in tool.VERSIONS}
    monkeypatch.setattr(tool, "try_version", lambda version, *rest: {**none, **outcomes}[version])
    told: list[str] = []
    assert tool.main([str(tmp_path)], told.append) == 1
    assert sorted(told) == [
        "Python 3.11 (/a/python): 5 modules imported, 1 wrong\n  outblas.one: SyntaxError: invalid syntax",
        "Python 3.12 (/b): 6 modules imported, 0 wrong",
        "Python 3.13: not tried: no interpreter",
        "Python 3.14: not tried: no interpreter",
    ]
    assert tool.main([str(tmp_path), "--versions", "3.12", "3.13"], told.append) == 0


def test_the_version_at_hand_and_the_others_may_be_tried_apart(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(tool, "try_version", lambda version, *rest: tried.append(version) or tool.Outcome(version))
    assert tool.main([str(tmp_path), "--here"], print) == 0 and tried == [HERE]
    tried.clear()
    assert tool.main([str(tmp_path), "--others"], print) == 0
    assert sorted(tried) == sorted({*tool.VERSIONS} - {HERE})


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_test_runs_it() -> None:
    done = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "test", "VENV=/v"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "PREPARED")},  # of a make around the tests
    )
    for some in ("--here", "--others"):
        assert f"/v/bin/python tools/import_all.py /v/imports {some}" in done.stdout
