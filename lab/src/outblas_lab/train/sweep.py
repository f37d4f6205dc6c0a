"""An Optuna study of PPO's hyper-parameters: kept in a journal file, resumable, poor trials stopped early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas_lab.recordings.recording import TrainingPart
from outblas_lab.train.train_ppo import PpoSettings, TrainingRun, train

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
except ImportError as error:
    raise ToolchainMissing("optuna is not installed", "optuna >= 4", install_hint("rl")) from error

STUDY_NAME = "ppo"
#: Searched settings: log-uniform bounds, or choices.
GAMMA, LR, ENTROPY, BATCH = (0.9, 0.999), (1e-5, 1e-3), (0.01, 0.1), (32, 64, 128, 256)

AnySettings = TypeVar("AnySettings")
#: Called with (trials finished, total trials, message).
Progress = Callable[[int, int, str], None]


def trial_settings(trial: Any, base: AnySettings) -> AnySettings:
    """Return ``base`` with gamma, lr, entropy and batch as the trial suggests; the rest is unchanged.

    Args:
        trial: an Optuna trial. Each of the four is suggested under its own name.
        base: the other settings, a dataclass with these four fields.
    """
    return replace(
        base,  # type: ignore[type-var]
        gamma=trial.suggest_float("gamma", *GAMMA),
        lr=trial.suggest_float("lr", *LR, log=True),
        entropy=trial.suggest_float("entropy", *ENTROPY, log=True),
        batch=trial.suggest_categorical("batch", BATCH),
    )


def sweep(
    parts: Sequence[TrainingPart], trials: int, path: Path, base: PpoSettings | None = None,
    progress: Progress | None = None,
) -> tuple[PpoSettings, float]:  # fmt: skip
    """Run a study until it has ``trials`` finished trials; return its best settings and their score.

    A trial's score is the mean log quality on the problems that training holds back, so at most 0. After every update a
    median pruner compares it with earlier trials, and stops a poor one. Stopped trials count as finished. All trials
    share one regressor.
    The study is ``path/study.journal``. An interrupted study resumes; one with enough trials is only read.

    Args:
        parts: recorded problems of one GPU or several, 10 or more in all.
        trials: finished trials in all.
        path: folder of the study; it is made if missing.
        base: settings that are not searched. None: the defaults.
        progress: called before a trial and after each of its updates, with (finished trials, trials, text).

    Raises:
        UsageError: too few problems, or one that was not recorded.
    """
    base = base or PpoSettings()
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=base.steps // 4)
    study = open_study(path, STUDY_NAME, base.seed, pruner)

    def objective(trial: Any, say: Callable[[str], None]) -> float:
        settings, last = trial_settings(trial, base), [float("-inf")]

        def on_update(steps: int, score: float) -> bool:
            last[0] = max(last[0], score)
            trial.report(score, steps)
            return bool(trial.should_prune())

        def on_progress(done: int, total: int, text: str) -> None:
            say(f"{done} of {total} steps, {text}")

        train(parts, settings, TrainingRun(regressor=path / "regressor.npz"), on_progress, on_update)
        if trial.should_prune():
            raise optuna.TrialPruned
        return last[0]

    finish_trials(study, objective, trials, progress)
    return replace(base, **study.best_params), float(study.best_value)


def open_study(path: Path, name: str, seed: int, pruner: Any = None) -> Any:
    """Return the study ``path/study.journal``, of which a larger value is the better one; it is made if missing.

    Several processes may open the file at once: trials are then shared out among them.

    Args:
        path: folder of the study.
        name: name of the study.
        seed: seed of the sampler (TPE).
        pruner: an Optuna pruner; None: Optuna's own.
    """
    path.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it warns with a traceback of errors that end the study anyway
    return optuna.create_study(
        study_name=name,
        storage=JournalStorage(JournalFileBackend(str(path / "study.journal"))),
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=pruner,
    )


def finish_trials(
    study: Any,
    objective: Callable[[Any, Callable[[str], None]], float],
    trials: int,
    progress: Progress | None = None,
) -> None:
    """Run trials until a study has ``trials`` finished ones, stopped ones included; return None.

    Args:
        study: an Optuna study.
        objective: the value of an Optuna trial. Its second argument takes a text on how far the trial is.
        trials: finished trials in all.
        progress: called with (finished trials, trials, text) before and after each trial, and for each of its texts.
    """
    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    while (finished := len(study.get_trials(deepcopy=False, states=done))) < trials:
        say = partial(_say, progress, finished, trials)
        say("it begins")
        study.optimize(lambda trial, say=say: objective(trial, say), n_trials=1)
        if progress is not None:
            progress(finished + 1, trials, f"best {study.best_value:.5f}")


def _say(progress: Progress | None, finished: int, trials: int, text: str) -> None:
    """Report how far the running trial is."""
    if progress is not None:
        progress(finished, trials, f"trial {finished + 1} of {trials}: {text}")
