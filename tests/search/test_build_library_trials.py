"""Trials of a tuned table: its finalists, timed in several starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.kernels.catalogue import launch_options
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas_lab.build import finalist_trials as trials
from outblas_lab.build.finalists import PER_LAUNCH, ahead_in_twin, finalists
from outblas_lab.build.finalists import _of_row as of_row
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401
from support.gpus.known import H200
from support.helpers import passed_evaluation


def test_finalists_are_the_fastest_of_each_launch_option(script: Any, work: Any) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    found, tried = finalists(work, table), script.search.earlier_searches(work, table, but="")
    for problem, configs in found.items():
        assert configs and len(configs) == len(set(configs))
        speed = {e.config: e.speedup.ratio for e in tried[problem]}
        for config in configs:
            same = [c for c in speed if launch_of(c) == launch_of(config)]
            better = [c for c in same if speed[c] > speed[config]]
            assert len(better) < PER_LAUNCH and speed[config] >= 0.97 * max(speed[c] for c in same)


def test_a_trial_keeps_every_round_and_is_not_repeated(script: Any, work: Any, capsys: Any) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    trials.run_trial(work, table, "1")
    found, chosen = trials.read_trial(work, table, "1"), finalists(work, table)
    assert list(found) == list(chosen)
    for problem, entry in found.items():
        assert set(entry.timings) == {*RIVALS, *map(config_name, chosen[problem])}
        assert {len(t.samples_us) for t in entry.timings.values()} == {trials.TRIAL_ROUNDS}
    asked = len(script.trial.asked)
    trials.run_trial(work, table, "1")
    assert 0 < len(script.trial.asked) == asked and "already done" in capsys.readouterr().out


def test_gpus_share_the_problems_of_a_trial(script: Any, work: Any) -> None:
    run(script, work, "tune")
    table, both = script.TABLES[0], replace(work, gpus=(0, 1))
    trials.run_trial(both, table, "1")
    assert set(trials.read_trial(work, table, "1")) == set(finalists(work, table))
    assert {options.gpu_index for options in script.trial.options} == {0, 1}
    asked = [problem for _, problem, _ in script.trial.asked]
    assert set(asked) == set(table.problems()), "each problem is timed on one of the two"


def test_a_killed_trial_goes_on_within_its_start_and_begins_anew_in_another(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    trials.run_trial(work, table, "2")
    path = trials.trial_path(work, table, "2")
    lines = path.read_text().splitlines(keepends=True)
    for machine, left in ((trials.start_of_machine(), len(lines) - 3), ("another", len(lines) - 2)):
        path.write_text("".join(lines[:2]))
        assert trials.finished_trial(work, table, "2") == []
        with pytest.raises(UsageError, match="--steps trial --starts 2"):
            trials.read_trial(work, table, "2")
        monkeypatch.setattr(trials, "start_of_machine", lambda machine=machine: machine)
        script.trial.asked.clear()
        trials.run_trial(work, table, "2")
        assert len({p for _, p, _ in script.trial.asked}) == left
    assert "starting over" in capsys.readouterr().out


def test_finalists_of_a_large_product_are_at_most_three_plain_kernels(script: Any) -> None:
    problem = Problem(8192, 8192, 8192)
    plain = [Sm90WgmmaConfig(128, 128, stages=stages) for stages in (3, 4, 5, 6)]
    configs = [*plain, replace(plain[0], pdl=True)]
    tried = [passed_evaluation(problem, config, ratio=1 + 0.01 * i) for i, config in enumerate(configs)]
    for installed, found in ((1.04, [plain[0], plain[3], plain[2]]), (1.055, [plain[0], plain[3]]), (1.2, plain[:1])):
        row = LibraryRow(problem, "torch", "", "cuda:0", LibraryChoice(plain[0], installed, 1.0, 1.6))
        assert of_row(row, tried, H200) == found, "within 3% of the fastest"


def test_a_product_too_long_for_a_search_with_pdl_has_its_best_kernel_with_pdl(script: Any) -> None:
    problem = Problem(2048, 2048, 4096)
    assert "pdl" not in launch_options(problem, H200)
    best, other = Sm90WgmmaConfig(128, 128), Sm90WgmmaConfig(128, 64)
    tried = [passed_evaluation(problem, best, ratio=1.02), passed_evaluation(problem, other, ratio=1.0)]
    assert of_row(LibraryRow(problem), tried, H200) == [best, other, replace(best, pdl=True)]


def test_a_search_after_the_finalists_lets_them_be_chosen_anew(script: Any, work: Any) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    first = finalists(work, table)
    assert work.finalists(table).exists() and finalists(work, table) == first
    run(script, work, "borrow")
    assert not work.finalists(table).exists()


def test_a_kernel_that_gains_more_in_the_other_type_is_a_finalist() -> None:
    problem = Problem(64, 4096, 512, "TN", "bf16")
    twin = replace(problem, dtype="fp16")
    mine, theirs, with_pdl = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 128), Sm90WgmmaConfig(64, 64, pdl=True)

    def found(gain: float, row: LibraryRow) -> list[Any]:
        other = LibraryRow(
            twin, plain=LibraryChoice(theirs, gain, 1.0, 2.0), pdl=LibraryChoice(with_pdl, 1.3, 1.0, 2.0)
        )
        return ahead_in_twin(row, Library("H200", (other, row), {}), H200)

    row = LibraryRow(problem, plain=LibraryChoice(mine, 1.2, 1.1, 1.3), pdl=LibraryChoice(with_pdl, 1.3, 1.2, 1.4))
    assert found(1.22, row) == [theirs] and found(1.205, row) == []
    assert found(1.05, LibraryRow(problem)) == [theirs, with_pdl], "the row falls back"
    assert ahead_in_twin(row, Library("H200", (row,), {}), H200) == []
    assert ahead_in_twin(LibraryRow(replace(twin, acc="fp16")), Library("H200", (row,), {}), H200) == []


def test_rows_that_trials_chose_are_timed_anew_only_for_a_new_finalist(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, "tune", "trial", "choose")
    table, library = script.TABLES[0], work.load()
    first = library.provenance["tables"][str(table)]["chosen_from"]
    work.finalists(table).unlink()
    work.store(table).unlink()
    for start in trials.STARTS:
        trials.trial_path(work, table, start).unlink()
    old, other = next(row for row in library.rows if row.plain is not None), Sm90WgmmaConfig(64, 64, stages=3)
    twin = replace(old.problem, dtype="bf16")
    assert finalists(work, table) == {}, "nothing is new"
    run(script, work, "trial", "choose")
    assert work.load().provenance["tables"][str(table)]["chosen_from"] == first
    for path in (work.finalists(table), *(trials.trial_path(work, table, start) for start in trials.STARTS)):
        path.unlink()
    better = LibraryRow(twin, plain=LibraryChoice(other, old.plain.speedup + 0.5, 1.0, 2.0))
    replace(library, rows=(*library.rows, better)).save(work.library)
    assert other in finalists(work, table)[old.problem] and set(finalists(work, table)) == {old.problem}
    monkeypatch.setattr(trials, "start_of_machine", lambda: "another")
    run(script, work, "trial", "choose")
    after = work.load()
    about = after.provenance["tables"][str(table)]
    assert about["chosen_before"] == [first] and about["chosen_from"] != first
    kept = [row for row in library.rows if row.problem != old.problem]
    assert [after.row_of(row.problem) for row in kept] == kept, "the others keep their choice"
