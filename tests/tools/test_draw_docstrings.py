"""The draw of docstrings is the same for a seed, and shows no code."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from support.helpers import ROOT, module_of_file

TOOL = ROOT / "tools" / "draw_docstrings.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    """The tool, which here reads a package once for all draws: that takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        module = module_of_file(TOOL, patch)
        documented = module.documented
        module.documented = functools.cache(lambda package: tuple(documented(package)))
        yield module


@pytest.fixture
def drawn(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def draw(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(TOOL), *arguments])
        tool.main()
        return capsys.readouterr().out

    return draw


def test_a_seed_draws_ten_of_each_package_and_the_same_again(drawn: Callable[..., str]) -> None:
    text = drawn("--seed", "3")
    again = subprocess.run([sys.executable, TOOL, "--seed", "3"], capture_output=True, text=True, check=True)
    assert text == again.stdout != drawn("--seed", "4")
    packages = [line for line in text.splitlines() if line.startswith("# ") and " " not in line[2:]]
    assert len(packages) >= 14 and text.count("\n## ") == 10 * len(packages)


def test_a_body_is_never_shown(drawn: Callable[..., str]) -> None:
    text = drawn("--count", "3")
    assert "\n    return " not in text
    assert not [line for line in text.splitlines() if line.startswith("## ") and "._" in line]


def test_a_class_shows_the_constructor_that_it_inherits_and_a_function_its_decorators(
    drawn: Callable[..., str],
) -> None:
    text = drawn("--count", "10000")
    assert "class DifferentialEvolution(KernelTunerStrategy):\n    def __init__(self, seed: int, gpu: Gpu)\n" in text
    assert "@contextlib.contextmanager\ndef lock_for_update(" in text
