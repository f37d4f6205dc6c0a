"""``outblas evolve`` where nobody answers: it ends with an error, and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from support.llm_kernels import PROBLEM, answer, kernel, passed, record
from support.llm_server import Say, serving

pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "r.jsonl", *(passed(kernel(i), 3.9 - 0.1 * i) for i in range(4)))


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/v1"


def evolve(url: str, recording: Path, folder: Path, requests: int) -> tuple[int, str]:
    options = ("--model", "m", "--base-url", url, "--device", recording, "--parallel", 1, "--run", folder)
    arguments = ["evolve", "--mnk", PROBLEM.mnk, *options, "--budget", f"{requests} requests"]
    found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def answers(recording: Path, folder: Path, requests: int) -> tuple[int, str]:
    with serving(lambda request, number: Say(answer(kernel(1).text))) as server:
        return evolve(server.url, recording, folder, requests)


def test_no_server_is_an_error_that_says_what_to_do(nobody: str, recording: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for _ in range(2):  # the second time nothing is left to spend
        code, said = evolve(nobody, recording, run, 1)
        assert code == 2 and said.count("error: ") == 1
        for words in ("none of 1 requests was answered", "dropped", "a language model server", "--base-url"):
            assert words in said
    assert (run / "transcript.jsonl").is_file(), "what was asked is kept"
    code, said = answers(recording, run, 2)
    assert code == 0 and "none of" not in said, "with a larger budget it goes on"


def test_a_server_that_answered_before_and_is_gone_is_an_error(nobody: str, recording: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert answers(recording, run, 1)[0] == 0
    code, said = evolve(nobody, recording, run, 2)
    assert code == 2 and "none of 1 requests was answered" in said
    code, said = evolve(nobody, recording, run, 2)
    assert code == 0 and "ended:" in said, "nothing was asked, and the run has answers"
