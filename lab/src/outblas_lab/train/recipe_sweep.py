"""The recipe's search of hyper-parameters: learning rate, batch, episodes, discount and entropy, by Optuna."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas_lab.recordings.recording import TrainingPart
from outblas_lab.train.recipe_evaluator import RecipeCells
from outblas_lab.train.recipe_training import RecipeSettings, train_by_reward
from outblas_lab.train.sweep import Progress, finish_trials, open_study, trial_settings
from outblas_lab.train.train_ppo import TrainingRun

STUDY_NAME = "recipe"
#: A trial has from half to twice the episodes of the request: 500 to 2,000 of 1,000.
EPISODE_FACTOR = 2


def recipe_trial(trial: Any, base: RecipeSettings) -> RecipeSettings:
    """Return the settings that an Optuna trial suggests: the four of a sweep, and the episodes.

    Args:
        trial: an Optuna trial. Each is suggested under its own name.
        base: the other settings, and the middle of the episodes.
    """
    few, many = max(1, base.episodes // EPISODE_FACTOR), EPISODE_FACTOR * base.episodes
    return replace(trial_settings(trial, base), episodes=trial.suggest_int("episodes", few, many, log=True))


def search_recipe(
    part: TrainingPart, trials: int, path: Path, base: RecipeSettings, cells: RecipeCells, seed: int = 0,
    progress: Progress | None = None,
) -> tuple[RecipeSettings, float]:  # fmt: skip
    """Run a study until it has ``trials`` finished trials; return its best settings and their value.

    The value is the published reward itself: the mean of the last hundred episodes of a training. The study is
    ``path/study.journal``. An interrupted study resumes; one with enough trials is only read.

    Args:
        part: problems to train on.
        trials: finished trials in all, 1 or more.
        path: folder of the study; it is made if missing.
        base: settings that are not searched, and the middle of the episodes.
        cells: hit rates and faults.
        seed: seed of the study and of its trainings.
        progress: called before a trial and after each of its updates, with (finished trials, trials, text).
    """
    study = open_study(path, STUDY_NAME, seed)

    def objective(trial: Any, say: Callable[[str], None]) -> float:
        def on_update(done: int, total: int, text: str) -> None:
            say(f"{done} of {total} episodes, {text}")

        settings = recipe_trial(trial, base).ppo("additive", seed)
        return train_by_reward(part, settings, cells, TrainingRun(), on_update).last_reward

    finish_trials(study, objective, trials, progress)
    return replace(base, **study.best_params), float(study.best_value)
