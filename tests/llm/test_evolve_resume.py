"""An evolution's folder: its refusals, and the resumption of a killed run."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.store import Store
from outblas_lab.llm.archive import ArchiveShape
from outblas_lab.llm.budget import Budget
from outblas_lab.llm.evaluators import WithTemplates, open_chosen_evaluator, parse_evaluator
from outblas_lab.llm.evolve import Evolution
from outblas_lab.llm.evolve_folder import read_run
from outblas_lab.llm.evolve_journal import EvolveJournal
from outblas_lab.llm.evolve_run import write_recording
from support.evolve_fixture import evolve, key_fixture, recording_fixture  # noqa: F401
from support.gpus.known import H200
from support.helpers import SOURCE_PATH
from support.llm_kernels import PROBLEM, answer, failed, kernel, passed
from support.llm_server import Say, ScriptedServer, serving

pytest.importorskip("openai")


def test_bad_requests_are_refused_before_anything_is_asked(recording: Path, tmp_path: Path) -> None:
    with serving(lambda request, number: Say("Hm.")) as server:
        with pytest.raises(UsageError, match="price"):
            evolve(server, recording, tmp_path / "run", budget=Budget(usd=1.0))
        with pytest.raises(UsageError, match="twice"):
            evolve(server, recording, tmp_path / "run", problems=(PROBLEM, PROBLEM))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("x")
        with pytest.raises(UsageError, match="not a run"):
            evolve(server, recording, tmp_path / "mine")
        evolve(server, recording, tmp_path / "run", 1, turns=1)
        with pytest.raises(UsageError, match="settings"):
            evolve(server, recording, tmp_path / "run", 2, turns=1, seed=7)
        with pytest.raises(RecordError):
            evolve(server, tmp_path / "mine" / "thesis.tex", tmp_path / "odd")
        assert len(server.requests) == 1
    with pytest.raises(UsageError, match="--device"):
        parse_evaluator("tpu")


def test_a_run_that_was_killed_before_it_had_a_name_is_begun(recording: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".driver.lock").touch()
    (run / ".run.json.123.tmp").write_text("{")
    with serving(lambda request, number: Say("Hm.")) as server:
        evolve(server, recording, run, 1, turns=1)
    assert read_run(run)["kind"] == "evolve"


def test_a_run_is_not_resumed_on_another_kind_of_gpu(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda request, number: Say("Hm.")) as server:
        evolve(server, recording, tmp_path / "run", 1, turns=1)
        monkeypatch.setattr(WithTemplates, "gpu", replace(H200, name="b200"))
        with pytest.raises(UsageError, match=r"other settings \(gpu\).*gpu='h200'"):
            evolve(server, recording, tmp_path / "run", 2, turns=1)
        assert len(server.requests) == 1


def test_two_drivers_of_one_run_are_refused(recording: Path, tmp_path: Path) -> None:
    started = threading.Event()

    def script(request: dict[str, Any], number: int) -> Say:
        started.set()
        return Say("Hm.", stall_s=20)

    with serving(script) as server:
        thread = threading.Thread(target=evolve, args=(server, recording, tmp_path / "run", 1), kwargs={"turns": 1})
        thread.start()
        assert started.wait(20)
        with pytest.raises(RecordError, match="in use"):
            evolve(server, recording, tmp_path / "run", 1, turns=1)
        server.released.set()
        thread.join()


def test_what_a_gpu_measured_is_a_recording_for_other_runs(tmp_path: Path) -> None:
    config = Sm80MmaConfig(64, 64)
    told = [passed(kernel(1), 3.0), passed(config, 3.1), failed(kernel(2), Status.HANG, "why")]  # type: ignore[arg-type]
    for _ in range(2):  # a run that was resumed writes it again
        write_recording(tmp_path / "recorded.jsonl", told, H200, {"gpu": "NVIDIA H200"})
    with open_chosen_evaluator(parse_evaluator(str(tmp_path / "recorded.jsonl"))) as evaluator:
        asked = [(PROBLEM, kernel(1)), (PROBLEM, config), (PROBLEM, kernel(2))]
        assert list(evaluator.evaluate(asked)) == told and evaluator.baselines(PROBLEM) == {"lt_auto": 4.0}
    assert [p.name for p in tmp_path.iterdir()] == ["recorded.jsonl"]


def test_knobs_are_compiled_where_nothing_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    with open_chosen_evaluator(parse_evaluator("compile")) as evaluator:
        good, bad = Sm80MmaConfig(64, 64), Sm80MmaConfig(64, 64, wm=16)
        found = {e.config: e for e in evaluator.evaluate([(PROBLEM, good), (PROBLEM, bad)])}
    assert found[good].status is Status.LEFT_OUT and found[good].counters["hmma"] > 0
    assert found[bad].status is Status.ILLEGAL


# --- killed in the middle ---


def command(server: ScriptedServer, recording: Path, folder: Path, requests: int) -> list[str]:
    return [
        *(sys.executable, "-m", "outblas", "evolve", "--mnk", PROBLEM.mnk, "--model", "scripted"),
        *("--base-url", server.url, "--budget", f"{requests} requests", "--device", str(recording)),
        *("--run", str(folder), "--parallel", "2", "--turns", "2"),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE_PATH, "OPENAI_API_KEY": "test"}


@pytest.mark.parametrize("killed_at", [pytest.param(1, marks=pytest.mark.slow), 6])
def test_a_killed_run_goes_on_and_asks_nothing_twice(killed_at: int, recording: Path, tmp_path: Path) -> None:
    """SIGKILL while a request is under way; the question is the only one that is asked again."""
    heard: list[str] = []
    reached, killed = threading.Event(), threading.Event()

    def script(request: dict[str, Any], number: int) -> Say:
        if number == killed_at:
            reached.set()
            return Say("never heard", stall_s=60)
        heard.append(json.dumps(request["messages"]))
        return Say(answer(kernel(len(heard) % 20).text), stall_s=0.0)

    folder = tmp_path / "run"
    with serving(script) as server:
        run = subprocess.Popen(command(server, recording, folder, 10), env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            assert reached.wait(60)
            time.sleep(0.3)  # at its place by then
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            killed.set()
            server.released.set()
        with EvolveJournal(folder / "store.sqlite") as journal:
            entries, told = journal.entries(), journal.outcomes()
            answered = {q for q, r in journal.replies() if r.answered}
            lost = sum(r.outcome == "lost" for _, r in journal.replies())
        assert lost >= 1
        done = subprocess.run(command(server, recording, folder, 12), env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with EvolveJournal(folder / "store.sqlite") as journal, Store(folder / "store.sqlite") as store:
        assert journal.entries()[: len(entries)] == entries  # the same archive, and more
        assert dict(list(journal.outcomes().items())[: len(told)]) == told
        replies = Counter(q for q, r in journal.replies() if r.answered)
        assert set(replies.values()) == {1} and answered <= set(replies)  # a paid question is not asked again
        assert journal.spent().requests == 12
        assert set(journal.outcomes()) == set(replies)  # every answer was evaluated
        names = [config_name(e.config) for e in store.evaluations()]
        assert len(names) == len(set(names))
    assert "resume" not in done.stderr and re.search(r"report: .*report.html", done.stdout)


def test_the_next_draw_after_a_kill_is_the_one_that_would_have_been(recording: Path, tmp_path: Path) -> None:
    """With one conversation at a time, an interrupted run has the prompts of an uninterrupted one."""

    def script(request: dict[str, Any], number: int) -> Say:
        return Say(answer(kernel(number % 20).text))

    asked = []
    for pieces in ((9,), (1, 4, 5, 9)):
        with serving(script) as server:
            for until in pieces:
                evolve(server, recording, tmp_path / f"run{len(pieces)}", until, turns=2, shape=ArchiveShape(2, 0.05))
            asked.append([r["messages"] for r in server.requests])
    assert asked[0] == asked[1] and len(asked[0]) == 9


def test_ctrl_c_says_what_is_safe(recording: Path, tmp_path: Path) -> None:
    reached = threading.Event()

    def script(request: dict[str, Any], number: int) -> Say:
        if number == 2:
            reached.set()
            return Say("late", stall_s=60)
        return Say(answer(kernel(number).text))

    with serving(script) as server:
        run = subprocess.Popen(command(server, recording, tmp_path / "run", 9), env=environment(), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        assert reached.wait(60)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "resume with: outblas evolve" in said and "Traceback" not in said


def test_a_second_ctrl_c_while_the_first_ends_the_run_leaves_no_traceback(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def pressed_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    async def interrupted(evolution: Evolution) -> str:
        await asyncio.wait([asyncio.create_task(pressed_twice())])
        return "not reached"

    monkeypatch.setattr(Evolution, "run", interrupted)
    said = ""
    with serving(lambda request, number: Say("none")) as server:
        try:
            evolve(server, recording, tmp_path / "run")
        except KeyboardInterrupt as error:  # pytest.raises would keep it, and the task by it
            said = str(error)
    gc.collect()  # when a task is freed, asyncio logs an exception that no code took from it
    assert "0 answers evaluated and 0 requests used" in said and not caplog.records
