"""Step ``reopen`` of `outblas build-library`: rows that three trials leave open are searched and timed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas_lab.build import finalist_trials as trials
from outblas_lab.build import open_rows
from outblas_lab.build.build_work import REOPENED_STARTS, proved
from outblas_lab.build.choosing import pooled_trials
from outblas_lab.build.finalists import earlier_finalists, finalists_of_search, reopened_finalists
from outblas_lab.build.open_rows import (
    WIDE_BUDGET,
    contenders,
    near_candidates,
    wide_candidates,
)
from outblas_lab.build.refine import neighbours
from support import fake_gpu
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401
from support.gpus.known import H200
from support.helpers import passed_evaluation

LARGE, SMALL = Problem(2048, 2048, 2048), Problem(64, 64, 64)
TILE = Sm90WgmmaConfig(128, 128)


def tried_trials(script: Any, work: Any) -> Any:
    """The table after its first trials."""
    run(script, work, "tune")
    table = script.TABLES[0]
    for start in trials.STARTS:
        trials.run_trial(work, table, start)
    return table


def test_the_best_of_the_trials_are_tried_again_in_turns() -> None:
    plain = [replace(TILE, stages=stages) for stages in (3, 4, 5, 6)]
    with_pdl = replace(TILE, pdl=True)
    ratios = {plain[0]: 1.0, plain[1]: 1.02, plain[2]: 1.01, plain[3]: 0.9, with_pdl: 0.8}
    assert contenders(ratios) == [plain[1], with_pdl, plain[2]]
    assert contenders({plain[0]: 1.0, plain[3]: 0.9}) == [plain[0]], "1.5% behind is too far"


def test_a_row_that_falls_back_gets_kernels_of_the_whole_pool() -> None:
    found = wide_candidates(LARGE, [TILE], H200)
    assert len(found) > 2 * WIDE_BUDGET and len(set(found)) == len(found) and TILE not in found
    assert all(launch_of(c) == "plain" and why_illegal(LARGE, c, H200) is None for c in found)
    odd = replace(TILE, bn=120)
    near = {c for c in neighbours(LARGE, odd, H200) if launch_of(c) == "plain"}
    assert near and near <= set(wide_candidates(LARGE, [odd], H200)) and not near <= set(found)


def test_another_row_gets_neighbours_and_winners_of_nearby_shapes() -> None:
    near = Problem(2048, 2048, 4096)
    elsewhere = replace(TILE, consumers=2)
    found = near_candidates(LARGE, {LARGE: {"plain": TILE}, near: {"plain": elsewhere}}, H200)
    assert found[1] == elsewhere and TILE not in found and len(found) > 3
    without_own = near_candidates(LARGE, {LARGE: {}, near: {"plain": elsewhere}}, H200)
    assert without_own[0] == elsewhere and len(without_own) == 2, "and its transpose"


def test_finalists_are_few_near_the_best_and_have_twins_with_pdl() -> None:
    plain = [replace(TILE, stages=stages) for stages in (3, 4, 5, 6)]
    tried = [passed_evaluation(LARGE, config, ratio=1 - 0.005 * i) for i, config in enumerate(plain)]
    tried += [passed_evaluation(LARGE, replace(TILE, bn=64), ratio=0.9)]
    found = finalists_of_search(LARGE, tried, H200)
    assert found == [*plain[:3], *(replace(c, pdl=True) for c in plain[:2])]


def test_reopened_rows_are_chosen_from_three_further_trials(script: Any, work: Any, capsys: Any) -> None:
    table = tried_trials(script, work)
    with pytest.raises(UsageError, match="--steps reopen"):
        trials.run_trial(work, table, "4")
    first = work.finalists(table).read_text()
    run(script, work, "reopen")
    assert work.finalists(table).read_text() == first, "the first trials keep their finalists"
    assert script.fake.options[-1].level == "cell", "many candidates; the trials prove the finalists in full"
    for start in REOPENED_STARTS["reopen"]:
        trials.run_trial(work, table, start)
    assert script.trial.options[-1].level == "full"
    again, found = reopened_finalists(work, table, "reopen"), pooled_trials(work, table)
    assert again and set(found) == set(table.problems())
    for problem, configs in again.items():
        assert set(map(config_name, configs)) <= set(found[problem].timings)
        assert len(found[problem].timings["torch"].samples_us) == 3 * trials.REOPENED_ROUNDS
    run(script, work, "choose")
    chosen = Library.load(work.library).provenance["tables"][str(table)]["chosen_from"]
    assert list(chosen) == ["1", "2", "3", "4", "5", "6"]
    assert "4 of 4 problems chosen by trials" in capsys.readouterr().out


def test_first_trials_that_were_made_anew_count_over_older_reopened_ones(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tried_trials(script, work)
    run(script, work, "reopen")
    for start in REOPENED_STARTS["reopen"]:
        trials.run_trial(work, table, start)
    again = reopened_finalists(work, table, "reopen")
    made = trials.collect_provenance
    monkeypatch.setattr(trials, "collect_provenance", lambda *a: {**made(*a), "date": "2999-01-01T00:00:00+00:00"})
    for start in trials.STARTS:
        trials.trial_path(work, table, start).unlink()
        trials.run_trial(work, table, start)
    found = pooled_trials(work, table)
    rounds = {len(found[problem].timings["torch"].samples_us) for problem in again}
    assert rounds == {3 * trials.TRIAL_ROUNDS}, "the latest trials that timed a row"


def test_what_a_trial_timed_is_proved(script: Any, work: Any) -> None:
    table = tried_trials(script, work)
    run(script, work, "reopen")
    finalists = reopened_finalists(work, table, "reopen").values()
    new = {config_name(c) for configs in finalists for c in configs} - proved(work, table)
    assert new, "the search proved them on the timed operands only"
    trials.run_trial(work, table, "4")
    assert new <= proved(work, table)
    path = trials.trial_path(work, table, "4")
    path.write_text(path.read_text().replace('"kernels": "', '"kernels": "0', 1))
    assert not new & proved(work, table), "by other sources"


def test_a_row_that_still_falls_back_gets_the_next_candidates(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fake_gpu.BASELINES_US, "torch", 0.5)  # ahead of every kernel
    table = tried_trials(script, work)
    asked = []
    for step, starts in REOPENED_STARTS.items():
        before = len(script.fake.asked)
        run(script, work, step)
        asked.append({(p, c) for _, p, configs in script.fake.asked[before:] for c in configs})
        for start in starts:
            trials.run_trial(work, table, start)
    wide = len(table.problems()) * WIDE_BUDGET
    assert len(asked[0]) >= wide and len(asked[1]) >= wide / 2
    finalists = {(p, c) for p, configs in earlier_finalists(work, table, "reopen_again").items() for c in configs}
    assert not (asked[0] & asked[1]) - finalists


def test_rows_without_a_new_finalist_keep_their_trials_and_are_searched_again(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tried_trials(script, work)
    kept, *searched = table.problems()
    monkeypatch.setattr(
        open_rows, "near_candidates", lambda p, won, gpu: [] if p == kept else near_candidates(p, won, gpu)
    )
    run(script, work, "reopen")
    assert set(reopened_finalists(work, table, "reopen")) == set(searched)
    for start in REOPENED_STARTS["reopen"]:
        trials.run_trial(work, table, start)
    assert len(pooled_trials(work, table)[kept].timings["torch"].samples_us) == 3 * trials.TRIAL_ROUNDS
    before = len(script.fake.asked)
    run(script, work, "reopen_again")
    assert {problem for _, problem, _ in script.fake.asked[before:]} == {kept}
