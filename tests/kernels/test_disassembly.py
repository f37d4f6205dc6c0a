"""The tests' own helpers: many kernels share one disassembly, and all files of tests/gpu need a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import CompileError
from support.disassembly import Code, Together

FOLDER = Path(__file__).resolve().parents[1] / "gpu"


def test_what_does_not_compile_is_the_error_of_its_own_key() -> None:
    asked = []

    def build(key: str) -> Any:
        asked.append(key)
        raise CompileError(key, "code", "correct it")

    together = Together(build, ["a", "b", "a"])
    with pytest.raises(CompileError, match="^b"):
        together["b"]
    assert asked == ["a", "b"]
    with pytest.raises(CompileError, match="^a"):
        together["a"]
    with pytest.raises(CompileError, match="^c"):
        together["c"]
    assert asked == ["a", "b", "c"], "each is compiled once"


def test_branches_are_counted_from_the_kernels_first_instruction() -> None:
    code = Code(("NOP", "@!P0 BRA 0x110", "BRA.U UP0, 0x120"), first=16)
    assert [code.target(text) for text in code.texts] == [None, 1, None]
    assert code.opcodes == ["NOP", "BRA", "BRA.U"]


def test_every_test_of_the_gpu_folder_is_marked() -> None:
    """Without a GPU, conftest skips these files unread."""
    files = sorted(FOLDER.rglob("test_*.py"))
    assert files and all("\npytestmark = pytest.mark.gpu\n" in file.read_text() for file in files)
