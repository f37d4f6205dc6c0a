"""hatch_build.py: when a wheel gets compiled kernels, and what a build without a compiler for them says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outblas.core.errors import ToolchainMissing
from outblas.runtime import native_build
from outblas_lab.build import cubin_build
from support.helpers import ROOT, module_of_file

VARIABLE = "OUTBLAS_BUILD_CUBINS"
INTERFACE = "hatchling.builders.hooks.plugin.interface"


class Aborted(Exception):
    pass


class App:
    """Stands in for hatchling's terminal."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.information: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)

    def display_info(self, text: str) -> None:
        self.information.append(text)

    def abort(self, text: str) -> None:
        raise Aborted(text)


Run = Callable[..., tuple[dict[str, Any], App]]


@pytest.fixture(name="run")
def run_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the hook: `build` stands in for the compilation of all kernels."""
    interface = ModuleType(INTERFACE)
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, INTERFACE, interface)
    module = module_of_file(ROOT / "hatch_build.py", monkeypatch)
    monkeypatch.setattr(module, "TERMINAL", str(tmp_path / "terminal"))
    monkeypatch.setattr(native_build, "build", lambda: ROOT / "src" / "outblas" / "dispatch" / "_native.abi3.so")
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(build: Callable[..., Path], version: str = "standard") -> tuple[dict[str, Any], App]:
        monkeypatch.setattr(cubin_build, "build_for_wheel", build)
        hook, data = module.NativeExtension(), {"artifacts": []}
        hook.app = App()
        hook.initialize(version, data)
        return data, hook.app

    return run


def packed(report: object) -> Path:
    return ROOT / "src" / "outblas" / "data" / "cubins" / "kernels.pack"


def no_compiler(report: object) -> Path:
    raise ToolchainMissing("NVRTC cannot be loaded", "its wheels", "install them")


def test_a_wheel_gets_the_extension_and_the_kernels(run: Run) -> None:
    data, app = run(packed)
    assert data["artifacts"] == ["/src/outblas/dispatch/_native.abi3.so", "/src/outblas/data/cubins/kernels.pack"]
    assert data["tag"].startswith("cp310-abi3-") and data["pure_python"] is False and not app.warnings


def test_without_a_compiler_a_line_names_the_command_that_packs_them(run: Run, tmp_path: Path) -> None:
    data, app = run(no_compiler)
    assert len(data["artifacts"]) == 1
    assert (tmp_path / "terminal").read_text() == f"\n{app.warnings[0]}\n", "pip hides what a build prints"
    assert (
        len(app.warnings) == 1 and "WITHOUT COMPILED KERNELS" in app.warnings[0] and "`make build`" in app.warnings[0]
    )


def test_a_build_without_a_terminal_goes_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / "terminal").mkdir()
    data, app = run(no_compiler)
    assert len(data["artifacts"]) == 1 and len(app.warnings) == 1


def test_required_kernels_that_cannot_be_compiled_end_the_build(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "require")
    with pytest.raises(Aborted, match="NVRTC cannot be loaded.*make build"):
        run(no_compiler)
    assert len(run(packed)[0]["artifacts"]) == 2


@pytest.mark.parametrize(("value", "version"), [("skip", "standard"), ("require", "editable"), ("", "editable")])
def test_builds_that_compile_no_kernel(run: Run, monkeypatch: pytest.MonkeyPatch, value: str, version: str) -> None:
    def never(report: object) -> Path:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setenv(VARIABLE, value)
    data, app = run(never, version)
    assert len(data["artifacts"]) == 1 and not app.warnings


def test_an_unknown_value_ends_the_build(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    before = list(sys.path)
    with pytest.raises(Aborted, match="'yes'; expected auto, require, skip"):
        run(packed)
    assert sys.path == before


def test_without_a_c_compiler_the_wheel_is_pure_python(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise ToolchainMissing("no C compiler", "cc", "install one")

    monkeypatch.setattr(native_build, "build", none)
    data, app = run(packed)
    assert "tag" not in data and "no C compiler" in app.warnings[0]
