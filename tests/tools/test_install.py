"""tools/install.py: pip's settings reach uv, and pip stands in for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.helpers import ROOT, module_of_file

#: Writes its variables of uv and the words given into a file, and ends with a status.
SAYS = """
import json, os, sys
path, status, *words = sys.argv[1:]
told = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
open(path, "w").write(json.dumps([told, words]))
print("no such thing", file=sys.stderr)
sys.exit(int(status))
"""


@pytest.fixture(name="tool")
def tool_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "tools" / "install.py", monkeypatch)


@pytest.fixture(name="stand_in")
def stand_in_fixture(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces both installers by programs that end with the given statuses."""

    def replaced(uv: int, pip: int) -> None:
        for name, status in (("uv", uv), ("pip", pip)):

            def command(python: str, wanted: list[str], name: str = name, status: int = status) -> list[str]:
                return [sys.executable, "-c", SAYS, str(tmp_path / name), str(status), python, *wanted]

            monkeypatch.setattr(tool, f"command_of_{name}", command)

    return replaced


def test_settings_of_pip_become_those_of_uv(tool: Any) -> None:
    listed = "\n".join(
        [
            "global.extra-index-url='https://a/simple\\nhttps://b/simple'",
            "global.find-links='/one'",
            "global.timeout='60'",
            "install.constraint='/c.txt'",
            "download.index-url='https://not/for/this'",
            ":env:.find-links='/two /three'",
            ":env:.index-url='https://mirror/simple'",
        ]
    )
    assert tool.passed_on(listed) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/two,/three",
        "UV_CONSTRAINT": "/c.txt",
        "UV_DEFAULT_INDEX": "https://mirror/simple",
    }


def test_pip_does_not_run_where_uv_has_installed(tool: Any, stand_in: Any, tmp_path: Path) -> None:
    stand_in(uv=0, pip=0)
    given = {"PIP_FIND_LINKS": "/wheels", "PIP_CONFIG_FILE": "/dev/null", "UV_INDEX": "https://own/simple"}
    assert tool.install("/a/python", ["--editable", ".[dev]"], given) == 0
    told, words = json.loads((tmp_path / "uv").read_text())
    assert told["UV_FIND_LINKS"] == "/wheels" and told["UV_INDEX"] == "https://own/simple"
    assert words == ["/a/python", "--editable", ".[dev]"] and not (tmp_path / "pip").exists()


@pytest.mark.parametrize("status", [0, 3])
def test_where_uv_fails_pip_installs_the_same_and_counts(
    tool: Any, stand_in: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    stand_in(uv=1, pip=status)
    assert tool.install("/a/python", ["a", "b>=1"], {}) == status
    assert json.loads((tmp_path / "pip").read_text()) == [{}, ["/a/python", "a", "b>=1"]]
    assert "note: pip installs, since uv did not: no such thing" in capfd.readouterr().out


def test_another_interpreter_may_be_named(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(tool, "install", lambda python, wanted, _: asked.append((python, wanted)) or 0)
    assert tool.main(["--python", "/a/python", "x"]) == tool.main(["x", "y"]) == 0
    assert asked == [("/a/python", ["x"]), (sys.executable, ["x", "y"])]
    assert "/a/python" in tool.command_of_uv("/a/python", ["x"]) and tool.command_of_uv("p", ["x"])[-1] == "x"
    assert tool.command_of_pip("/a/python", ["x"])[-1] == "x"
