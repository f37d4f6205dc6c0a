"""The budget and the folder of the archive, each by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_json
from outblas.records.store import Store
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.budget import BudgetSpent
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.mcp.kernel_folder import KernelFolder, SourcedEvaluation
from outblas_lab.mcp.session_budget import SessionBudget, SessionLimits
from support.gpus.known import H200
from support.llm_kernels import PROBLEM, kernel, passed


def found(number: int, us: float) -> SourcedEvaluation:
    return SourcedEvaluation(passed(kernel(number), us), H200, "cuda:0")


def test_work_that_fails_gives_its_count_back_and_seconds_stay_spent() -> None:
    now = [0.0]
    budget = SessionBudget(SessionLimits(1, 1, 5.0), lambda: now[0])
    for count in (budget.compilation, budget.evaluation):
        with pytest.raises(KeyError), count():
            raise KeyError
        with count():
            pass
        with pytest.raises(BudgetSpent, match="of 1 "), count():
            raise AssertionError("the block must not run")
    with pytest.raises(KeyError), budget.gpu_time():
        now[0] += 4.0
        raise KeyError
    assert budget.left() == {"compilations": 0, "evaluations": 0, "gpu_seconds": 1.0}
    with budget.gpu_time():
        now[0] += 60.0
    assert budget.left()["gpu_seconds"] == 0.0
    with pytest.raises(BudgetSpent, match="GPU seconds"), budget.gpu_time():
        raise AssertionError("the block must not run")


@pytest.mark.parametrize(
    ("limits", "option"),
    [((-1, 1, 1.0), "--compilations"), ((1, 1, math.nan), "--gpu-seconds"), ((1, 1, math.inf), "--gpu-seconds")],
)
def test_a_limit_that_is_negative_or_not_finite_is_refused(limits: tuple[int, int, float], option: str) -> None:
    with pytest.raises(UsageError, match=option):
        SessionLimits(*limits)


def test_a_folder_keeps_kernels_over_sessions_and_the_fastest_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kernels"
    with KernelFolder(path) as folder:
        assert folder.entries() == []
        assert folder.store(found(1, 3.0)) and folder.store(found(2, 3.5))
        with pytest.raises(RecordError, match="in use"):
            KernelFolder(path)
    with KernelFolder(path) as folder:
        assert not folder.store(found(1, 2.0)), "a known kernel is not stored again"
        assert [e.name for e in folder.entries(PROBLEM)] == [kernel(1).name, kernel(2).name]
        assert (path / "best" / f"{PROBLEM.key}.cu").read_text() == kernel(1).text
        assert folder.store(found(3, 2.0))
        with pytest.raises(UsageError, match="holds results from h200, but this kernel ran on h100"):
            folder.store(replace(found(4, 2.0), gpu=replace(H200, name="h100")))
        assert (path / "best" / f"{PROBLEM.key}.cu").read_text() == kernel(3).text
    with Store(path / "store.sqlite") as store:
        assert [e.config.name for e in store.evaluations()] == [kernel(n).name for n in (1, 2, 3)]  # type: ignore[union-attr]


def test_a_session_that_was_killed_between_two_records_does_not_block_the_next(tmp_path: Path) -> None:
    with KernelFolder(tmp_path / "k") as folder:
        folder.store(found(1, 3.0))
        with EvolveJournal(folder.files.store) as journal:
            journal.ask(1, 0, PROBLEM.key, 0, "mcp", "new", (), ())
        assert folder.store(found(2, 2.5)) and len(folder.entries()) == 2


def test_a_session_that_is_killed_before_its_second_record_stores_a_kernel_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with KernelFolder(tmp_path / "k") as folder, monkeypatch.context() as patch:
        patch.setattr(EvolveJournal, "settle", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.store(found(1, 3.0))
        assert folder.entries() == []
    with KernelFolder(tmp_path / "k") as folder:
        assert folder.store(found(1, 2.5)) and not folder.store(found(1, 2.0))
        assert [e.name for e in folder.entries()] == [kernel(1).name]
    with Store(tmp_path / "k" / "store.sqlite") as store:
        assert [e.config.name for e in store.evaluations()] == [kernel(1).name]  # type: ignore[union-attr]


def test_a_folder_of_an_evolution_is_read_and_not_written(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"format": 1, "kind": "evolve"})
    with Store(tmp_path / "store.sqlite") as store:
        store.append("run", passed(kernel(1), 3.0))
    entry = Entry(PROBLEM.key, 0, kernel(1).name, kernel(1).to_json(), 0.2, 3.0, 1)
    with EvolveJournal(tmp_path / "store.sqlite") as journal:
        question = journal.ask(0, 0, PROBLEM.key, 0, "m", "new", (), ())
        journal.settle(AnswerOutcome(question.id, "proven"), [entry, Entry(**{**vars(entry), "origin": "migrate"})])
    with KernelFolder(tmp_path) as folder:
        assert folder.entries() == [entry] and folder.entry(entry.name) == entry
        with pytest.raises(UsageError, match="outblas evolve"):
            folder.store(found(2, 2.5))
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("data", [{"format": 1, "kind": "tune"}, {"format": 2, "kind": "mcp"}, []])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, data: object) -> None:
    write_json(tmp_path / "run.json", data)
    with pytest.raises(RecordError, match="pass another --run"):
        KernelFolder(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        KernelFolder(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="not a run"):
        KernelFolder(tmp_path)
