"""The reference pages of the command line are what the code says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("reference_pages")


@pytest.mark.parametrize("name", ["reference/cli.md", "reference/json.md", "llm/mcp.md"])
def test_a_page_is_current(pages: Any, name: str) -> None:
    text = (pages.DOCS / name).read_text(encoding="utf-8")
    assert text == pages.PAGES[name](), "run python tools/reference_pages.py --write"


def test_every_option_and_every_field_has_a_meaning(pages: Any) -> None:
    for text in (pages.cli_page(), pages.json_page(), pages.tools_text()):
        rows = [line for line in text.splitlines() if line.startswith("| `")]
        assert len(rows) > 40
        for row in rows:
            assert len(row.replace("\\|", "").split("|")[-2].strip()) > 5, row


def test_a_stale_page_is_named(pages: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    for folder in ("reference", "llm"):
        (tmp_path / folder).mkdir()
    (tmp_path / "llm/mcp.md").write_text("# Tools\n\n<!-- tools:begin -->\n<!-- tools:end -->\n")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr("sys.argv", ["reference_pages.py"])
    assert pages.main() == 1
    assert "stale: docs/reference/cli.md" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["reference_pages.py", "--write"])
    assert pages.main() == 0
    monkeypatch.setattr("sys.argv", ["reference_pages.py"])
    assert pages.main() == 0
