"""The recipe's replay: hit rates in every answer, injected faults, and files of measured rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outblas.core.config import config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.kernels.cost.cost_model import modelled_hit_rates
from outblas.learn.reward import reward
from outblas.learn.train.hit_rate_file import read_hit_rates
from outblas.learn.train.recipe_evaluator import (
    FAULT_SPEED,
    Faults,
    RecipeCells,
    RecipeEvaluator,
    count_faulty,
    measured_cells,
)
from outblas.records.recording import Recording
from outblas.records.replay import ReplayEvaluator
from support.helpers import synthetic_recording

RECORDING = synthetic_recording(candidates=40)
PROBLEM = RECORDING.problems[0]


def offered() -> list[tuple[object, object]]:
    return [(PROBLEM, config) for config in ReplayEvaluator(RECORDING).candidates(PROBLEM)]


def test_without_faults_only_hit_rates_are_added() -> None:
    plain = ReplayEvaluator(RECORDING).evaluate(offered())  # type: ignore[arg-type]
    seen = RecipeEvaluator(RECORDING, RecipeCells()).evaluate(offered())  # type: ignore[arg-type]
    rates = modelled_hit_rates(PROBLEM, [e.template for e in plain], RECORDING.gpu)
    assert [e.counters["l2_hit_rate"] for e in seen] == pytest.approx(rates.tolist())
    assert [(e.status, e.timing, e.speedup) for e in seen] == [(e.status, e.timing, e.speedup) for e in plain]


def test_a_measured_rate_goes_before_the_model() -> None:
    config = ReplayEvaluator(RECORDING).candidates(PROBLEM)[2]
    cells = RecipeCells(measured={(PROBLEM, config): 0.123, (RECORDING.problems[1], config): 2 / 3})
    evaluator = RecipeEvaluator(RECORDING, cells)
    (seen,) = evaluator.evaluate([(PROBLEM, config)])
    assert seen.counters == {"l2_hit_rate": 0.123}
    pairs = measured_cells(RECORDING, cells)
    modelled = RecipeEvaluator(RECORDING, RecipeCells()).hit_rate(PROBLEM, config)
    assert pairs[0] == (0.123, pytest.approx(modelled)) and len(pairs) == 2


def test_a_faulty_kernel_is_wrong_everywhere_with_and_without_pdl_and_claims_speed() -> None:
    recording = Recording.load("h200")
    faults = Faults(0.05)
    faulty = {c for c in recording.catalogue if faults.has(c)}
    assert len(faulty) == count_faulty(recording, faults) and 0 < len(faulty) < 0.15 * len(recording.catalogue)
    assert all(faults.has(c.with_knobs(pdl=not c.pdl)) for c in faulty)
    evaluator, plain = RecipeEvaluator(recording, RecipeCells(faults)), ReplayEvaluator(recording)
    wrong = 0
    for problem in recording.problems[::200]:
        pairs = [(problem, config) for config in plain.candidates(problem)]
        for right, seen in zip(plain.evaluate(pairs), evaluator.evaluate(pairs), strict=True):
            if right.template not in faulty:
                assert (seen.status, seen.timing) == (right.status, right.timing)
                continue
            wrong += 1
            assert seen.status is Status.WRONG and seen.timing is seen.speedup is None
            claimed = FAULT_SPEED * right.baselines_us["cublas"] / right.timing.median_us  # type: ignore[union-attr]
            assert seen.counters["unproven_speedup"] == pytest.approx(claimed)
            assert reward(seen) < reward(right), "the gate does not listen to claims"
            if claimed > 1:
                assert reward(seen, "additive") > reward(right, "additive")
    assert wrong > 0


def test_another_seed_draws_other_faults_and_bad_shares_are_refused() -> None:
    recording = Recording.load("h200")
    drawn = [{config_name(c) for c in recording.catalogue if Faults(0.1, seed).has(c)} for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="share of faulty kernels"):
            Faults(share)


# Files of measured rates


def test_csv_and_the_profilers_json_are_read(tmp_path: Path) -> None:
    first, second = RECORDING.catalogue[:2]
    path = tmp_path / "rates.csv"
    path.write_text(
        f'problem,kernel,l2_hit_rate\n{PROBLEM.key},"{config_name(first)}",0.5\n'
        f'{PROBLEM.key},"{config_name(second)}",1.004\n'
    )
    assert read_hit_rates(path) == {(PROBLEM, first): 0.5, (PROBLEM, second): 1.0}
    published = read_hit_rates(Path("results/h200/ncu.json"))
    data = json.loads(Path("results/h200/ncu.json").read_text())
    assert len(published) == sum(row["side"] == "ours" for row in data["rows"]) and len(published) > 0
    assert all(0 <= rate <= 1 for rate in published.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("problem,kernel\n", "no column l2_hit_rate"),
        ("problem,kernel,l2_hit_rate\n", "no cell"),
        ("problem,kernel,l2_hit_rate\n1_2,x,0.5\n", "cannot be read"),
        (f"problem,kernel,l2_hit_rate\n{PROBLEM.key},{{kernel}},1.5\n", "a hit rate of 1.5"),
        (f"problem,kernel,l2_hit_rate\n{PROBLEM.key},{{kernel}},nan\n", "a hit rate of nan"),
        (f"problem,kernel,l2_hit_rate\n{PROBLEM.key}\n", "cannot be read"),
        (f"problem,kernel,l2_hit_rate\n{PROBLEM.key},{{kernel}},0.5\n{PROBLEM.key},{{kernel}},0.5\n", "a cell twice"),
        ('{"rows": 3}', "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_rates_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text.replace("{kernel}", f'"{config_name(RECORDING.catalogue[0])}"'))
    with pytest.raises(RecordError, match=said):
        read_hit_rates(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_hit_rates(tmp_path / "absent.csv")
