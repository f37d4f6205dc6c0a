"""Words of workers and recordings that attack: no file, no terminal and no run is harmed by them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.clean_text import clean_text
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.records.store import Store
from outblas.workers.sandbox import UnreadableMessage, receive
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import jailed_evaluator
from outblas_lab.jail.jailed_evaluator import JailedEvaluator
from outblas_lab.llm.budget import Cost
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.llm.reply import Reply
from support.evolve_fixture import evolve
from support.free_fixture import ANSWERS, BODY, IMPORTS_NOTHING, cache_fixture, compiles, device_text  # noqa: F401
from support.free_workers import ESCAPES, with_hostile_words
from support.free_workers import answer as worker_answer
from support.gpus.known import H200
from support.llm_kernels import PROBLEM, answer, failed, kernel, passed, record
from support.llm_server import Say, evolve_by_command, serving

HERE = str(Path(__file__).resolve().parents[1])
HALF = "\ud800"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


def words_of(found: object) -> Iterator[str]:
    """Every string within."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, Mapping):
        yield from words_of([*found, *found.values()])
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from words_of(one)
    elif hasattr(found, "__dataclass_fields__"):
        yield from words_of([getattr(found, name) for name in found.__dataclass_fields__])


def is_clean(found: object, limit: int = 1000) -> bool:
    return all(word == clean_text(word, limit) for word in words_of(found))


# --- one message ---


def received(data: bytes, left: Iterable[int] = (0, 1)) -> Any:
    ours, theirs = Pipe()
    with closing(ours), closing(theirs):
        sender = Thread(target=theirs.send_bytes, args=(data,))
        sender.start()
        try:
            return receive(ours, jailed_evaluator.__name__, set(left))
        finally:
            sender.join()


@pytest.mark.parametrize("kind", ["fault", "error"])
def test_last_words_are_cleaned_and_cut(kind: str) -> None:
    assert received(json.dumps([kind, f"a{HALF}{ESCAPES}z"]).encode()) == (kind, "a?]0;PWN[2J2Jz")
    assert len(received(json.dumps([kind, "x" * 10**6]).encode())[1]) < 1000


@pytest.mark.parametrize(
    "data",
    [
        b'["begin", true]', b'["begin", 1.0]', b'["begin", 1, 2]', b'["begin", [1]]', b'["begin", "1"]', b'["begin"]',
        b'["begin", -1]', b'["begin", 1e400]', b'["begin", NaN]', b'["begin", 0' + b"0" * 5000 + b"]",
        b'["begin", 1' + b"0" * 5000 + b"]", b'["done", true, null]', b'["done", 1.0, null]', b'["done", 1]',
        b'["done", 7, null]', b'["done", 1, null, null]', b'["done", 1, []]', b'["fault"]', b'["fault", 7]',
        b'["fault", ["a"]]', b'["fault", {"a": 1}]', b'["fault", "a", "b"]', b'["fault", ' + b"[" * 100_000,
        b'["error", null]', b'["end", 1]', b'["ready", {}]', b'["what", 1]', b"[" * 100_000 + b"]" * 100_000, b"[]",
        b"{}", b"null", b'"done"', b"\xff\xff", b"\xef\xbb\xbf[", b"", b'["\\ud800", 1]', b'{"begin": 1}', b"7",
        b'["done", 1, {"evaluation": null, "baselines": null}] tail', b"[[\"fault\"], 1]", b'[null, "\x1b"]',
    ],
)  # fmt: skip
def test_what_is_no_message_is_told_in_clean_words(data: bytes) -> None:
    with pytest.raises(UnreadableMessage) as error:
        received(data)
    assert is_clean(str(error.value))


def told(order: str = "pass") -> dict[str, Any]:
    """A worker's answer, as JSON types."""
    cell, options = SimpleNamespace(folder="."), SimpleNamespace(baselines=("cublas",))
    item = SimpleNamespace(problem=PROBLEM, config=kernel(1))
    return json.loads(json.dumps(jailed_evaluator.encode(worker_answer(options, cell, item, order))))  # type: ignore[no-any-return]


def test_every_word_of_an_answer_is_cleaned_and_cut() -> None:
    value = with_hostile_words(told())
    found = jailed_evaluator.decode(json.loads(json.dumps(value)))
    assert found[0] is not None and found[0].detail == "?]0;PWN[2J2Jword" and is_clean(found)
    long = json.loads(json.dumps(value).replace("word", "x" * 100_000))
    assert is_clean(jailed_evaluator.decode(long)) and max(map(len, words_of(jailed_evaluator.decode(long)))) < 1000


@pytest.mark.parametrize(
    "path, value",
    [
        (("baselines", "details"), {str(i): "" for i in range(10_000)}),
        (("baselines", "left_out"), {str(i): "" for i in range(10_000)}),
        (("baselines", "details"), {"cublas": 7}),
        (("baselines", "timings"), []),
        (("evaluation", "baselines_us"), {str(i): 1.0 for i in range(10_000)}),
        (("evaluation", "timing", "repeats"), 10**4000),
        (("evaluation", "timing", "repeats"), True),
        (("evaluation", "timing", "mode"), None),
        (("evaluation", "verdict", "gates"), [7]),
        (("evaluation", "verdict", "gates"), 7),
        (("evaluation", "log"), 7),
        (("evaluation", "problem", "m"), 512.0),
        (("evaluation", "problem", "m"), True),
        (("evaluation", "config"), {"family": "free", "text": HALF}),
        (("evaluation", "status"), ESCAPES),
    ],
    ids=lambda found: "-".join(found) if isinstance(found, tuple) else str(type(found)),
)
def test_an_answer_of_another_kind_is_no_message(path: tuple[str, ...], value: object) -> None:
    data = told()
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(UnreadableMessage) as error:
        received(json.dumps(["done", 1, data]).encode())
    assert is_clean(str(error.value))


# --- a run ---


class Taken(Evaluator):
    """The evaluator of a GPU whose workers have been taken over."""

    gpu, source = H200, "cuda:0"

    def __init__(self) -> None:
        self._inner = JailedEvaluator(Options(0, H200, baselines=("cublas",)), 20.0, IMPORTS_NOTHING, ANSWERS)

    def evaluate(self, pairs: Iterable[tuple[Problem, FreeKernel]]) -> Iterator[Evaluation]:
        for problem, one in pairs:
            yield from (evaluation for evaluation, _ in self._inner.evaluate(problem, [one]))

    def baselines(self, problem: Problem) -> dict[str, float]:
        return {"cublas": 4.0}


@compiles
def test_a_worker_that_was_taken_over_costs_one_kernel_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(HERE)

    @contextmanager
    def opened(place: object) -> Iterator[Taken]:
        yield Taken()

    monkeypatch.setattr("outblas_lab.llm.evolve_run.open_chosen_evaluator", opened)
    orders = ["fault", "words", "error", "float", "pass"]
    texts = [f"// order: {order}\n{device_text(f'{BODY}int x{i};')}" for i, order in enumerate(orders)]
    with serving(lambda request, number: Say(answer(texts[number % len(texts)]))) as server:
        for requests in (2, 5):  # the second time the same run goes on
            evolve(server, tmp_path, tmp_path / "run", requests, turns=1)
        asked = [request["messages"] for request in server.requests]
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        found = list(journal.outcomes().values())
        assert [one.kind for one in found] == ["crash", "wrong", "crash", "crash", "proven"] and is_clean(found, 10_000)
    with Store(tmp_path / "run" / "store.sqlite") as store:
        assert is_clean([e.detail for e in store.evaluations()])
    assert len(asked) == 5 and is_clean(asked, 10**6)
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(mark in data for data in written for mark in (b"\x1b]0", b"\\u001b", b"\\ud800"))


WORDS = f"{HALF}{ESCAPES}of a worker"


def test_words_of_a_recording_are_cleaned_and_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    bad = failed(kernel(2), Status.FAULT, WORDS, WORDS)
    path = record(tmp_path / "r.jsonl", passed(kernel(1), 3.0), bad, provenance={"gpu": WORDS})
    assert HALF.encode("unicode_escape") in path.read_bytes(), "the recording holds it"
    texts = [kernel(2).text, kernel(2).text, kernel(1).text]
    asked: list[Any] = []

    def script(request: Any, number: int) -> Say:
        asked.append(request["messages"])
        return Say(answer(texts[min(len(asked) - 1, 2)]))

    for requests in (2, 3):
        code, said = evolve_by_command(script, path, tmp_path / "run", requests, turns=2)
        assert code == 0 and said == clean_text(said, len(said)), said
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        found = list(journal.outcomes().values())
        assert [one.kind for one in found] == ["crash", "duplicate", "proven"] and is_clean(found, 10_000)
    assert "?]0;PWN[2J2Jof a worker" in str(asked[1]) and is_clean(asked, 10**6)


def test_a_run_that_a_bad_word_has_ended_resumes(tmp_path: Path) -> None:
    """A run of a release before 0.2.0: the evaluation is in the store, but its outcome could not be written."""
    pytest.importorskip("openai")
    path = record(tmp_path / "r.jsonl", failed(kernel(2), Status.FAULT, "of a worker"), passed(kernel(1), 3.0))
    script = lambda request, number: Say(answer(kernel(2 if number == 0 else 1).text))  # noqa: E731
    assert evolve_by_command(script, path, tmp_path / "run", 1, turns=2)[0] == 0
    with closing(sqlite3.connect(tmp_path / "run" / "store.sqlite")) as db, db:
        escaped = json.dumps(WORDS)[1:-1]
        db.execute("UPDATE evaluations SET body = replace(body, 'of a worker', ?)", (escaped,))
        db.execute("UPDATE questions SET messages = replace(messages, 'GPU', ?)", (escaped,))
        db.execute("DELETE FROM outcomes")
        db.execute("DELETE FROM questions WHERE turn > 0")
    code, said = evolve_by_command(
        lambda request, number: Say(answer(kernel(1).text)), path, tmp_path / "run", 2, turns=2
    )
    assert code == 0 and said == clean_text(said, len(said))
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        assert [one.kind for one in journal.outcomes().values()] == ["crash", "proven"]
        assert is_clean(list(journal.questions()), 10**6)


def test_the_journal_takes_any_word(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        question = journal.ask(1, 0, WORDS, 0, WORDS, WORDS, [WORDS], [{"role": "user", "content": WORDS}])
        send = journal.sent(question.id, Cost(1, 1, 1))
        journal.replied(send, Reply(WORDS, WORDS, WORDS, Cost(1, 1, 1), 0.0, WORDS))
        journal.settle(AnswerOutcome(question.id, WORDS, WORDS, WORDS, words=WORDS))
        (asked,), (replied,), outcomes = journal.questions(), journal.replies(), journal.outcomes()
        assert is_clean([asked.messages, replied, outcomes, list(journal.transcript())], 10**6)
        assert "of a worker" in replied[1].text and "of a worker" in outcomes[question.id].words


def test_a_worker_words_in_a_verdict_are_cleaned_when_they_are_read(tmp_path: Path) -> None:
    dirty = Evaluation(PROBLEM, kernel(2), Status.WRONG, WORDS, Verdict(Status.WRONG, (WORDS,), WORDS), log=WORDS)
    with Store(tmp_path / "s.sqlite") as store:
        store.append("run", dirty)
        (found,) = store.evaluations()
    assert is_clean([found.detail, found.log, found.verdict], 10_000) and "of a worker" in found.detail
