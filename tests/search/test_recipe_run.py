"""The published recipe beside the gated reward: choices, resumed runs and the result file."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
optuna = pytest.importorskip("optuna", reason="needs optuna (pip install './lab[rl]')")

from outblas.core.errors import (  # noqa: E402
    RecordError,
    UsageError,
)
from outblas_lab.compare.compare_result import read_comparison  # noqa: E402
from outblas_lab.compare.held_out import tasks_of  # noqa: E402
from outblas_lab.publish.html.compare_page import render_comparison  # noqa: E402
from outblas_lab.recipe import recipe  # noqa: E402
from outblas_lab.recipe.recipe import (  # noqa: E402
    RecipeEvaluator,
    RecipeRequest,
    judge_policy,
    recipe_problems,
    run_recipe,
    train_by_reward,
)
from outblas_lab.recipe.recipe_table import (  # noqa: E402
    OUTCOMES,
    read_recipe,
    recipe_notes,
    recipe_rows,
)
from outblas_lab.train.training_part import TrainingPart  # noqa: E402
from support.helpers import random_policy, synthetic_recording  # noqa: E402

RECORDING = synthetic_recording(problems=12, candidates=40)
#: More measurements than a launch option has candidates, so that a choice is the best of all by its reward.
ALL = 60


@pytest.fixture
def request_(tmp_path: Path) -> RecipeRequest:
    RECORDING.write(tmp_path / "recording")
    return RecipeRequest(
        recording=str(tmp_path / "recording"), shapes=3, episodes=8, budget=3, layout="TN", judged=2, seeds=1,
        faulty=0.0, hit_rates=None, run=tmp_path / "run", out=tmp_path / "recipe.json", command="test",
    )  # fmt: skip


def tasks() -> list[Any]:
    return [task for problem in RECORDING.problems for task in tasks_of(RECORDING, problem)]


# Choices


def test_only_the_published_reward_chooses_a_wrong_kernel() -> None:
    evaluator = RecipeEvaluator(RECORDING, 0.5)
    chosen = {
        preset: [choices[-1] for _, choices in judge_policy(random_policy(), evaluator, tasks(), preset, (1, ALL))]
        for preset in ("additive", "gated")
    }
    assert any(choice.outcome == "wrong" for choice in chosen["additive"])
    assert all(choice.right and choice.outcome in ("faster", "none") for choice in chosen["gated"])
    assert all(choice.quality > 0.99 for choice in chosen["gated"]), "the fastest right kernel has the highest reward"
    assert {c.outcome for choices in chosen.values() for c in choices} <= set(OUTCOMES)


def test_a_level_kernel_is_chosen_by_the_published_reward_and_refused_by_the_gate() -> None:
    slow = replace(RECORDING, median_us=RECORDING.median_us + 1.3)  # all kernels are slower than the baselines
    evaluator = RecipeEvaluator(slow)
    found = [task for problem in slow.problems for task in tasks_of(slow, problem)]
    published, gated = (
        judge_policy(random_policy(), evaluator, found, preset, (ALL,)) for preset in ("additive", "gated")
    )
    assert any(choices[0].outcome == "level" for _, choices in published)
    assert not any(choices[0].outcome == "faster" for _, choices in published)
    assert all(choices[0].outcome == "none" for _, choices in gated)


def test_a_wrong_choice_counts_as_the_slowest_right_kernel() -> None:
    evaluator = RecipeEvaluator(RECORDING, 0.5)
    (task,) = tasks()[:1]
    us = [e.timing.median_us for e in evaluator.evaluate((task.problem, c) for c in task.candidates) if e.timing]
    judged = judge_policy(random_policy(), evaluator, [task], "additive", (1, 2, 4, ALL))[0][1]
    for choice in judged:
        worst = min(us) / max(us)
        assert choice.quality == pytest.approx(worst) if not choice.right else worst <= choice.quality <= 1


# Runs


def test_a_run_writes_a_table_with_faulty_and_recorded_kernels(request_: RecipeRequest) -> None:
    said: list[str] = []
    result = run_recipe(replace(request_, faulty=0.3), say=said.append)
    assert json.loads(json.dumps(result)) == read_recipe(request_.out) and len(said) == 4
    assert [(row["faulty"], row["reward"]) for row in result["rows"]] == [
        (0.0, "additive"), (0.0, "gated"), (0.3, "additive"), (0.3, "gated")
    ]  # fmt: skip
    for row in result["rows"]:
        assert sum(row["outcomes"].values()) == row["choices"] == result["problems"]["tasks"]
        assert [r["budget"] for r in row["regrets"]] == [1, 2, 3]
        assert all(0 <= r["low"] <= r["regret"] <= r["high"] for r in row["regrets"])
    assert result["hit_rates"] == {"source": "modelled", "measured": 0, "error": None}
    assert result["faults"]["failed_cells"] > 0 and result["faults"]["kernels"] > 0
    choices = read_comparison(request_.run / "choices.parquet")
    assert choices.agents == ("additive", "gated") and choices.splits == ("recorded", "faulty 0.3")
    page = render_comparison(choices)
    assert "2 problems of held-out (M, N, K) shapes; 3 to learn from" in page and "Split faulty 0.3" in page
    assert "outblas tune --agent" not in page, "a reward is no agent"
    head, *rows = recipe_rows(result)
    assert len(head) == len(rows[0]) and [row[:2] for row in rows][2] == ["30% faulty", "published"]
    notes = " ".join(recipe_notes(result))
    assert "modelled" in notes and "injected as faulty" in notes and "failed a gate" in notes


def test_judged_problems_are_of_no_training(request_: RecipeRequest) -> None:
    problems = recipe_problems(request_)
    trained = {(p.m, p.n, p.k) for p in problems.part.problems}
    judged = {(t.problem.m, t.problem.n, t.problem.k) for t in problems.tasks}
    assert len(trained) == 3 and judged and not trained & judged


def test_a_run_resumes_and_more_seeds_add_trainings(request_: RecipeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    train, asked = recipe.train_by_reward, list[Any]()

    def stopped(part: Any, settings: Any, *more: Any) -> Any:
        asked.append((settings.preset, settings.seed))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return train(part, settings, *more)

    monkeypatch.setattr(recipe, "train_by_reward", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(request_)
    assert not request_.out.exists()
    first = run_recipe(request_)
    assert asked == [("additive", 0), ("gated", 0), ("gated", 0)], "the finished training is not repeated"
    asked[:] = asked[:1]
    asked.append(None)
    wider = run_recipe(replace(request_, seeds=2))
    assert asked[2:] == [("additive", 1), ("gated", 1)]
    assert wider["curves"][0] == first["curves"][0]
    with pytest.raises(UsageError, match="other settings"):
        run_recipe(replace(request_, episodes=9))


def test_the_same_seed_is_the_same_training(request_: RecipeRequest) -> None:
    part, settings, episodes = TrainingPart(RECORDING, RECORDING.problems[:3]), request_.ppo("gated", 0), list[int]()
    first, curve = train_by_reward(part, settings, RecipeEvaluator, lambda n, total, said: episodes.append(n))
    second, again = train_by_reward(part, settings, partial(RecipeEvaluator, faulty=0.0))
    assert episodes and episodes[-1] == 24 and curve == again
    assert all((second.scorer[name] == first.scorer[name]).all() for name in first.scorer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judged": 0}, "--judged is 0"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"faulty": 1.0}, "--faulty is"),
        ({"layout": "NN"}, "layout NN"),
        ({"shapes": 99}, "--shapes is 99"),
        ({"episodes": 0}, "--episodes is 0"),
    ],
)
def test_bad_numbers_are_refused_before_any_training(
    request_: RecipeRequest, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        run_recipe(replace(request_, **changes))
    assert not request_.run.exists()


def test_a_result_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    for text, said in (("{", "cannot be read"), ('{"format": 1}', "its kind is None"), (_bare(), "lacks provenance")):
        path.write_text(text)
        with pytest.raises(RecordError, match=said):
            read_recipe(path)


def _bare() -> str:
    return json.dumps({"format": 1, "kind": "recipe"})
