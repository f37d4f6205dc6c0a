"""A comparison's result file and its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import RecordError
from outblas.core.roofline import regime
from outblas.core.stats import geomean
from outblas_lab.compare.compare_result import (
    best_agents,
    budget_words,
    figures,
    level_with,
    mean_regret,
    overall_regret,
    paired_gains,
    read_comparison,
    regime_qualities,
    write_comparison,
)
from outblas_lab.compare.compare_run import noise_floor
from outblas_lab.compare.held_out import tasks_of
from support.bench_fixture import PROBLEMS, made_meta, made_rows, write_bench, write_made
from support.gpus.known import H200
from support.helpers import synthetic_recording

LEVEL = {"good": 0.1, "level": 0.102, "bad": 1.0}


# The file


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    rows = made_rows(LEVEL)
    c = write_made(tmp_path / "c.parquet", LEVEL)
    assert (c.splits, c.agents, c.budgets) == (("shapes", "families"), tuple(LEVEL), (0, 1, 4, 16))
    back = [
        (c.splits[s], c.agents[a], seed, c.problems[p].key, c.launches[la], c.budgets[b], q, bool(f))
        for s, a, seed, p, la, b, q, f in zip(
            c.split, c.agent, c.seed, c.problem, c.launch, c.budget, c.quality, c.found, strict=True
        )
    ]
    assert back == rows


Rows = list[tuple[Any, ...]]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: rows[:-1], "tasks or budgets are missing, extra or repeated"),
        (lambda rows: rows + rows[-1:], "tasks or budgets are missing, extra or repeated"),
        (lambda rows: rows[:-1] + [(*rows[-1][:6], 1.01, True)], "outside"),
        (lambda rows: rows[:-1] + [(*rows[-1][:6], 0.0, True)], "outside"),
        (lambda rows: rows[:-1] + [(*rows[-1][:6], math.nan, True)], "outside"),
        (lambda rows: [r for r in rows if r[:2] != ("families", "bad")], "bad was not run on split families"),
        (lambda rows: [(*r[:3], "no problem", *r[4:]) for r in rows], "problem key"),
        (lambda rows: [r for r in rows if r[1] != "bad"], "agent bad is only in the rows or only in the metadata"),
        (lambda rows: [], "no rows"),
    ],
)
def test_rows_that_contradict_themselves_are_not_written(
    spoil: Callable[[Rows], Rows], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=words):
        write_comparison(spoil(made_rows(LEVEL)), made_meta(list(LEVEL)), tmp_path / "c.parquet")
    assert not (tmp_path / "c.parquet").exists()


def test_metadata_must_be_whole(tmp_path: Path) -> None:
    meta = made_meta(list(LEVEL))
    del meta["costs"], meta["provenance"]["commit"]
    with pytest.raises(RecordError, match="metadata lacks costs, commit"):
        write_comparison(made_rows(LEVEL), meta, tmp_path / "c.parquet")


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    with pytest.raises(RecordError, match="does not exist"):
        read_comparison(path)
    write_bench(path)
    with pytest.raises(RecordError, match="has kind 'bench'"):
        read_comparison(path)
    write_made(path, LEVEL)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RecordError, match="cannot be read"):
        read_comparison(path)


# Statistics


def test_the_figure_is_the_geometric_mean_and_regret_its_shortfall(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    made = figures(c, "families")
    want = geomean(r[6] for r in made_rows(LEVEL) if r[:2] == ("families", "bad") and r[5] == 4)
    found = made["bad", 4]
    assert found.quality == pytest.approx(want, abs=1e-6) and found.low < want < found.high
    assert found.regret == pytest.approx(1 / want - 1, abs=1e-5)
    assert (made["bad", 0].found, found.found) == (0.0, 1.0)
    assert figures(c, "families") == made


def test_the_interval_is_that_of_a_bootstrap_over_problems(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL, noise=0.8)
    mine = (c.split == 0) & (c.agent == 2) & (c.budget == 1)
    means = np.array([np.log(c.quality[mine & (c.problem == p)]).mean() for p in range(len(PROBLEMS))])
    rng = np.random.default_rng(5)
    boot = np.exp([rng.choice(means, len(means)).mean() for _ in range(4000)])
    found = figures(c, "shapes")["bad", 1]
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(boot, (2.5, 97.5))), rel=0.01)


def test_more_seeds_of_the_same_answers_make_nothing_surer(tmp_path: Path) -> None:
    once = made_rows(LEVEL, seeds=1)
    write_comparison(once, made_meta(list(LEVEL), seeds=1), tmp_path / "1.parquet")
    often = [(*r[:2], seed, *r[3:]) for seed in range(5) for r in once]
    write_comparison(often, made_meta(list(LEVEL), seeds=5), tmp_path / "5.parquet")
    assert figures(read_comparison(tmp_path / "5.parquet"), "shapes") == figures(
        read_comparison(tmp_path / "1.parquet"), "shapes"
    )


def test_agents_may_have_different_numbers_of_seeds(tmp_path: Path) -> None:
    rows = [r for r in made_rows(LEVEL) if not (r[1] == "good" and r[2] == 1)]
    write_comparison(rows, made_meta(list(LEVEL)), tmp_path / "c.parquet")
    made = figures(read_comparison(tmp_path / "c.parquet"), "shapes")
    want = geomean(r[6] for r in rows if r[:2] == ("shapes", "good") and r[5] == 0)
    assert made["good", 0].quality == pytest.approx(want, abs=1e-6)


def test_the_best_of_a_budget_and_who_is_level_with_it(tmp_path: Path) -> None:
    made = figures(write_made(tmp_path / "c.parquet", LEVEL), "shapes")
    best, level = best_agents(made, 1)
    assert {best.agent, *(f.agent for f in level)} == {"good", "level"}
    assert best.quality == max(made[a, 1].quality for a in LEVEL)


def test_overall_is_the_mean_regret_over_budgets_1_to_16_and_all_splits(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL, budgets=(0, 1, 16, 32))
    of_splits = [figures(c, split) for split in c.splits]
    regrets = [made["bad", b].regret for made in of_splits for b in (1, 16)]
    ranked = overall_regret(of_splits)
    assert ranked[-1] == ("bad", pytest.approx(sum(regrets) / 4)) and len(ranked) == 3
    assert [r for _, r in ranked] == sorted(r for _, r in ranked)
    assert budget_words(c.budgets) == "1, 16"


def test_agents_whose_intervals_overlap_everywhere_are_level(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL, budgets=(0, 1, 16, 32))
    of_splits = [figures(c, split) for split in c.splits]
    best = overall_regret(of_splits)[0][0]
    level = level_with(of_splits, best)
    assert "bad" not in level and best not in level and len(level) == 1
    assert best in level_with(of_splits, level[0]) and level_with(of_splits, "bad") == []


def test_without_a_budget_of_1_to_16_all_count(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL, budgets=(0, 32))
    made = figures(c, "shapes")
    assert mean_regret(made, "bad") == pytest.approx((made["bad", 0].regret + made["bad", 32].regret) / 2)
    assert budget_words(c.budgets) == "0, 32"


def test_regimes_are_those_of_the_problems(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", LEVEL)
    rows = regime_qualities(c, "shapes", H200)
    names = [regime(p, H200) for p in PROBLEMS]
    assert {(name, n) for name, n, _, _ in rows} == {(name, names.count(name)) for name in names}
    keys = {p.key for p in PROBLEMS if regime(p, H200) == "launch"}
    (launch,) = [q for name, _, agent, q in rows if (name, agent) == ("launch", "good")]
    for place, budget in enumerate(c.budgets):
        want = geomean(
            r[6] for r in made_rows(LEVEL) if r[:2] == ("shapes", "good") and r[3] in keys and r[5] == budget
        )
        assert launch[place] == pytest.approx(want, abs=1e-6)


def test_a_gain_is_paired_by_problem(tmp_path: Path) -> None:
    c = write_made(tmp_path / "c.parquet", {"a": 0.2, "b": 0.4})
    first = paired_gains(c, "shapes", "a", "b")
    back = paired_gains(c, "shapes", "b", "a")
    assert [g.budget for g in first] == list(c.budgets)
    for g, other in zip(first, back, strict=True):
        assert g.low <= g.mean <= g.high and g.mean == -other.mean
    made = figures(c, "shapes")
    ratio = math.log(made["a", c.budgets[0]].quality / made["b", c.budgets[0]].quality)
    assert first[0].mean == pytest.approx(ratio, abs=1e-4), "all problems have as many rows"
    assert all(g.mean == g.low == g.high == 0 for g in paired_gains(c, "shapes", "a", "a"))
    with pytest.raises(ValueError):
        paired_gains(c, "shapes", "a", "none")


def test_the_noise_floor_is_lower_for_a_noisier_recording() -> None:
    recording = synthetic_recording()
    tasks = [task for problem in recording.problems for task in tasks_of(recording, problem)]
    found = noise_floor(recording, tasks)
    noisy = noise_floor(replace(recording, spread=10 * recording.spread), tasks)
    exact = noise_floor(replace(recording, spread=0 * recording.spread), tasks)
    assert noisy < found <= exact == 1.0 and found == noise_floor(recording, tasks)
