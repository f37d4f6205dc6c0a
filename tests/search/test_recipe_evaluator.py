"""The recipe's replay: hit rates in every answer, injected faults, and files of measured rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install '.[rl]')")

from outblas.core.config import config_name  # noqa: E402
from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.kernels.cost.cost_model import modelled_hit_rates  # noqa: E402
from outblas_lab.recipe.recipe import (  # noqa: E402
    FAULT_SPEED,
    RecipeEvaluator,
    RecipeRequest,
    hit_rate_errors,
    is_faulty,
    read_hit_rates,
)
from outblas_lab.recordings.recording import Recording  # noqa: E402
from outblas_lab.recordings.replay import ReplayEvaluator  # noqa: E402
from outblas_lab.train.reward import reward  # noqa: E402
from support.helpers import synthetic_recording  # noqa: E402

RECORDING = synthetic_recording(candidates=40)
PROBLEM = RECORDING.problems[0]


def offered() -> list[tuple[object, object]]:
    return [(PROBLEM, config) for config in ReplayEvaluator(RECORDING).candidates(PROBLEM)]


def test_without_faults_only_hit_rates_are_added() -> None:
    plain = ReplayEvaluator(RECORDING).evaluate(offered())  # type: ignore[arg-type]
    seen = RecipeEvaluator(RECORDING).evaluate(offered())  # type: ignore[arg-type]
    rates = modelled_hit_rates(PROBLEM, [e.template for e in plain], RECORDING.gpu)
    assert [e.counters["l2_hit_rate"] for e in seen] == pytest.approx(rates.tolist())
    assert [(e.status, e.timing, e.speedup) for e in seen] == [(e.status, e.timing, e.speedup) for e in plain]


def test_a_measured_rate_goes_before_the_model() -> None:
    config = ReplayEvaluator(RECORDING).candidates(PROBLEM)[2]
    measured = {(PROBLEM, config): 0.123, (RECORDING.problems[1], config): 2 / 3}
    evaluator = RecipeEvaluator(RECORDING, measured=measured)
    (seen,) = evaluator.evaluate([(PROBLEM, config)])
    assert seen.counters == {"l2_hit_rate": 0.123}
    modelled = RecipeEvaluator(RECORDING)
    off = [abs(rate - modelled.hit_rate(*cell)) for cell, rate in measured.items()]
    errors = hit_rate_errors(RECORDING, measured)
    assert errors == {"source": "measured and modelled", "measured": 2, "error": pytest.approx(sum(off) / 2, abs=1e-4)}


def test_a_faulty_kernel_is_wrong_everywhere_with_and_without_pdl_and_claims_speed() -> None:
    recording = Recording.load("h200")
    faulty = {c for c in recording.catalogue if is_faulty(c, 0.05)}
    assert 0 < len(faulty) < 0.15 * len(recording.catalogue)
    assert all(is_faulty(c.with_knobs(pdl=not c.pdl), 0.05) for c in faulty)
    evaluator, plain = RecipeEvaluator(recording, 0.05), ReplayEvaluator(recording)
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
    drawn = [{config_name(c) for c in recording.catalogue if is_faulty(c, 0.1, seed)} for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="--faulty is"):
            RecipeRequest("h200", 1, 1, 1, "TN", 1, 1, share, None, Path("run"), Path("out.json"), "test")


# Files of measured rates


def row(problem: str, kernel: str, percent: float, side: str = "ours") -> dict[str, object]:
    return {"problem": problem, "name": kernel, "kernels": [{"l2_hit_pct": percent}], "side": side}


KEY, NAME = PROBLEM.key, config_name(RECORDING.catalogue[0])


def test_the_profilers_json_is_read(tmp_path: Path) -> None:
    path, second = tmp_path / "rates.json", RECORDING.catalogue[1]
    rows = [row(KEY, NAME, 50), row(KEY, config_name(second), 100.4), row(KEY, "cublas", 30, side="torch")]
    path.write_text(json.dumps({"rows": rows}))
    assert read_hit_rates(path) == {(PROBLEM, RECORDING.catalogue[0]): 0.5, (PROBLEM, second): 1.0}
    published = read_hit_rates(Path("results/h200/ncu.json"))
    data = json.loads(Path("results/h200/ncu.json").read_text())
    assert len(published) == sum(row["side"] == "ours" for row in data["rows"]) and len(published) > 0
    assert all(0 <= rate <= 1 for rate in published.values())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no cell"),
        ([row("1_2", "x", 50)], "cannot be read"),
        ([row(KEY, NAME, 150)], "a hit rate is 1.5"),
        ([row(KEY, NAME, float("nan"))], "a hit rate is nan"),
        ([{"side": "ours", "kernels": [{}]}], "cannot be read"),
        ([row(KEY, NAME, 50), row(KEY, NAME, 50)], "a duplicate cell"),
        (3, "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_rates_is_refused(tmp_path: Path, rows: object, said: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"rows": rows}))
    with pytest.raises(RecordError, match=said):
        read_hit_rates(path)
    path.write_text("{")
    for bad in (path, tmp_path / "absent.json"):
        with pytest.raises(RecordError, match="cannot be read"):
            read_hit_rates(bad)
