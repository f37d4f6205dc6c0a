"""The transcript in docs/llm/mcp.md is what examples/mcp_agent.py prints."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from support.free_fixture import missing
from support.helpers import ROOT, SOURCE_PATH

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install './lab[mcp]'")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[tune]'")
PAGE = ROOT / "docs" / "llm" / "mcp.md"


@pytest.fixture(name="example")
def example_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("mcp_agent")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_page_has_the_transcript_of_a_session_today(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE_PATH, prepend=":")
    page = PAGE.read_text(encoding="utf-8")
    text = asyncio.run(example.transcript(tmp_path / "kernels"))
    assert page == example.with_transcript(page, text), f"run python examples/mcp_agent.py --page {PAGE}"


def test_times_of_the_machine_are_left_out(example: Any) -> None:
    said = "ptxas info    : Compile time = 34.799 ms, 2.493 us, 12 ms"
    assert example.without_times(said) == "ptxas info    : Compile time = ? ms, 2.493 us, ? ms"


def test_only_the_text_between_the_marks_is_replaced(example: Any) -> None:
    page = f"a\n{example.BEGIN}\nold\n{example.END}\nb\n"
    assert example.with_transcript(page, "new\n") == f"a\n{example.BEGIN}\n\nnew\n\n{example.END}\nb\n"
