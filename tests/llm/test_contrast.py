"""Contrastive training: pairs in prompts, the archive that training fills, and a kill in between."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import RecordError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.legality import why_illegal
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.train.answer_judge import JudgedAnswer
from outblas_lab.llm.train.dataset import proven_evaluations
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.languages import CudaAnswers
from outblas_lab.llm.train.step_prompts import StepPrompts, TrainingArchive, archive_of_stage, begin_archive
from support.gpus.known import H200
from support.llm_kernels import BASELINE_US, failed, kernel, passed, record
from support.training.tiny_training import (
    PROBLEM,
    STEPS,
    answers,
    go,
    installed_fixture,  # noqa: F401
    lines,
    one_thread_fixture,  # noqa: F401
    same_weights,
    train_and_kill,
)  # fmt: skip

LANGUAGE = KnobWords()
#: Outcome of an answer -> its word in the next turn's prompt.
KIND = {"passed": "proven", "wrong": "wrong", "illegal": "illegal"}
#: A checkpoint is of step 2, in the middle of a conversation.
TURNS = 3


def sentences() -> list[str]:
    return [" ".join(words) for words in itertools.product(*LANGUAGE.words())]


def config(sentence: str) -> Any:
    return LANGUAGE.read(PROBLEM, sentence)


@pytest.fixture(name="recording", scope="module")
def recording_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every sentence's kernel: the larger the tile, the faster; a quarter of them is wrong."""
    found = []
    for number, sentence in enumerate(sentences()):
        one = config(sentence)
        if why_illegal(PROBLEM, one, H200) is None:
            wrong = failed(one, Status.WRONG, "exact: 3 of 4096 elements")
            found.append(wrong if number % 4 == 3 else passed(one, BASELINE_US * 128 / math.sqrt(one.bm * one.bn)))
    return record(tmp_path_factory.mktemp("recording") / "knobs.jsonl", *found)


@pytest.fixture(name="whole", scope="module")
def whole_fixture(recording: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A contrastive training of several turns that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole")
    assert go(run, stage="speed", device=str(recording), turns=TURNS).taken == STEPS
    return run


def entry(sentence: str, us: float) -> Entry:
    one = config(sentence)
    return Entry(PROBLEM.key, 0, config_name(one), config_to_json(one), math.log(BASELINE_US / us), us, 0)


SLOW, FAST = "bm=64 bn=32 stages=4 consumers=1", "bm=128 bn=128 stages=4 consumers=2"


def test_what_wins_is_shown_in_later_prompts(whole: Path) -> None:
    rows = lines(whole / "speed" / "answers.jsonl")
    assert len(rows) == 4 * STEPS and all(row["parents"] == [] for row in rows if row["step"] == 1)
    with_pair = [row for row in rows if row["parents"]]
    assert with_pair
    speed = {row["kernel"]: row["us"] for row in rows if row["outcome"] == "passed"}
    for row in with_pair:
        slower, faster = row["parents"]
        assert speed[slower] > speed[faster]
        before = {r["kernel"] for r in rows if r["step"] < row["step"] - row["turn"] + 1 and r["outcome"] == "passed"}
        assert {slower, faster} <= before
        assert row["answer"].startswith("because_") is (row["turn"] == 0)  # the reason first, then a kernel
    groups = {(row["step"], tuple(row["parents"])) for row in rows}
    assert len(groups) == STEPS  # all answers to a prompt have seen the same pair


@pytest.mark.slow
def test_a_killed_training_of_several_turns_resumes_to_the_same_weights(
    whole: Path, recording: Path, tmp_path: Path
) -> None:
    train_and_kill(tmp_path, "speed", "--device", str(recording), "--turns", str(TURNS))
    resumed = go(tmp_path, resume=True, stage="speed", device=str(recording), turns=TURNS)
    assert resumed.steps == STEPS and 0 < resumed.taken < STEPS
    assert lines(tmp_path / "speed" / "answers.jsonl") == lines(whole / "speed" / "answers.jsonl")  # pairs, too
    assert same_weights(tmp_path / "speed" / "final", whole / "speed" / "final")


def test_the_best_answer_of_a_group_goes_on_with_its_outcome(whole: Path) -> None:
    rows = lines(whole / "speed" / "answers.jsonl")
    assert [row["turn"] for row in rows[::4]][:TURNS] == [0, 1, 2]
    for row in lines(whole / "speed" / "conversations.jsonl"):
        group = [r for r in rows if r["step"] == row["step"]]
        best = max(group, key=lambda r: r["parts"]["total"])
        (going_on,) = row["groups"]
        if group[0]["turn"] == TURNS - 1:
            assert going_on is None
        else:
            assert going_on["prompt"].endswith(f"{best['answer']} was {KIND[best['outcome']]} answer")
            following = {r["turn"] for r in rows if r["step"] == row["step"] + 1}
            assert following <= {going_on["turn"]}


def test_a_conversation_of_real_models_ends_in_the_outcome() -> None:
    language = CudaAnswers(H200)
    wrong = JudgedAnswer("free_1", "wrong", kind="wrong", words="C[63, 5] is 7, not 8")
    first = language.prompt(PROBLEM)
    assert not isinstance(first, str)
    asked = language.follow_up(PROBLEM, first, "my kernel", wrong)
    assert [m["role"] for m in asked] == ["system", "user", "assistant", "user"]  # type: ignore[index]
    assert "C[63, 5] is 7, not 8" in asked[-1]["content"] and "```json" in asked[-1]["content"]  # type: ignore[index]
    small = language.follow_up(SmallTask("copy", 8, 8), first, "", wrong)
    assert len(small) == 3 and "```json" not in small[-1]["content"]  # type: ignore[index]


def test_a_damaged_file_of_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conversations.jsonl").write_text('{"step": 1, "groups": [{"turn": 1}]}\n')
    with pytest.raises(RecordError, match="line 1 of .* cannot be read"):
        StepPrompts((PROBLEM,), LANGUAGE, False, 4, 2, None, tmp_path)


def test_a_later_stage_begins_with_what_earlier_ones_found(recording: Path, tmp_path: Path) -> None:
    taught = record(tmp_path / "taught.jsonl", *(passed(config(s), us) for s, us in ((SLOW, 5.0), (FAST, 4.0))))
    go(tmp_path / "run", steps=1, device=str(recording), archive=str(taught))
    shown = {tuple(row["parents"]) for row in lines(tmp_path / "run" / "correctness" / "answers.jsonl")}
    assert shown == {(config_name(config(SLOW)), config_name(config(FAST)))}
    found = [row["kernel"] for row in lines(tmp_path / "run" / "correctness" / "answers.jsonl")
             if row["outcome"] == "passed"]  # fmt: skip
    go(tmp_path / "run", steps=1, stage="speed", device=str(recording))
    begun = [row["name"] for row in lines(tmp_path / "run" / "speed" / "archive.jsonl")]
    assert found and begun == list(dict.fromkeys(found))


def test_without_contrast_prompts_show_nothing(recording: Path, tmp_path: Path) -> None:
    go(tmp_path, steps=2, device=str(recording), contrast=False)
    rows = lines(tmp_path / "correctness" / "answers.jsonl")
    assert all(row["parents"] == [] and row["answer"].startswith("bm=") for row in rows)
    assert json.loads((tmp_path / "correctness" / "settings.json").read_text())["contrast"] is False
    assert answers(tmp_path)


def test_the_toy_prompt_shows_both_and_asks_why() -> None:
    text = LANGUAGE.prompt(PROBLEM, (entry(SLOW, 5.0), entry(FAST, 4.0)))
    assert text.endswith(f"slower {SLOW} at 8 0 faster {FAST} at 1 0 0 why")
    assert set(text.split()) <= set(LANGUAGE.vocabulary())
    assert config(f"because_bn {FAST}") == config(FAST) != config(f"because {FAST}")


def test_the_prompt_of_real_models_asks_for_the_reason_first() -> None:
    pair = (entry(SLOW, 5.0), entry(FAST, 4.0))
    text = CudaAnswers(H200).prompt(PROBLEM, pair)[-1]["content"]  # type: ignore[index]
    order = ["The slower: 5.00 us, 0.800x", "The faster: 4.00 us", "the reason for the difference", "design a better"]
    places = [text.index(words) for words in order]  # type: ignore[union-attr]
    assert places == sorted(places)
    assert "the reason for the difference" not in CudaAnswers(H200).prompt(PROBLEM)[-1]["content"]  # type: ignore[index]


def judged(sentence: str, us: float | None, low: float | None, outcome: str = "passed") -> JudgedAnswer:
    one = config(sentence)
    return JudgedAnswer(config_name(one), outcome, "", None, low, us, config_to_json(one))


def test_only_proven_and_timed_kernels_enter_once() -> None:
    archive = TrainingArchive(0)
    archive.add(PROBLEM, judged(SLOW, None, None))
    archive.add(PROBLEM, judged(SLOW, 5.0, 0.8, "wrong"))
    archive.add(PROBLEM, JudgedAnswer("", "refused:empty"))
    assert archive.entries == []
    for _ in range(2):
        archive.add(PROBLEM, judged(SLOW, 5.0, 0.8))
    assert len(archive.entries) == 1 and archive.pair(PROBLEM, 0) == ()
    archive.add(PROBLEM, judged(FAST, 4.0, 1.0))
    assert [e.us for e in archive.pair(PROBLEM, 0)] == [5.0, 4.0]
    assert archive.pair(Problem(64, 64, 64), 0) == ()


@pytest.mark.parametrize("damaged", [b"no JSON\n", b"\xff\n"])
def test_an_archive_is_read_back_and_a_damaged_one_is_refused(damaged: bytes, tmp_path: Path) -> None:
    assert archive_of_stage(tmp_path, LANGUAGE, 0).entries == []
    begun = [entry(SLOW, 5.0), entry(FAST, 4.0)]
    begin_archive(tmp_path, begun)
    assert archive_of_stage(tmp_path, LANGUAGE, 0).entries == begun
    (tmp_path / "archive.jsonl").write_bytes(damaged)
    with pytest.raises(RecordError, match="line 1 of .* cannot be read"):
        archive_of_stage(tmp_path, LANGUAGE, 0)


def test_of_an_archive_only_proven_evaluations_are_shown(tmp_path: Path) -> None:
    below_floor = passed(kernel(3), 0.01)
    path = record(tmp_path / "a.jsonl", passed(kernel(1), 3.0), failed(kernel(2), Status.WRONG, "why"), below_floor)
    path.write_text(path.read_text() + json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    assert [e.config for e in proven_evaluations(path)] == [kernel(1)]
    path.write_text(path.read_text() + json.dumps({"status": "passed"}) + "\n")
    with pytest.raises(RecordError, match="line 6"):
        proven_evaluations(path)
