from __future__ import annotations

import math
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from outblas.core.errors import RecordError
from outblas.records.store import Store
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.budget import Cost
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.llm.reply import Reply


def entry(number: int, score: float, island: int = 0, problem: str = "p") -> Entry:
    return Entry(problem, island, f"k{number}", {"family": "free", "text": str(number)}, score, 10 - score, number)


def test_equal_kernels_are_taken_once_per_problem() -> None:
    archive = Archive(ArchiveShape())
    assert archive.insert(entry(1, 0.1)) and not archive.insert(entry(1, 0.3, island=1))
    assert archive.insert(entry(1, 0.1, problem="other"))
    assert archive.best("p") == entry(1, 0.1)


def test_a_pair_is_of_two_buckets_the_slower_first() -> None:
    archive = Archive(ArchiveShape(width=0.1), 3)
    for number, score in enumerate((0.01, 0.02, 0.15, 0.31, 0.32, 0.05)):
        archive.insert(entry(number, score))
    for number in range(50):
        slow, fast = archive.draw("p", 0, number)
        assert slow.score < fast.score and archive.bucket(slow.score) != archive.bucket(fast.score)


def test_faster_buckets_are_drawn_more_often_and_none_is_left_out() -> None:
    archive = Archive(ArchiveShape(temperature=0.2), 1)
    for number in range(4):
        archive.insert(entry(number, 0.05 + 0.2 * number))
    drawn = Counter(e.name for number in range(300) for e in archive.draw("p", 0, number))
    assert drawn["k3"] > drawn["k2"] > drawn["k1"] > drawn["k0"] > 0


def test_draws_of_few() -> None:
    archive = Archive(ArchiveShape())
    assert archive.draw("p", 0, 1) == ()
    archive.insert(entry(1, 0.11))
    archive.insert(entry(2, 0.12))
    assert len(archive.draw("p", 0, 1)) == 1  # both are in one bucket


def test_the_best_migrates_to_the_next_island() -> None:
    archive = Archive(ArchiveShape(islands=3, migrate_every=3))
    added = [archive.insert(entry(n, 0.1 * n, island=n % 3)) for n in range(3)]
    assert [len(one) for one in added] == [1, 1, 4]
    assert [(e.name, e.island, e.origin) for e in added[2][1:]] == [
        ("k0", 1, "migrate"),
        ("k1", 2, "migrate"),
        ("k2", 0, "migrate"),
    ]
    assert not archive.insert(entry(2, 0.2))  # nor is a migrant taken again
    assert archive.table("p")[0] == Counter({0: 1, 2: 1})


def test_a_restored_archive_draws_and_migrates_the_same(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    first = Archive(ArchiveShape(), 5)
    for n in range(20):
        with EvolveJournal(path) as journal:  # a new process every time, for all that it knows
            again = Archive(ArchiveShape(), 5, journal.entries())
            new = entry(n, math.sin(n), island=n % 3)
            assert again.draw("p", n % 3, n) == first.draw("p", n % 3, n)
            journal.settle(AnswerOutcome(n, "proven"), again.insert(new))
            first.insert(new)
    with EvolveJournal(path) as journal:
        assert journal.entries() == first.entries and len(first.entries) > 20


def test_what_was_sent_and_never_heard_is_counted_at_its_most(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        question = journal.ask(1, 0, "p", 0, "m", "new", [], [{"role": "user", "content": "?"}])
        journal.sent(question.id, Cost(1, 100, 200, 0.5))
        send = journal.sent(question.id, Cost(1, 100, 200, 0.5))
        journal.replied(send, Reply("answered", "yes", "stop", Cost(1, 10, 20, 0.05), 1.0, "Hm."))
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        assert journal.spent() == Cost(2, 110, 220, 0.55)
        assert [r.outcome for _, r in journal.replies()] == ["lost", "answered"]
        (only,) = journal.transcript()
        assert only["attempts"][1]["reasoning"] == "Hm."
        assert only["messages"] == ({"role": "user", "content": "?"},) and only["outcome"] is None
        assert list(journal.questions()) == [question]


def test_an_outcome_and_its_entries_are_recorded_together_or_not_at_all(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        bad = Entry("p", 0, "k", {}, 0.1, 1.0, None)  # type: ignore[arg-type]
        with pytest.raises(RecordError):
            journal.settle(AnswerOutcome(1, "proven"), [entry(1, 0.1), bad])
        assert journal.outcomes() == {} and journal.entries() == []
        journal.settle(AnswerOutcome(1, "proven"), [entry(1, 0.1)])
        assert list(journal.outcomes()) == [1] and journal.entries() == [entry(1, 0.1)]


def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        journal.settle(AnswerOutcome(1, "empty"))
        (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
        journal._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(RecordError, match="full"):
            journal.settle(AnswerOutcome(2, "wrong", words="x" * 100_000))
    with EvolveJournal(tmp_path / "s.sqlite") as journal:
        assert list(journal.outcomes()) == [1]


def test_a_store_with_these_tables_is_still_a_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    EvolveJournal(path).close()
    with Store(path) as store:
        assert store.runs() == []
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE sends")
    with EvolveJournal(path) as journal:
        assert journal.spent() == Cost()
