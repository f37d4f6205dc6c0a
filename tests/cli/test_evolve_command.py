"""``outblas evolve`` on the command line: its refusals, its progress, and the paths of its results."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas_lab.cli import evolve
from outblas_lab.llm.budget import Budget, Cost, SpendingAccount
from support.json_output import document
from support.llm_kernels import PROBLEM, answer, kernel, passed, record
from support.llm_server import Say, serving

pytest.importorskip("openai")
runner = CliRunner()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


#: Tests run without a GPU, where the default device is refused.
COMPILE = ("--device", "compile")


def run(*arguments: object) -> tuple[int, str]:
    found = runner.invoke(app, ["evolve", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "m"], "mnk"),
        (["--mnk", "64_64_64"], "model"),
        (["--mnk", "64_64", "--model", "m"], "M_N_K"),
        (["--mnk", "64_64_64", "--model", "m,"], "comma-separated names"),
        (["--mnk", "64_64_64", "--model", "m", "--budget", "5 apples"], "requests, tokens, USD or s"),
        (["--mnk", "64_64_64", "--model", "m", "--budget", "1 USD", "--device", "compile"], "price"),
        (["--mnk", "64_64_64", "--model", "m", "--device", "nowhere.jsonl"], "--device"),
        (["--mnk", "64_64_64", "--model", "m"], "no CUDA GPU was found to prove and time the kernels"),
        (["--mnk", "64_64_64", "--model", "m", "--gpus", "0,1"], "add --workers"),
        (["--mnk", "64_64_64", "--model", "m", "--workers", "local"], "cannot run kernels"),
        (["--mnk", "64_64_64", "--model", "m", "--workers", "local", "--gpus", "0,1"], "no CUDA GPU was found"),
        (["--mnk", "64_64_64", "--model", "m", *COMPILE, "--islands", "0"], "--islands"),
        (["--mnk", "64_64_64", "--model", "m", *COMPILE, "--turns", "0"], "--turns"),
        (["--mnk", "64_64_64", "--model", "m", *COMPILE, "--timeout", "0"], "--timeout"),
        (["--mnk", "64_64_64", "--model", "m", *COMPILE, "--answers", "poems"], "--answers"),
        (["--mnk", "64_64_64", "--model", "m", *COMPILE, "--requests-per-minute", "0"], "--requests-per-minute"),
        (["--mnk", "64_64_64", "--model", "m", "--device", "compile", "--base-url", "localhost:8000/v1"], "http://"),
        (["--mnk", "64_64_64,64_64_64", "--model", "m", "--device", "compile"], "twice"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run(*arguments)
    assert code == 2 and words in said and said.count("\n") == 1
    assert not list(tmp_path.rglob("store.sqlite"))


def test_no_server_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL")
    code, said = run("--mnk", "64_64_64", "--model", "m", "--device", "compile", "--run", tmp_path / "run")
    assert code == 2 and "OPENAI_API_KEY" in said


def test_it_says_what_comes_and_where_it_went(tmp_path: Path) -> None:
    recording = record(tmp_path / "r.jsonl", *(passed(kernel(i), 3.9 - 0.1 * i) for i in range(4)))
    with serving(lambda request, number: Say(answer(kernel(number % 4).text), prompt_tokens=3000)) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", recording, "--parallel", 1, "--price", "1,2")
        code, said = run("--mnk", PROBLEM.mnk, *options, "--budget", "4 requests", "--run", tmp_path / "run")
    assert code == 0, said
    first = "question 1: code, proven, 3.90 us, 1.026x; spent 1 requests, 3050 tokens, 0.0031 USD (25%"
    assert first in said
    for name in ("best", "transcript.jsonl", "report.html", "store.sqlite"):
        assert str(tmp_path / "run" / name) in said and (tmp_path / "run" / name).exists()
    assert (tmp_path / "run" / "best" / f"{PROBLEM.key}.cu").read_text() == kernel(3).text
    code, said = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "p.html")]), ""
    assert code.exit_code == 0 and (tmp_path / "p.html").is_file()


@pytest.mark.parametrize("device", ["compile", "recording"])
def test_a_device_that_runs_nothing_says_so_before_the_first_request(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, shown = io.StringIO(), list[str]()
    monkeypatch.setattr(evolve, "err", Console(file=screen, width=200))

    def reply(request: object, number: int) -> Say:
        shown.append(screen.getvalue())
        return Say("no kernel")

    where = "compile" if device == "compile" else record(tmp_path / "r.jsonl", passed(kernel(0), 3.9))
    with serving(reply) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", where, "--budget", "1 requests")
        code, said = run("--mnk", PROBLEM.mnk, *options, "--run", tmp_path / "run")
    assert code == 0, said
    assert "are compiled, but not proven or timed" in shown[0]


def test_what_an_evolution_found_is_a_document(tmp_path: Path) -> None:
    recording = record(tmp_path / "r.jsonl", passed(kernel(0), 3.9))
    with serving(lambda request, number: Say(answer(kernel(0).text))) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", str(recording), "--budget", "1 requests")
        words = ("--mnk", PROBLEM.mnk.replace("_", ","), *options, "--run", str(tmp_path / "run"))
        found = document("evolve", *words, "--json")
    assert found["files"]["best"] == str(tmp_path / "run" / "best") and found["facts"]["spent"]["requests"] == 1
    assert found["facts"]["best"][PROBLEM.key]["us"] == 3.9


def test_what_is_left_is_told_by_the_rate_of_this_session() -> None:
    account = SpendingAccount(Budget(requests=100), Cost(80))
    client: Any = SimpleNamespace(seconds=10.0)
    assert "left" not in evolve.spent_words(account.budget, account, client)
    account.settle(Cost(), Cost(10))
    assert "(90% of the budget, about 10 s left)" in evolve.spent_words(account.budget, account, client)


def test_the_live_view_shows_every_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(evolve, "err", Console(file=screen, force_terminal=True, width=160, highlight=False))
    shown: list[str] = []
    table = evolve.table

    def seen(*arguments: object) -> object:
        found = table(*arguments)  # type: ignore[arg-type]
        console = Console(file=io.StringIO(), width=160)
        console.print(found)
        shown.append(console.file.getvalue())  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(evolve, "table", seen)
    recording = record(tmp_path / "r.jsonl", *(passed(kernel(i), 3.9 - 0.1 * i) for i in range(4)))
    with serving(lambda request, number: Say(answer(kernel(number % 4).text), stall_s=0.3)) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", recording, "--parallel", 1)
        code, _ = run("--mnk", PROBLEM.mnk, *options, "--budget", "4 requests", "--run", tmp_path / "run")
    assert code == 0
    last = shown[-1]
    assert PROBLEM.key in last and "proven" in last and "4 requests" in last and "3.60" in last
