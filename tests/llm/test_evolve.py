"""The whole loop against a scripted server, on recorded evaluations: every outcome, budgets, and kill -9."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import Candidate, config_name
from outblas.core.errors import DeviceError, RecordError, ToolchainMissing
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.store import Store
from outblas_lab.jail.plausibility import least_us
from outblas_lab.llm import evolve_run
from outblas_lab.llm.budget import Budget, Price
from outblas_lab.llm.client import RetryPolicy, ServerError
from outblas_lab.llm.evaluators import EvaluatorChoice, open_chosen_evaluator
from outblas_lab.llm.evolve_journal import EvolveJournal
from outblas_lab.llm.models import Model
from outblas_lab.publish.html.tune_page import write_report
from support.evolve_fixture import QUICK, evolve, in_turn, key_fixture, last_user, outcomes, recording_fixture  # noqa: F401
from support.gpus.known import H200
from support.llm_kernels import PROBLEM, answer, config_answer, kernel, passed, record
from support.llm_server import Say, serving

pytest.importorskip("openai")


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
    retry_policy = RetryPolicy(silence_s=0.7, stall_s=20, attempts=4, first_s=0.001)
    with serving(in_turn(*says)) as server:
        reason, files = evolve(server, recording, tmp_path / "run", len(says), turns=2, retry_policy=retry_policy)
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
    assert kernel(1).text.strip() in prompts[9]  # the island's next chain sees the proven kernel

    with Store(files.store) as store, EvolveJournal(files.store) as journal:
        names = [config_name(e.config) for e in store.evaluations("run")]
        assert len(names) == len(set(names)) == 7  # every candidate once
        assert {e.name for e in journal.entries()} == {
            kernel(1).name,
            kernel(3).name,
            config_name(Sm80MmaConfig(64, 64)),
        }
        assert Counter(r.outcome for _, r in journal.replies()) == {
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
        s.text.replace("\0", "") for s in says if s.status == 200 and not s.drop and not s.stall_s
    ]
    assert write_report(files.path, files.report).is_file()


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
    assert "4.20 us" in follow_up and f"the floor is {floor_us(PROBLEM, H200):.2f} us" in follow_up


class Counting:
    """An evaluator that counts what it is asked, and may fail."""

    draws_while_busy = False

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
        def __init__(self, place: EvaluatorChoice) -> None:
            self.context = open_chosen_evaluator(place)

        def __enter__(self) -> Counting:
            made.append(Counting(self.context.__enter__()))
            made[-1].fail = 3 if len(made) == 1 else 0
            return made[-1]

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)

    monkeypatch.setattr(evolve_run, "open_chosen_evaluator", Opened)
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
    settle, count = EvolveJournal.settle, iter(range(99))

    def fails_once(self: EvolveJournal, *arguments: Any) -> None:
        if next(count) == 1:
            raise RecordError("the disk is full", "space", "free some")
        settle(self, *arguments)

    monkeypatch.setattr(EvolveJournal, "settle", fails_once)
    with serving(lambda request, number: Say(answer(kernel(number).text))) as server:
        with pytest.raises(RecordError, match="the disk is full"):
            evolve(server, recording, tmp_path / "run", 4)
        with (
            Store(tmp_path / "run" / "store.sqlite") as store,
            EvolveJournal(tmp_path / "run" / "store.sqlite") as journal,
        ):
            assert len(list(store.evaluations())) == 2 and len(journal.entries()) == len(journal.outcomes()) == 1
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
    with Store(tmp_path / "run" / "store.sqlite") as store, EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        assert len(list(store.evaluations())) == 1 and len(journal.entries()) == 1
        words = [o.words for o in journal.outcomes().values() if o.kind == "duplicate"]
    assert Counter(kind for kind, _ in outcomes(tmp_path / "run")) == {"proven": 1, "duplicate": 5}
    assert all(w.startswith("proven\nstatus: passed") for w in words)


def test_a_kernel_for_a_tool_that_is_missing_is_told_so(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any) -> None:
        raise ToolchainMissing("CUTLASS is not installed", "its headers", "pip install nvidia-cutlass")

    monkeypatch.setattr("outblas_lab.jail.static_gate.examine", missing)
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
    """Requests in progress reserve more than they cost, and the rest of the budget is still used."""
    price, said = Price(1.0, 2.0), Say(prompt_tokens=3000, answer_tokens=400)
    with serving(lambda request, number: replace(said, text=answer(kernel(number % 20).text))) as server:
        evolve(server, recording, tmp_path / "run", parallel=parallel, models=[Model("m", price=price)],
               budget=Budget(usd=0.06))  # fmt: skip
        done = len(server.requests)
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        spent = journal.spent()
    assert spent.requests == done >= 5
    assert spent.usd == pytest.approx(done * (3000 + 2 * 400) / 1e6) and spent.usd <= 0.06


def test_problems_far_from_their_floor_are_tried_more(tmp_path: Path) -> None:
    near, far = Problem(512, 512, 512), Problem(512, 512, 1024)
    recording = record(
        tmp_path / "r.jsonl", passed(kernel(1), 1.05 * least_us(near, H200), near), passed(kernel(1), 4, far)
    )

    with serving(lambda request, number: Say("Hm.")) as server:
        evolve(server, recording, tmp_path / "run", 10, turns=1, problems=(near, far))
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        asked = Counter(q.problem for q in journal.questions())
    # The baseline of both is 4 us, their floors 1 us: the same gap, as long as nothing is proven.
    assert abs(asked[near.key] - asked[far.key]) <= 1
    with serving(lambda request, number: Say(answer(kernel(1).text))) as server:
        evolve(server, recording, tmp_path / "other", 10, turns=1, problems=(near, far))
    with EvolveJournal(tmp_path / "other" / "store.sqlite") as journal:
        asked = Counter(q.problem for q in journal.questions())
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
