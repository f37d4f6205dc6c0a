"""``outblas evolve --gguf``: a recorded run of a small model, the end of its server, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.gguf_server import GgufServer, serving_gguf
from support.helpers import ROOT

pytest.importorskip("openai")

#: A folder with a stand-in for the package xllamacpp.
STAND_IN = ROOT / "tests" / "support" / "smollm2"
SETTINGS = EvolveSettings(parallel=2, max_tokens=100, prompt_tokens=800)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    monkeypatch.syspath_prepend(str(STAND_IN))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "small-model.gguf"
    path.write_bytes(b"GGUF and weights")
    return path


def run(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["evolve", "--mnk", "512_512_512", "--device", "compile", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def has_ended(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def child_of(weights: Path) -> int:
    return int(json.loads(weights.with_suffix(".json").read_text())["pid"])


def test_a_recorded_run_of_a_small_model(weights: Path, tmp_path: Path) -> None:
    code, said = run("--gguf", weights, "--budget", "4 requests", "--run", tmp_path / "run")
    assert code == 0, said
    assert "a question: about 3485 tokens of prompt, at most 2048 of answer; measured now: 100 tokens/s read, " in said
    assert "10.0 written, so at most about 240 s, 4 questions 16.0 min" in said
    recorded = json.loads((STAND_IN / "replies.json").read_text())
    kinds = [reply["kind"] for reply in recorded]
    assert kinds == ["cut", "malformed", "malformed", "malformed"]
    for number, kind in enumerate(kinds, 1):
        assert f"question {number}: no candidate, {kind}; spent {number} requests" in said
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["models"][0]["name"] == "small-model" and about["spent"]["answer_tokens"] == sum(
        reply["answer_tokens"] for reply in recorded
    )
    turns = [json.loads(line) for line in (tmp_path / "run" / "transcript.jsonl").read_text().splitlines()]
    assert [len(turn["messages"]) for turn in turns[:4]] == [2, 4, 4, 4], "earlier turns are left out"
    assert has_ended(child_of(weights))


def test_a_prompt_that_cannot_be_short_enough_is_refused(weights: Path, tmp_path: Path) -> None:
    code, said = run("--gguf", weights, "--prompt-tokens", "500", "--run", tmp_path / "run")
    assert code == 2 and "--prompt-tokens 500 is too small; expected at least" in said
    assert has_ended(child_of(weights))
    code, said = run("--gguf", weights, "--budget", "1 requests", "--run", tmp_path / "run")
    assert code == 0, "the same run goes on with another length"


def test_the_context_holds_all_conversations_and_progress_is_words(weights: Path) -> None:
    with serving_gguf(weights, SETTINGS) as server:
        assert json.loads(weights.with_suffix(".json").read_text())["context"] == 2 * (900 + 200 + 2000)
        assert server.progress() == "3743 tokens read, 310 written"
        assert server.rates() == (100.0, 10.0)
    assert has_ended(child_of(weights)) and server.progress() == ""
    assert GgufServer("http://127.0.0.1:9").progress() == ""


def test_the_server_ends_with_a_killed_process(weights: Path) -> None:
    code = (
        f"import sys, time; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from outblas_lab.llm.evolve import EvolveSettings\n"
        "from outblas_lab.llm.gguf_server import serving_gguf\n"
        f"with serving_gguf(Path({str(weights)!r}), EvolveSettings(prompt_tokens=1)):\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGKILL)
    assert has_ended(child_of(weights))


@pytest.mark.parametrize(
    "content, more, words",
    [
        (b"not a model", (), "is no GGUF file; expected a file that begins with GGUF; download it again"),
        (b"GGUF, damaged", (), "llama.cpp cannot load small-model.gguf: Failed to init server"),
        (b"GGUF and weights", ("--base-url", "http://127.0.0.1:9/v1"), "--gguf and --base-url are both given"),
        (b"GGUF and weights", ("--prompt-tokens", "0"), "--prompt-tokens is 0"),
    ],
)
def test_refusals_are_one_line(
    content: bytes, more: tuple[str, ...], words: str, weights: Path, tmp_path: Path
) -> None:
    weights.write_bytes(content)
    code, said = run("--gguf", weights, *more, "--run", tmp_path / "run")
    assert code == 2 and words in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_file_and_a_missing_package(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no GGUF file" in run("--gguf", tmp_path / "nothing.gguf")[1]
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    code, said = run("--gguf", weights)
    assert code == 2 and "xllamacpp" in said and "pip install 'outblas-lab[gguf]'" in said


def test_a_question_to_a_server_elsewhere_has_a_cost_in_dollars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    limits = ("--budget", "1 requests", "--max-tokens", "1000", "--prompt-tokens", "4000")
    said = run("--model", "m", "--price", "1,2", *limits, "--run", tmp_path / "run")[1]
    assert "a question: about 3485 tokens of prompt, at most 1000 of answer, 0.0055 USD\n" in said
