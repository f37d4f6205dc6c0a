"""Optuna's choice of the recipe's five settings, by short trainings on a part of the training problems.

Each reward has a study of its own. A trial trains on four fifths of the (M, N, K) and is scored on the rest, so neither
sees a judged problem. Studies are in a journal of Optuna, and a killed run goes on after its last finished trial.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.errors import RecordError, ToolchainMissing, UsageError
from outblas.core.install_hint import install_hint
from outblas_lab.compare.held_out import tasks_of
from outblas_lab.compare.splits import make_split
from outblas_lab.recipe.recipe_table import REWARD_NAMES
from outblas_lab.train.training_part import TrainingPart

if TYPE_CHECKING:
    from outblas_lab.recipe.recipe import Progress, RecipeRequest
    from outblas_lab.train.policy import Policy
    from outblas_lab.train.train_ppo import PpoSettings

#: Optuna's journal, in the folder of a run.
JOURNAL = "optuna.log"
#: Share of the training problems' (M, N, K) on which trials are scored.
SCORED_SHARE = 0.2
#: Fewest training problems that can be split so.
FEWEST = 5
#: Ranges of the learning rate and the entropy bonus, drawn by their logarithm, and of the discount.
LR, ENTROPY, GAMMA = (1e-4, 3e-3), (1e-3, 1e-1), (0.9, 1.0)
BATCHES = (64, 128, 256)
#: Trains settings on a part and returns the policy.
Train = Callable[[TrainingPart, "PpoSettings", "Progress | None"], "Policy"]
#: Returns the mean reward of a policy's choices on some tasks.
Score = Callable[["Policy", Sequence[Any], str], float]


def budgets_of(most: int) -> list[int]:
    """Return the measurements per episode that trials choose from: a quarter, a half and all of ``most``."""
    return sorted({max(1, most // 4), max(1, most // 2), most})


def tuned_settings(
    request: RecipeRequest, part: TrainingPart, train: Train, score: Score, progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return reward -> the best of its trials: ``settings`` (the five), ``score`` and ``trials``.

    Args:
        part: the training problems of the run.
        train: trains a policy.
        score: judges a policy by a reward.
        say: called with one line after each trial.

    Raises:
        UsageError: there are too few training problems to score trials on some of them.
        RecordError: the journal of the studies is damaged, or cannot be written.
        ToolchainMissing: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ToolchainMissing("Optuna is not installed", "the package optuna", install_hint("rl")) from error
    if len(part.problems) < FEWEST:
        wrong = f"--trials needs more than {len(part.problems)} training problems"
        raise UsageError(wrong, f"{FEWEST} or more (--shapes)", "pass a larger --shapes, or omit --trials")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a line per trial otherwise
    split = make_split("shapes", part.problems, SCORED_SHARE)
    tasks = [task for problem in split.held_out for task in tasks_of(part.recording, problem)]
    trained = TrainingPart(part.recording, split.training)

    def value(preset: str, trial: Any) -> float:
        policy = train(trained, request.trial_ppo(preset, len(split.training), _drawn(trial, request.budget)), progress)
        return score(policy, tasks, preset)

    found = {}
    for preset in REWARD_NAMES:
        study = _study(optuna, request.run / JOURNAL, preset)
        while (done := len(_finished(optuna, study))) < request.trials:
            study.sampler = _sampler(optuna, done)
            study.optimize(partial(value, preset), n_trials=1)
            if say is not None:
                words = f"trial {done + 1} of {request.trials}: reward {preset}, score {study.trials[-1].value:.4f}"
                say(f"{words}, best {study.best_value:.4f}")
        first = _finished(optuna, study)[: request.trials]
        best = max(first, key=lambda trial: trial.value)
        found[preset] = {"settings": dict(best.params), "score": round(best.value, 6), "trials": len(first)}
    return found


def _drawn(trial: Any, most: int) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", *LR, log=True),
        "batch": trial.suggest_categorical("batch", BATCHES),
        "gamma": trial.suggest_float("gamma", *GAMMA),
        "entropy": trial.suggest_float("entropy", *ENTROPY, log=True),
        "budget": trial.suggest_categorical("budget", budgets_of(most)),
    }


def _sampler(optuna: Any, done: int) -> Any:
    """Return a sampler seeded by the number of finished trials, so that a resumed study draws the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some options are marked as experimental, in some versions
        return optuna.samplers.TPESampler(seed=done, multivariate=True)


def _study(optuna: Any, path: Path, preset: str) -> Any:
    from optuna.storages.journal import JournalFileBackend

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_partial_line(path)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        return optuna.create_study(
            study_name=preset, storage=storage, direction="maximize", load_if_exists=True, sampler=_sampler(optuna, 0)
        )
    except (OSError, ValueError, KeyError) as error:
        wrong, do = f"the journal {path} cannot be used ({error})", "remove it to start over, or pass another --run"
        raise RecordError(wrong, "a journal of Optuna", do) from error


def _drop_partial_line(path: Path) -> None:
    """Drop a last line that a crash cut short: Optuna would append to it, and could then read no more."""
    data = path.read_bytes() if path.exists() else b""
    if not data.endswith(b"\n") and (whole := data.rfind(b"\n") + 1):
        os.truncate(path, whole)


def _finished(optuna: Any, study: Any) -> list[Any]:
    """Return the finished trials; one that was killed is none of them."""
    return list(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
