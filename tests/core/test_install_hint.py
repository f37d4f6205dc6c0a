"""The command that installs an extra: it fits a wheel and a checkout, and no other text of the package composes one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import CPU_TORCH, install_hint, needed
from support.helpers import ROOT

HOME = ROOT / "src" / "outblas" / "core" / "install_hint.py"


@pytest.mark.parametrize(
    ("extras", "command"),
    [
        (("gpu",), "pip install 'outblas[gpu]'"),
        (("rl",), "pip install 'outblas-lab[rl]'"),
        (("gpu", "tune"), "pip install 'outblas[gpu,tune]'"),
        (("gpu", "rl"), "pip install 'outblas[gpu]' 'outblas-lab[rl]'"),
    ],
)
def test_the_command_names_each_package_with_its_extras(extras: tuple[str, ...], command: str) -> None:
    assert install_hint(*extras) == command


def test_the_command_can_be_of_another_python() -> None:
    assert install_hint("gpu", pip="/venv/bin/python -m pip") == "/venv/bin/python -m pip install 'outblas[gpu]'"


def hint_on(monkeypatch: pytest.MonkeyPatch, *extras: str, torch: bool, gpu: bool) -> str:
    with monkeypatch.context() as machine:
        machine.setattr("importlib.util.find_spec", lambda name: torch or None)
        machine.setattr("os.path.exists", lambda path: gpu and path == "/dev/nvidiactl")
        return install_hint(*extras)


@pytest.mark.parametrize("extra", ["rl", "train-llm"])
def test_without_a_gpu_the_cpu_build_of_torch_comes_first(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = hint_on(monkeypatch, extra, torch=False, gpu=False)
    assert hint.startswith(CPU_TORCH) and hint.endswith(f"then pip install 'outblas-lab[{extra}]'")


@pytest.mark.parametrize(
    ("extras", "torch", "gpu"),
    [(("rl",), True, False), (("rl",), False, True), (("gpu", "rl"), False, False), (("llm",), False, False)],
)
def test_elsewhere_pip_chooses_the_build(
    extras: tuple[str, ...], torch: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "whl/cpu" not in hint_on(monkeypatch, *extras, torch=torch, gpu=gpu)


def composed_elsewhere(folder: Path) -> list[str]:
    """Return the lines of Python files that spell an installation of the package themselves."""
    own = re.compile(r"pip install ['\"]?(outblas\b|\.(\[|\s|$))")
    found = []
    for path in sorted(folder.rglob("*.py")):
        if path != HOME:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(folder)}: {line.strip()}" for line in lines if own.search(line)]
    return found


def test_no_other_module_composes_the_command() -> None:
    assert composed_elsewhere(ROOT / "src") == composed_elsewhere(ROOT / "lab" / "src") == []


def test_a_command_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("do = \"pip install 'outblas[gpu]'\"\nother = 'pip install . in a checkout'\n")
    (tmp_path / "b.py").write_text("do = \"pip install '.[gpu]'\"\nfine = 'pip install plotly'\n")
    assert len(composed_elsewhere(tmp_path)) == 3


def test_every_extra_that_the_package_names_exists() -> None:
    own, labs = (
        set(
            tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"][
                "optional-dependencies"
            ]
        )
        for folder in ("", "lab")
    )
    named = set()
    for path in (path for folder in ("src", "lab/src") for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in re.findall(r"install_hint\(([^)]*)\)", text):
            named |= set(re.findall(r"^\W*\"([\w-]+)\"|, \"([\w-]+)\"", call))
        named |= {(name, "") for name in re.findall(r"\bneeded\([^)]*, \"([\w-]+)\"\)", text)}
    names = {name for pair in named for name in pair if name}
    assert names > {"tune", "gpu", "report", "kernel-tuner"}, "calls of both functions were found"
    assert names <= own | labs and not own & labs
    assert {name for name in names if f"'outblas[{name}]'" in install_hint(name)} <= own
    assert {name for name in names if f"'outblas-lab[{name}]'" in install_hint(name)} <= labs


def test_an_absent_package_and_a_broken_one_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    absent = "package_that_nobody_has is not installed; expected it; pip install 'outblas[tune]'"
    with pytest.raises(ToolchainMissing, match=re.escape(absent)):
        needed("package_that_nobody_has.part", "it", "tune")
    with pytest.raises(ToolchainMissing, match=r"broken_package cannot be imported \(No module named 'package_that_n"):
        needed("broken_package", "it", "tune")
    assert needed("json.decoder", "it", "tune").JSONDecoder
