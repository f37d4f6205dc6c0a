"""``outblas mcp`` on the command line: its refusals, before any client talks to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outblas.runtime import device
from outblas_lab.mcp import stdio_server
from support.cli_fixture import assert_refused, outblas


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compilations", "-1"), "--compilations is -1"),
        (("--evaluations", "-5"), "--evaluations is -5"),
        (("--gpu-seconds", "-0.5"), "--gpu-seconds is -0.5"),
        (("--gpu-seconds", "nan"), "--gpu-seconds is nan"),
        (("--device", "nowhere.jsonl"), "--device"),
        (("--device", "cuda:0"), "no CUDA GPU was found"),
        (("--recording", "nowhere"), "recording 'nowhere' does not exist"),
        (("--fast",), "No such option"),
    ],
)
def test_what_makes_no_sense_is_one_line(options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_server, "require_sdk", lambda: None)
    assert_refused(outblas("mcp", *options), words)


def test_a_folder_of_something_else_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_server, "require_sdk", lambda: None)
    (tmp_path / "letter.txt").write_text("dear")
    assert_refused(outblas("mcp", "--run", str(tmp_path)), "is not a run", "pass another --run")
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_a_person_at_a_terminal_sees_that_it_waits_for_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_server, "require_sdk", lambda: None)
    monkeypatch.setattr(stdio_server, "serve", lambda session: None)
    result = outblas("mcp", "--device", "compile")
    assert result.exit_code == 0 and "waiting for a client on stdin" in result.stderr and not result.stdout


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert_refused(outblas("mcp"), "mcp is not installed", "'outblas-lab[mcp]'")
