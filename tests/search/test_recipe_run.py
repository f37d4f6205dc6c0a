"""The published recipe beside the gated reward: choices, logs, resumed runs and the result file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
optuna = pytest.importorskip("optuna", reason="needs optuna (pip install './lab[rl]')")

from outblas.core.errors import RecordError, ToolchainMissing, UsageError  # noqa: E402
from outblas_lab.compare.compare_result import read_comparison  # noqa: E402
from outblas_lab.compare.held_out import tasks_of  # noqa: E402
from outblas_lab.publish.html.compare_page import render_comparison  # noqa: E402
from outblas_lab.recipe import recipe_run  # noqa: E402
from outblas_lab.recipe.recipe_choices import OUTCOMES, judge_policy  # noqa: E402
from outblas_lab.recipe.recipe_result import read_recipe  # noqa: E402
from outblas_lab.recipe.recipe_run import RecipeRequest, recipe_problems, run_recipe  # noqa: E402
from outblas_lab.recipe.recipe_table import recipe_notes, recipe_rows  # noqa: E402
from outblas_lab.train import recipe_sweep  # noqa: E402
from outblas_lab.train.recipe_evaluator import Faults, RecipeCells, RecipeEvaluator  # noqa: E402
from outblas_lab.train.recipe_sweep import recipe_trial, search_recipe  # noqa: E402
from outblas_lab.train.recipe_training import RecipeSettings, train_by_reward  # noqa: E402
from outblas_lab.train.train_ppo import TrainingRun  # noqa: E402
from outblas_lab.train.training_part import TrainingPart  # noqa: E402
from support.helpers import random_policy, synthetic_recording  # noqa: E402

RECORDING = synthetic_recording(problems=12, candidates=40)
#: More measurements than a launch option has candidates, so that a choice is the best of all by its reward.
ALL = 60


@pytest.fixture
def request_(tmp_path: Path) -> RecipeRequest:
    RECORDING.write(tmp_path / "recording")
    return RecipeRequest(
        recording=str(tmp_path / "recording"), settings=RecipeSettings(shapes=3, episodes=8, budget=3), layout="TN",
        judged=2, seeds=1, faulty=0.0, hit_rates=None, trials=0, wandb=False, run=tmp_path / "run",
        out=tmp_path / "recipe.json", command="test",
    )  # fmt: skip


def tasks() -> list[Any]:
    return [task for problem in RECORDING.problems for task in tasks_of(RECORDING, problem)]


# Choices


def test_only_the_published_reward_chooses_a_wrong_kernel() -> None:
    evaluator = RecipeEvaluator(RECORDING, RecipeCells(Faults(0.5)))
    chosen = {
        preset: [t.choices[-1] for t in judge_policy(random_policy(), evaluator, tasks(), preset, (1, ALL))]
        for preset in ("additive", "gated")
    }
    assert any(choice.outcome == "wrong" for choice in chosen["additive"])
    assert all(choice.right and choice.outcome in ("faster", "none") for choice in chosen["gated"])
    assert all(choice.quality > 0.99 for choice in chosen["gated"]), "the fastest right kernel has the highest reward"
    assert {c.outcome for choices in chosen.values() for c in choices} <= set(OUTCOMES)


def test_a_level_kernel_is_chosen_by_the_published_reward_and_refused_by_the_gate() -> None:
    slow = replace(RECORDING, median_us=RECORDING.median_us + 1.3)  # all kernels are slower than the baselines
    evaluator = RecipeEvaluator(slow, RecipeCells())
    found = [task for problem in slow.problems for task in tasks_of(slow, problem)]
    published, gated = (
        judge_policy(random_policy(), evaluator, found, preset, (ALL,)) for preset in ("additive", "gated")
    )
    assert any(task.choices[0].outcome == "level" for task in published)
    assert not any(task.choices[0].outcome == "faster" for task in published)
    assert all(task.choices[0].outcome == "none" for task in gated)


def test_a_wrong_choice_counts_as_the_slowest_right_kernel() -> None:
    evaluator = RecipeEvaluator(RECORDING, RecipeCells(Faults(0.5)))
    (task,) = tasks()[:1]
    us = [e.timing.median_us for e in evaluator.evaluate((task.problem, c) for c in task.candidates) if e.timing]
    judged = judge_policy(random_policy(), evaluator, [task], "additive", (1, 2, 4, ALL))[0].choices
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
    train, asked = recipe_run.train_by_reward, list[Any]()

    def stopped(part: Any, settings: Any, *more: Any) -> Any:
        asked.append((settings.preset, settings.seed))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return train(part, settings, *more)

    monkeypatch.setattr(recipe_run, "train_by_reward", stopped)
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
        run_recipe(replace(request_, settings=replace(request_.settings, lr=0.5)))


def test_a_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    part, settings = TrainingPart(RECORDING, RECORDING.problems[:3]), RecipeSettings(3, 8, 3).ppo("gated", 0)
    done: list[int] = []
    one = train_by_reward(part, settings, RecipeCells(), TrainingRun(tmp_path), lambda n, total, said: done.append(n))
    again = train_by_reward(part, settings, RecipeCells(), TrainingRun(tmp_path), lambda *_: pytest.fail("trains"))
    assert done and done[-1] == 24 and again.curve == one.curve
    assert all((again.policy.scorer[name] == one.policy.scorer[name]).all() for name in one.policy.scorer)
    with pytest.raises(UsageError, match="other settings"):
        train_by_reward(part, replace(settings, preset="additive"), RecipeCells(), TrainingRun(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judged": 0}, "--judged is 0"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"trials": -1}, "--trials is -1"),
        ({"faulty": 1.0}, "share of faulty kernels"),
        ({"layout": "NN"}, "layout NN"),
        ({"settings": RecipeSettings(shapes=99)}, "--shapes is 99"),
        ({"settings": RecipeSettings(shapes=3, lr=-1.0)}, "lr is -1"),
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
    for text, said in (("{", "cannot be read"), ('{"format": 1}', "another kind"), (_bare(), "lacks provenance")):
        path.write_text(text)
        with pytest.raises(RecordError, match=said):
            read_recipe(path)


def _bare() -> str:
    return json.dumps({"format": 1, "kind": "recipe"})


# Weights & Biases, Optuna


def test_reward_and_hit_rate_are_logged_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []
    begun: list[dict[str, Any]] = []
    ended: list[bool] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return SimpleNamespace(log=lambda figures, step: logged.append(figures), finish=lambda: ended.append(True))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    part = TrainingPart(RECORDING, RECORDING.problems[:3])
    settings = RecipeSettings(3, 8, 3).ppo("additive", 0)
    trained = train_by_reward(part, settings, RecipeCells(), TrainingRun(tmp_path, wandb=True))
    assert begun[0]["mode"] == "offline" and begun[0]["config"]["preset"] == "additive" and ended == [True]
    assert logged[0].keys() == {"reward", "l2_hit_rate", "failed_share"} and 0 < logged[0]["l2_hit_rate"] <= 1
    assert [round(entry["reward"], 5) for entry in logged] == [point[1] for point in trained.curve]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ToolchainMissing, match="wandb"):
        train_by_reward(part, settings, RecipeCells(), TrainingRun(tmp_path / "other", wandb=True))


def test_a_trial_searches_the_five_settings_of_the_recipe_within_its_range() -> None:
    base, seen = RecipeSettings(episodes=1000), []
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    for _ in range(30):
        trial = study.ask()
        seen.append(recipe_trial(trial, base))
        assert trial.params.keys() == {"lr", "batch", "episodes", "gamma", "entropy"}
    assert all(500 <= one.episodes <= 2000 for one in seen) and len({one.episodes for one in seen}) > 10
    assert {one.shapes for one in seen} == {base.shapes} and {one.budget for one in seen} == {base.budget}


def test_the_study_keeps_the_settings_with_the_highest_published_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def training(part: Any, settings: Any, cells: Any, run: Any, progress: Any) -> Any:
        asked.append(settings)
        progress(128, 3000, "reward 0.3")
        return SimpleNamespace(last_reward=-abs(settings.lr - 1e-4))

    monkeypatch.setattr(recipe_sweep, "train_by_reward", training)
    part = TrainingPart(RECORDING, RECORDING.problems)
    said: list[tuple[int, int, str]] = []
    best, value = search_recipe(
        part, 4, tmp_path, RecipeSettings(), RecipeCells(), progress=lambda *update: said.append(update)
    )
    assert said[:2] == [
        (0, 4, "trial 1 of 4: it begins"),
        (0, 4, "trial 1 of 4: 128 of 3000 episodes, reward 0.3"),
    ]
    assert [done for done, _, text in said if text.startswith("best")] == [1, 2, 3, 4]
    assert {settings.preset for settings in asked} == {"additive"} and len(asked) == 4
    assert value == max(-abs(settings.lr - 1e-4) for settings in asked) == -abs(best.lr - 1e-4)
    assert search_recipe(part, 4, tmp_path, RecipeSettings(), RecipeCells()) == (best, value) and len(asked) == 4


def test_trials_come_before_the_trainings(request_: RecipeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(request_.settings, lr=5e-4, episodes=9)
    monkeypatch.setattr(recipe_run, "search_recipe", lambda part, trials, *more, progress: (found, 1.0))
    result = run_recipe(replace(request_, trials=3))
    assert result["settings"] == {
        "shapes": 3, "episodes": 9, "budget": 3, "lr": 5e-4, "batch": 128, "gamma": 0.98, "entropy": 0.01,
        "trials": 3, "seeds": 1,
    }  # fmt: skip
