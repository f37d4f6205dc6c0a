"""Runs of `outblas evolve` that go wrong: servers that never answer, keys that are echoed, folders that are moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas_lab.llm.evolve_folder import without_passwords
from outblas_lab.llm.evolve_journal import EvolveJournal
from support.llm_kernels import PROBLEM, answer, kernel, passed, record
from support.llm_server import Say, Script, serving

pytest.importorskip("openai")
KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "r.jsonl", *(passed(kernel(i), 3.9 - 0.1 * i) for i in range(12)))


def evolve(script: Script, recording: Path, folder: Path, requests: int, *more: object) -> tuple[int, str]:
    with serving(script) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", recording, "--parallel", 1, "--run", folder)
        arguments = ["evolve", "--mnk", PROBLEM.mnk, *options, "--budget", f"{requests} requests", *more]
        found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_a_server_that_answered_nothing_is_what_the_run_ends_with(recording: Path, tmp_path: Path) -> None:
    page = Say(body=b"<html>Sign in</html>", headers={"Content-Type": "text/html"})
    code, said = evolve(lambda request, number: page, recording, tmp_path / "run", 1)
    assert code == 2 and "none of 1 requests was answered" in said and "Sign in" in said
    assert "Sign in" in json.loads((tmp_path / "run" / "run.json").read_text())["ended"]
    code, said = evolve(lambda request, number: Say(answer(kernel(1).text)), recording, tmp_path / "run", 2)
    assert code == 0 and "none of" not in said


@pytest.mark.parametrize(("status", "echo"), [(400, KEY), (401, KEY), (429, KEY), (401, f"{KEY[:9]}\0{KEY[9:]}\u202e")])
def test_a_key_that_a_server_echoes_is_written_nowhere(status: int, echo: str, recording: Path, tmp_path: Path) -> None:
    def script(request: object, number: int) -> Say:
        return Say(f"Incorrect API key provided: {echo}.", status=status, headers={"Retry-After": "0"})

    _, said = evolve(script, recording, tmp_path / "run", 1)
    if status == 401:
        assert "[OPENAI_API_KEY]" in said
    evolve(lambda request, number: Say(answer(kernel(1).text)), recording, tmp_path / "run", 3)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"store.sqlite", "transcript.jsonl", "report.html", "run.json"} <= {path.name for path in written}
    assert KEY not in said and not [path for path in written if KEY.encode() in path.read_bytes()]


def test_a_key_with_an_end_of_line_is_the_key(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    _, said = evolve(lambda request, number: Say(answer(kernel(1).text)), recording, tmp_path / "run", 1)
    assert "proven" in said and "none of" not in said


def test_addresses_are_written_without_passwords() -> None:
    command = "outblas evolve --base-url https://me:word@host:8000/v1 --model a@b"
    assert without_passwords(command) == "outblas evolve --base-url https://...@host:8000/v1 --model a@b"


def test_a_folder_that_was_moved_is_the_same_run(recording: Path, tmp_path: Path) -> None:
    script = lambda request, number: Say(answer(kernel(number % 3).text))  # noqa: E731
    code, _ = evolve(script, recording, tmp_path / "here", 3, "--islands", 1, "--turns", 1)
    assert code == 0
    (tmp_path / "here").rename(tmp_path / "there")
    code, said = evolve(lambda request, number: Say(answer(kernel(7).text)), recording, tmp_path / "there", 4,
                        "--islands", 1, "--turns", 1)  # fmt: skip
    assert code == 0, said
    with EvolveJournal(tmp_path / "there" / "store.sqlite") as journal:
        last = [*journal.questions()][-1]
        assert last.parents and "Machine code: hgmma 8" in str(
            last.messages
        )  # of kernels that were proven before the move
        assert [o.kind for o in journal.outcomes().values()] == ["proven"] * 4


def test_what_differs_of_the_settings_is_named(recording: Path, tmp_path: Path) -> None:
    script = lambda request, number: Say(answer(kernel(1).text))  # noqa: E731
    assert evolve(script, recording, tmp_path / "run", 1)[0] == 0
    code, said = evolve(script, recording, tmp_path / "run", 2, "--seed", 5, "--islands", 2)
    said = " ".join(said.split())
    assert code == 2 and "(settings.seed, settings.shape.islands)" in said and "settings.seed=0" in said
