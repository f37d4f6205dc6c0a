"""The draw of docstrings is the same for a seed, and shows no code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "draw_docstrings.py"


def drawn(*arguments: str) -> str:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_seed_draws_ten_of_each_package_and_the_same_again() -> None:
    text = drawn("--seed", "3")
    assert text == drawn("--seed", "3") != drawn("--seed", "4")
    packages = [line for line in text.splitlines() if line.startswith("# ") and " " not in line[2:]]
    assert len(packages) >= 14 and text.count("\n## ") == 10 * len(packages)


def test_a_body_is_never_shown() -> None:
    text = drawn("--count", "3")
    assert "\n    return " not in text
    assert not [line for line in text.splitlines() if line.startswith("## ") and "._" in line]


def test_a_class_shows_the_constructor_that_it_inherits_and_a_function_its_decorators() -> None:
    text = drawn("--count", "10000")
    assert "class DifferentialEvolution(KernelTunerStrategy):\n    def __init__(self, seed: int, gpu: Gpu)\n" in text
    assert "@contextlib.contextmanager\ndef lock_for_update(" in text
