"""Optuna's trials of the recipe's settings: their problems, their best, and resumed studies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
pytest.importorskip("optuna", reason="needs optuna (pip install './lab[rl]')")

from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas_lab.recipe.recipe import RecipeRequest, recipe_problems, run_recipe  # noqa: E402
from outblas_lab.recipe.recipe_table import read_recipe, recipe_notes  # noqa: E402
from outblas_lab.recipe.recipe_trials import JOURNAL, budgets_of, tuned_settings  # noqa: E402
from support.helpers import synthetic_recording  # noqa: E402

RECORDING = synthetic_recording(problems=20, candidates=12)


@pytest.fixture
def request_(tmp_path: Path) -> RecipeRequest:
    RECORDING.write(tmp_path / "recording")
    return RecipeRequest(
        recording=str(tmp_path / "recording"), shapes=10, episodes=2, budget=4, layout="TN", judged=2, seeds=1,
        faulty=0.0, hit_rates=None, run=tmp_path / "run", out=tmp_path / "recipe.json", command="test", trials=4,
        trial_episodes=1,
    )  # fmt: skip


class Fakes:
    """A training that returns its settings, and a score of them: smaller entropy is better."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.trained: list[Any] = []
        self.problems: list[set[Any]] = []
        self.scored: set[Any] = set()
        self._left = stop_after

    def train(self, part: Any, settings: Any, progress: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        self.trained.append(settings)
        self.problems.append(set(part.problems))
        return settings

    def score(self, policy: Any, tasks: Sequence[Any], preset: str) -> float:
        self.scored |= {task.problem for task in tasks}
        assert policy.preset == preset
        return -float(policy.entropy)


def test_trials_train_and_are_scored_on_different_problems_and_judge_none(request_: RecipeRequest) -> None:
    problems, fakes = recipe_problems(request_), Fakes()
    found = tuned_settings(request_, problems.part, fakes.train, fakes.score)
    trained = set().union(*fakes.problems)
    assert len(trained) == 8 and len(fakes.scored) == 2 and not trained & fakes.scored
    assert trained | fakes.scored == set(problems.part.problems)
    assert not (trained | fakes.scored) & {task.problem for task in problems.tasks}
    assert set(found) == {"additive", "gated"}
    for preset, best in found.items():
        own = [settings for settings in fakes.trained if settings.preset == preset]
        assert len(own) == best["trials"] == 4 and best["score"] == round(-min(s.entropy for s in own), 6)
        assert set(best["settings"]) == {"lr", "batch", "gamma", "entropy", "budget"}
        for s in own:
            assert s.steps == 8 * 1 * s.budget and s.budget in budgets_of(4) == [1, 2, 4]
            assert 1e-4 <= s.lr <= 3e-3 and 0.9 <= s.gamma <= 1 and 1e-3 <= s.entropy <= 0.1
        assert len({s.lr for s in own}) == 4


def test_a_stopped_study_goes_on_after_its_last_finished_trial(request_: RecipeRequest, tmp_path: Path) -> None:
    part = recipe_problems(request_).part
    whole = Fakes()
    expected = tuned_settings(replace(request_, run=tmp_path / "whole"), part, whole.train, whole.score)
    stopped, rest, said = Fakes(stop_after=3), Fakes(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        tuned_settings(request_, part, stopped.train, stopped.score)
    assert tuned_settings(request_, part, rest.train, rest.score, say=said.append) == expected
    assert (len(stopped.trained), len(rest.trained)) == (3, 5)
    assert said[0].startswith("trial 4 of 4: reward additive") and len(said) == 5
    assert tuned_settings(request_, part, stopped.train, stopped.score) == expected, "nothing is left to train"


def test_a_study_goes_on_after_a_line_that_a_crash_cut_short(request_: RecipeRequest) -> None:
    part, fakes = recipe_problems(request_).part, Fakes()
    expected = tuned_settings(request_, part, fakes.train, fakes.score)
    path = request_.run / JOURNAL
    path.write_bytes(path.read_bytes()[:-8])
    rest = Fakes()
    assert tuned_settings(request_, part, rest.train, rest.score) == expected and len(rest.trained) == 1
    assert tuned_settings(request_, part, rest.train, rest.score) == expected and len(rest.trained) == 1


def test_a_damaged_journal_and_too_few_problems_are_refused(request_: RecipeRequest) -> None:
    part, fakes = recipe_problems(request_).part, Fakes()
    with pytest.raises(UsageError, match="--trials needs more than 4"):
        tuned_settings(request_, replace(part, problems=part.problems[:4]), fakes.train, fakes.score)
    request_.run.mkdir()
    (request_.run / JOURNAL).write_text("no journal\n{}\n")
    with pytest.raises(RecordError, match=JOURNAL):
        tuned_settings(request_, part, fakes.train, fakes.score)
    assert not fakes.trained


@pytest.mark.parametrize(("name", "value"), [("trials", -1), ("trial_episodes", 0)])
def test_impossible_numbers_are_refused(name: str, value: int, request_: RecipeRequest) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        replace(request_, **{name: value})


def test_a_run_with_trials_trains_with_their_best_settings(
    request_: RecipeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outblas_lab.recipe import recipe

    train, used = recipe.train_by_reward, list[Any]()

    def watched(part: Any, settings: Any, *more: Any) -> Any:
        used.append(settings)
        return train(part, settings, *more)

    monkeypatch.setattr(recipe, "train_by_reward", watched)
    said: list[str] = []
    result = run_recipe(replace(request_, trials=2), say=said.append)
    assert json.loads(json.dumps(result)) == read_recipe(request_.out) and len(said) == 6 and len(used) == 6
    for settings in used[-2:]:
        best = result["tuned"][settings.preset]["settings"]
        assert {name: getattr(settings, name) for name in best} == best
        assert settings.steps == 10 * 2 * best["budget"]
    assert result["settings"]["trials"] == 2
    assert sum("by 2 trials: learning rate" in note for note in recipe_notes(result)) == 2
    with pytest.raises(UsageError, match="other settings"):
        run_recipe(replace(request_, trials=3))
