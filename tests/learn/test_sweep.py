"""The study of hyper-parameters: it resumes, keeps its bounds, and its result can train."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
pytest.importorskip("optuna", reason="needs optuna (pip install './lab[rl]')")

from outblas_lab.train import sweep as module  # noqa: E402
from outblas_lab.train.train_ppo import PpoSettings  # noqa: E402
from outblas_lab.train.training_part import TrainingPart  # noqa: E402
from support.helpers import random_policy, synthetic_recording  # noqa: E402

RECORDING = synthetic_recording()
PARTS = [TrainingPart(RECORDING, RECORDING.problems)]


class Trainings:
    """Stands in for a training: its score is the higher, the nearer the rate is to 1e-4."""

    def __init__(self) -> None:
        self.seen: list[PpoSettings] = []
        self.stopped = 0

    def __call__(self, parts, settings, run, progress, on_update):  # type: ignore[no-untyped-def]
        self.seen.append(settings)
        progress(0, settings.steps, "regressor")
        for step in range(1, 11):
            if on_update(step * settings.steps // 10, -abs(settings.lr - 1e-4)):
                self.stopped += 1
                break
        return random_policy()


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    found = Trainings()
    monkeypatch.setattr(module, "train", found)
    return found


def test_the_best_settings_of_a_study_are_within_its_bounds(trainings: Trainings, tmp_path: Path) -> None:
    best, score = module.sweep(PARTS, 12, tmp_path)
    assert len(trainings.seen) == 12
    assert score == pytest.approx(-abs(best.lr - 1e-4)) == max(-abs(s.lr - 1e-4) for s in trainings.seen)
    for settings in trainings.seen:
        assert module.LR[0] <= settings.lr <= module.LR[1] and settings.batch in module.BATCH
        assert module.GAMMA[0] <= settings.gamma <= module.GAMMA[1]
        assert module.ENTROPY[0] <= settings.entropy <= module.ENTROPY[1]
    assert trainings.stopped > 0, "a poor trial is stopped"


def test_a_study_goes_on_where_it_was(trainings: Trainings, tmp_path: Path) -> None:
    module.sweep(PARTS, 4, tmp_path)
    module.sweep(PARTS, 6, tmp_path)
    assert len(trainings.seen) == 6
    said: list[int] = []
    module.sweep(PARTS, 6, tmp_path, progress=lambda done, total, note: said.append(done))
    assert len(trainings.seen) == 6 and not said, "a study that has enough is only read"


def test_a_sweep_says_how_far_its_trial_is(trainings: Trainings, tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    module.sweep(PARTS, 2, tmp_path, progress=lambda *update: said.append(update))
    steps = trainings.seen[0].steps
    assert said[:2] == [(0, 2, "trial 1 of 2: it begins"), (0, 2, f"trial 1 of 2: 0 of {steps} steps, regressor")]
    assert [done for done, _, text in said if text.startswith("best")] == [1, 2]


def test_a_trial_that_fails_is_not_swallowed(
    trainings: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*a, **named):  # type: ignore[no-untyped-def]
        raise RuntimeError("no")

    monkeypatch.setattr(module, "train", fails)
    with pytest.raises(RuntimeError, match="no"):
        module.sweep(PARTS, 2, tmp_path)
    monkeypatch.setattr(module, "train", trainings)
    module.sweep(PARTS, 2, tmp_path)
    assert len(trainings.seen) == 2


def test_ctrl_c_in_the_first_trial_logs_no_traceback(trainings: Trainings, tmp_path: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("optuna").addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            module.finish_trials(module.open_study(tmp_path, "study", 0), interrupted, 2)
    finally:
        logging.getLogger("optuna").removeHandler(handler)
    assert not records


def interrupted(trial: object, say: object) -> float:
    raise KeyboardInterrupt
