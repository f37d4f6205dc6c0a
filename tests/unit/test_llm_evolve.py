"""The whole loop against a scripted server, on recorded evaluations: every outcome, budgets, and kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm_kernels import PROBLEM, answer, config_answer, failed, kernel, passed, record
from llm_server import Say, ScriptedServer, serving
from outblas.config import Candidate, config_name
from outblas.errors import DeviceError, RecordError, ToolchainMissing, UsageError
from outblas.evaluation import Evaluation, Status
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.llm import evolve_run
from outblas.llm.archive import Shape
from outblas.llm.budget import Budget, Price
from outblas.llm.client import Patience, ServerError
from outblas.llm.evolve import Settings
from outblas.llm.evolve_run import Server, run_evolve, write_recording
from outblas.llm.ledger import Ledger
from outblas.llm.models import Model
from outblas.llm.places import Place, WithTemplates, open_place, parse_place
from outblas.llm.run_folder import EvolveFiles, read_run
from outblas.problem import Problem
from outblas.roofline import H200, floor_us
from outblas.store import Store

pytest.importorskip("openai")

MODELS = [Model("scripted")]
QUICK = Patience(silence_s=20, stall_s=20, attempts=4, first_s=0.001)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


def evolve(
    server: ScriptedServer, recording: Path, folder: Path, requests: int = 8, *, parallel: int = 1, turns: int = 3,
    problems: tuple[Problem, ...] = (PROBLEM,), models: list[Model] | None = None, budget: Budget | None = None,
    patience: Patience = QUICK, seed: int = 0, shape: Shape | None = None, kinds: tuple[str, ...] = ("code", "config"),
) -> tuple[str, EvolveFiles]:  # fmt: skip
    settings = Settings(shape or Shape(), seed, turns, parallel, kinds, max_tokens=1000)
    asked, limits, place = Server(server.url, patience), budget or Budget(requests=requests), Place(str(recording))
    unwatched = lambda *watched: lambda outcome: None  # noqa: E731
    return run_evolve(problems, models or MODELS, asked, place, limits, settings, folder, "test", unwatched)


def outcomes(folder: Path) -> list[tuple[str, str]]:
    with Ledger(folder / "store.sqlite") as ledger:
        return [(o.kind, o.answer) for o in ledger.outcomes().values()]


def last_user(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def in_turn(*says: Say) -> Callable[[dict[str, Any], int], Say]:
    return lambda request, number: says[min(number, len(says) - 1)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels 0 to 19 are right and faster and faster; 50 is wrong, 51 a cheat, 52 too fast, 53 does not compile."""
    config = Sm80MmaConfig(64, 64)
    return record(
        tmp_path_factory.mktemp("recording") / "free.jsonl",
        *(passed(kernel(i), 4.2 - 0.1 * i) for i in range(20)),
        failed(kernel(50), Status.WRONG, "exact: 3 of 4096 elements", log="C[63, 5] is 7, not 8"),
        failed(kernel(51), Status.RULE_BROKEN, "the answer is the last call's, keyed by address"),
        passed(kernel(52), 0.5 * floor_us(PROBLEM)),
        failed(kernel(53), Status.COMPILE_ERROR, "gemm does not compile", log='error: identifier "oops" is undefined'),
        passed(config, 3.1),  # type: ignore[arg-type]
    )


def test_every_kind_of_answer_is_handled_and_nothing_is_lost(recording: Path, tmp_path: Path) -> None:
    says = [
        Say(answer(kernel(53).text)),  # does not compile ...
        Say(status=429, headers={"Retry-After": "0"}),
        Say(answer(kernel(1).text)),  # ... repaired
        Say(drop=True),
        Say(answer(kernel(50).text)),  # wrong ...
        Say(answer(kernel(3).text)),  # ... repaired
        Say("late", stall_s=60),  # cut, and asked again
        Say(answer(kernel(51).text)),  # a cheat ...
        Say("I'm sorry, but I can't help with that."),  # ... then a refusal
        Say(""),
        Say("Tiles of 64, I think. \0"),  # malformed
        Say(answer(kernel(52).text)),  # faster than the floor
        Say(status=500),
        Say(answer("__global__ void gemm() {}")),  # no launch block
        Say(config_answer(family="sm80_mma_gemm", bm=64, bn=63)),  # not legal
        Say(config_answer(family="sm80_mma_gemm", bm=64, bn=64)),
        Say(answer(kernel(3).text + "// the same, with a remark\n")),
        Say("```cuda\nhalf", finish="length"),
    ]
    patience = Patience(silence_s=0.7, stall_s=20, attempts=4, first_s=0.001)
    with serving(in_turn(*says)) as server:
        reason, files = evolve(server, recording, tmp_path / "run", len(says), turns=2, patience=patience)
        prompts = [last_user(r) for r in server.requests]
    assert "18 requests" in reason and len(prompts) == len(says)
    assert outcomes(tmp_path / "run") == [
        ("compile", "code"), ("proven", "code"), ("wrong", "code"), ("proven", "code"), ("cheat", "code"),
        ("refusal", ""), ("empty", ""), ("malformed", ""), ("cheat", "code"), ("contract", "code"),
        ("illegal", "config"), ("proven", "config"), ("duplicate", "code"), ("cut", ""),
    ]  # fmt: skip
    assert 'identifier "oops" is undefined' in prompts[1]
    assert prompts[2] == prompts[1] and prompts[4] == prompts[3] and prompts[7] == prompts[6]  # asked again as it was
    assert "C[63, 5] is 7, not 8" in prompts[5] and "3 of 4096" in prompts[5]
    assert "keyed by address" in prompts[8]
    assert "faster than the hardware" in prompts[12]
    assert kernel(1).text.strip() in prompts[9]  # what was proven is shown to the island's next chain

    with Store(files.store) as store, Ledger(files.store) as ledger:
        names = [config_name(e.config) for e in store.evaluations("run")]
        assert len(names) == len(set(names)) == 7  # every candidate once
        assert {e.name for e in ledger.entries()} == {
            kernel(1).name,
            kernel(3).name,
            config_name(Sm80MmaConfig(64, 64)),
        }
        assert Counter(r.outcome for _, r in ledger.replies()) == {
            "answered": 14, "http 429": 1, "dropped": 1, "timeout": 1, "http 500": 1,
        }  # fmt: skip
    about = json.loads(files.run.read_text())
    assert about["spent"]["requests"] == len(says) and about["ended"] == reason
    best = about["best"][PROBLEM.key]
    assert best["candidate"] == config_name(Sm80MmaConfig(64, 64))
    assert json.loads((files.best / best["file"]).read_text())["bm"] == 64
    transcript = [json.loads(line) for line in files.transcript.read_text().splitlines()]
    *done, unsent = transcript  # the budget ended before the last follow-up was sent
    assert unsent["attempts"] == [] and unsent["outcome"] is None
    assert [t["outcome"]["kind"] for t in done] == [kind for kind, _ in outcomes(tmp_path / "run")]
    assert [a["text"] for t in transcript for a in t["attempts"] if a["outcome"] == "answered"] == [
        s.text for s in says if s.status == 200 and not s.drop and not s.stall_s
    ]
    assert files.report.is_file()


def test_a_conversation_holds_its_answers_and_ends_after_its_turns(recording: Path, tmp_path: Path) -> None:
    with serving(in_turn(Say(answer(kernel(50).text)), Say(""), Say(answer(kernel(1).text)))) as server:
        evolve(server, recording, tmp_path / "run", 4, turns=3)
        roles = [[m["role"] for m in r["messages"]] for r in server.requests]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "user"],  # servers refuse an empty answer as part of a conversation
        ["system", "user"],
    ]


def test_what_was_proven_is_improved_in_the_same_conversation(recording: Path, tmp_path: Path) -> None:
    with serving(lambda request, number: Say(answer(kernel(number).text))) as server:
        evolve(server, recording, tmp_path / "run", 4, turns=2)
        follow_up = last_user(server.requests[1])
    assert "4.20 us" in follow_up and f"the floor is {floor_us(PROBLEM):.2f} us" in follow_up


class Counting:
    """An evaluator that counts what it is asked, and may fail."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked, self.fail = inner, list[str](), 0
        self.gpu, self.source = inner.gpu, inner.source

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        for problem, candidate in pairs:
            self.asked.append(config_name(candidate))
            if len(self.asked) == self.fail:
                raise DeviceError("the GPU has gone", "a GPU", "plug it in")
            yield from self.inner.evaluate([(problem, candidate)])

    def baselines(self, problem: Problem) -> dict[str, float]:
        return dict(self.inner.baselines(problem))


def test_a_failing_device_loses_no_answer(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    made: list[Counting] = []

    class Opened:
        def __init__(self, place: Place) -> None:
            self.context = open_place(place)

        def __enter__(self) -> Counting:
            made.append(Counting(self.context.__enter__()))
            made[-1].fail = 3 if len(made) == 1 else 0
            return made[-1]

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)

    monkeypatch.setattr(evolve_run, "open_place", Opened)
    with serving(lambda request, number: Say(answer(kernel(number).text))) as server:
        with pytest.raises(DeviceError, match="the GPU has gone"):
            evolve(server, recording, tmp_path / "run", 8, parallel=2)
        evolve(server, recording, tmp_path / "run", 8, parallel=2)
        assert len(server.requests) == 8
    assert Counter(kind for kind, _ in outcomes(tmp_path / "run")) == {"proven": 8}
    del made[0].asked[2]  # on which it failed
    assert sorted(made[0].asked + made[1].asked) == sorted(kernel(i).name for i in range(8))  # none twice


def test_an_evaluation_that_was_recorded_is_not_made_again(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the evaluation's record and its outcome's: here the second outcome cannot be written."""
    settle, count = Ledger.settle, iter(range(99))

    def fails_once(self: Ledger, *arguments: Any) -> None:
        if next(count) == 1:
            raise RecordError("the disk is full", "space", "free some")
        settle(self, *arguments)

    monkeypatch.setattr(Ledger, "settle", fails_once)
    with serving(lambda request, number: Say(answer(kernel(number).text))) as server:
        with pytest.raises(RecordError, match="the disk is full"):
            evolve(server, recording, tmp_path / "run", 4)
        with Store(tmp_path / "run" / "store.sqlite") as store, Ledger(tmp_path / "run" / "store.sqlite") as ledger:
            assert len(list(store.evaluations())) == 2 and len(ledger.entries()) == len(ledger.outcomes()) == 1
        evolve(server, recording, tmp_path / "run", 4)
        assert len(server.requests) == 4
    with Store(tmp_path / "run" / "store.sqlite") as store:
        assert [config_name(e.config) for e in store.evaluations()] == [kernel(i).name for i in range(4)]
    assert outcomes(tmp_path / "run") == [("proven", "code")] * 4


def test_the_same_idea_at_the_same_time_is_evaluated_once(recording: Path, tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=20)

    def script(request: dict[str, Any], number: int) -> Say:
        return Say(answer(kernel(1).text + f"// {number}\n"), wait=together.wait if number < 4 else None)

    with serving(script) as server:
        evolve(server, recording, tmp_path / "run", 6, parallel=4, turns=2)
    with Store(tmp_path / "run" / "store.sqlite") as store, Ledger(tmp_path / "run" / "store.sqlite") as ledger:
        assert len(list(store.evaluations())) == 1 and len(ledger.entries()) == 1
        words = [o.words for o in ledger.outcomes().values() if o.kind == "duplicate"]
    assert Counter(kind for kind, _ in outcomes(tmp_path / "run")) == {"proven": 1, "duplicate": 5}
    assert all(w.startswith("proven\nstatus: passed") for w in words)


def test_a_kernel_for_a_tool_that_is_missing_is_told_so(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any) -> None:
        raise ToolchainMissing("CUTLASS is not installed", "its headers", "pip install nvidia-cutlass")

    monkeypatch.setattr("outblas.free.gate.examine", missing)
    text = kernel(1).text.replace('"acc"', '"uses": ["cutlass"], "acc"')
    with serving(in_turn(Say(answer(text)), Say(answer(kernel(2).text)))) as server:
        evolve(server, recording, tmp_path / "run", 2, turns=2)
        assert "CUTLASS is not installed" in last_user(server.requests[1])
    assert outcomes(tmp_path / "run") == [("contract", "code"), ("proven", "code")]
    with serving(in_turn(Say(answer(kernel(77).text)))) as server, pytest.raises(ToolchainMissing):
        evolve(server, recording, tmp_path / "other", 2)  # NVRTC itself: nothing that a model could do without


def test_a_server_that_goes_away_ends_the_run_and_its_questions_are_asked_again(
    recording: Path, tmp_path: Path
) -> None:  # fmt: skip
    up = threading.Event()

    def script(request: dict[str, Any], number: int) -> Say:
        return Say(answer(kernel(number % 20).text)) if number < 2 or up.is_set() else Say(status=503)

    with serving(script) as server:
        with pytest.raises(ServerError, match="in a row"):
            evolve(server, recording, tmp_path / "run", budget=Budget(requests=40))
        assert len(outcomes(tmp_path / "run")) == 2
        down = [r["messages"] for r in server.requests[2:]]
        assert len(down) == 3 * QUICK.attempts
        up.set()
        before = len(server.requests)
        evolve(server, recording, tmp_path / "run", budget=Budget(requests=before + 4))
        again = [r["messages"] for r in server.requests[before:]]
    assert all(question in again for question in down)
    assert len(outcomes(tmp_path / "run")) == 2 + 4


def test_a_model_that_the_server_does_not_know(recording: Path, tmp_path: Path) -> None:
    with serving(in_turn(Say("The model does not exist", status=404))) as server:
        with pytest.raises(ServerError, match="does not exist"):
            evolve(server, recording, tmp_path / "run")
        assert len(server.requests) == 1
    assert outcomes(tmp_path / "run") == []


def test_a_question_too_long_for_the_server_is_left_behind(recording: Path, tmp_path: Path) -> None:
    says = (Say("context too long", status=400), Say(answer(kernel(1).text)))
    with serving(in_turn(*says)) as server:
        evolve(server, recording, tmp_path / "run", 2)
    assert [kind for kind, _ in outcomes(tmp_path / "run")] == ["unanswered", "proven"]


@pytest.mark.parametrize("parallel", [1, 4])
def test_the_budget_is_never_passed(parallel: int, recording: Path, tmp_path: Path) -> None:
    """Though requests under way reserve more than they take, what is left is used."""
    price = Price(1.0, 2.0)
    with serving(lambda request, number: Say(answer(kernel(number % 20).text), answer_tokens=400)) as server:
        evolve(server, recording, tmp_path / "run", parallel=parallel, models=[Model("m", price=price)],
               budget=Budget(usd=0.04))  # fmt: skip
        done = len(server.requests)
    with Ledger(tmp_path / "run" / "store.sqlite") as ledger:
        spent = ledger.spent()
    assert spent.requests == done >= 5
    assert spent.usd == pytest.approx(done * (100 + 2 * 400) / 1e6) and spent.usd <= 0.04


def test_problems_far_from_their_floor_are_tried_more(tmp_path: Path) -> None:
    near, far = Problem(512, 512, 512), Problem(512, 512, 1024)
    recording = record(tmp_path / "r.jsonl", passed(kernel(1), 1.1 * floor_us(near), near), passed(kernel(1), 4, far))

    with serving(lambda request, number: Say("Hm.")) as server:
        evolve(server, recording, tmp_path / "run", 10, turns=1, problems=(near, far))
    with Ledger(tmp_path / "run" / "store.sqlite") as ledger:
        asked = Counter(q.problem for q in ledger.questions())
    # The baseline of both is 4 us, their floors 1 us: the same gap, as long as nothing is proven.
    assert abs(asked[near.key] - asked[far.key]) <= 1
    with serving(lambda request, number: Say(answer(kernel(1).text))) as server:
        evolve(server, recording, tmp_path / "other", 10, turns=1, problems=(near, far))
    with Ledger(tmp_path / "other" / "store.sqlite") as ledger:
        asked = Counter(q.problem for q in ledger.questions())
    assert asked[far.key] >= 3 * asked[near.key] > 0


def test_what_was_not_asked_for_is_not_tried(recording: Path, tmp_path: Path) -> None:
    says = (Say(answer(kernel(1).text)), Say(config_answer(family="sm80_mma_gemm", bm=64, bn=64)))
    with serving(in_turn(*says)) as server:
        evolve(server, recording, tmp_path / "run", 2, kinds=("config",))
        assert "not asked for" in last_user(server.requests[1])
    assert outcomes(tmp_path / "run") == [("malformed", "code"), ("proven", "config")]


def test_models_take_turns(recording: Path, tmp_path: Path) -> None:
    with serving(lambda request, number: Say("Hm.")) as server:
        evolve(server, recording, tmp_path / "run", 6, turns=1, models=[Model("a"), Model("b")])
        assert [r["model"] for r in server.requests] == ["a", "b"] * 3


def test_bad_requests_are_refused_before_anything_is_asked(recording: Path, tmp_path: Path) -> None:
    with serving(lambda request, number: Say("Hm.")) as server:
        with pytest.raises(UsageError, match="price"):
            evolve(server, recording, tmp_path / "run", budget=Budget(usd=1.0))
        with pytest.raises(UsageError, match="twice"):
            evolve(server, recording, tmp_path / "run", problems=(PROBLEM, PROBLEM))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("x")
        with pytest.raises(UsageError, match="no run"):
            evolve(server, recording, tmp_path / "mine")
        evolve(server, recording, tmp_path / "run", 1, turns=1)
        with pytest.raises(UsageError, match="settings"):
            evolve(server, recording, tmp_path / "run", 2, turns=1, seed=7)
        with pytest.raises(RecordError):
            evolve(server, tmp_path / "mine" / "thesis.tex", tmp_path / "odd")
        assert len(server.requests) == 1
    with pytest.raises(UsageError, match="--device"):
        parse_place("tpu")


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
    with open_place(parse_place(str(tmp_path / "recorded.jsonl"))) as evaluator:
        asked = [(PROBLEM, kernel(1)), (PROBLEM, config), (PROBLEM, kernel(2))]
        assert list(evaluator.evaluate(asked)) == told and evaluator.baselines(PROBLEM) == {"lt_auto": 4.0}
    assert [p.name for p in tmp_path.iterdir()] == ["recorded.jsonl"]


def test_knobs_are_compiled_where_nothing_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    with open_place(parse_place("compile")) as evaluator:
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
    return {**os.environ, "PYTHONPATH": "src", "OPENAI_API_KEY": "test"}


@pytest.mark.parametrize("killed_at", [1, 6])
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
            time.sleep(0.3)  # wherever it is by then
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            killed.set()
            server.released.set()
        with Ledger(folder / "store.sqlite") as ledger:
            entries, told = ledger.entries(), ledger.outcomes()
            answered = {q for q, r in ledger.replies() if r.answered}
            lost = sum(r.outcome == "lost" for _, r in ledger.replies())
        assert lost >= 1
        done = subprocess.run(command(server, recording, folder, 12), env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with Ledger(folder / "store.sqlite") as ledger, Store(folder / "store.sqlite") as store:
        assert ledger.entries()[: len(entries)] == entries  # the same archive, and more
        assert dict(list(ledger.outcomes().items())[: len(told)]) == told
        replies = Counter(q for q, r in ledger.replies() if r.answered)
        assert set(replies.values()) == {1} and answered <= set(replies)  # what was paid for is not asked again
        assert ledger.spent().requests == 12
        assert set(ledger.outcomes()) == set(replies)  # every answer was evaluated
        names = [config_name(e.config) for e in store.evaluations()]
        assert len(names) == len(set(names))
    assert "resume" not in done.stderr and re.search(r"report: .*report.html", done.stdout)


def test_the_next_draw_after_a_kill_is_the_one_that_would_have_been(recording: Path, tmp_path: Path) -> None:
    """One conversation at a time: the prompts of a run in pieces are those of a run in one."""

    def script(request: dict[str, Any], number: int) -> Say:
        return Say(answer(kernel(number % 20).text))

    asked = []
    for pieces in ((9,), (1, 4, 5, 9)):
        with serving(script) as server:
            for until in pieces:
                evolve(server, recording, tmp_path / f"run{len(pieces)}", until, turns=2, shape=Shape(2, 0.05))
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
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130 and "resume with: outblas evolve" in said and "Traceback" not in said
