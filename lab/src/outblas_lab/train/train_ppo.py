"""PPO across shapes: the regressor first, then a maskable policy on replayed episodes (sb3-contrib)."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import LAUNCHES
from outblas.core.errors import RecordError, ToolchainMissing, UsageError
from outblas.core.evaluator import Evaluator
from outblas.core.files import json_text, lock_folder, write_atomic, write_json
from outblas.core.install_hint import install_hint
from outblas.core.journal import check_same_settings
from outblas.core.plain_files import read_object
from outblas.core.suites import suite
from outblas.predict.posterior import DAMAGED, Regressor
from outblas.records.provenance import source_commit
from outblas_lab.recordings.recording import Recording, TrainingPart
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.policy import Policy, input_names
from outblas_lab.train.policy_quality import recorded_searches, search_qualities
from outblas_lab.train.regression import RegressSettings, cached_regressor, one_thread
from outblas_lab.train.reward import PRESETS
from outblas_lab.train.training_part import split_parts

try:
    import torch
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
except ImportError as error:
    raise ToolchainMissing(f"{error.name} is not installed", "torch and sb3-contrib", install_hint("rl")) from error

#: Updates between two checkpoints.
CHECKPOINT_EVERY_UPDATES = 4
#: Measurements after which a checkpoint is judged: the mean of the log quality at these.
JUDGED_MEASUREMENTS = (1, 2, 4, 8)
#: Settings that count something.
_COUNTS = ("steps", "rollout", "envs", "epochs", "budget")


@dataclass(frozen=True)
class PpoSettings:
    """Every hyper-parameter of the recipe. An episode's transition is a measurement.

    Attributes:
        lr: Adam's learning rate, above 0.
        batch: transitions per minibatch, 2 or more.
        gamma: discount per transition, 0 to 1.
        entropy: factor of the entropy bonus, 0 or more.
        steps: transitions in all.
        rollout: transitions per update of each environment.
        envs: environments side by side.
        epochs: passes over an update's transitions.
        clip: PPO's bound of the probability ratio; not checked.
        gae: lambda of the generalised advantage estimate; not checked.
        budget: measurements per episode; 1 makes a contextual bandit.
        seed: seed of everything, 0 to 2**32 - 1.

    Raises:
        UsageError: a value is outside its range.
    """

    lr: float = 3e-4
    batch: int = 128
    gamma: float = 0.98
    entropy: float = 0.05
    steps: int = 40_000
    rollout: int = 128
    envs: int = 8
    epochs: int = 4
    clip: float = 0.2
    gae: float = 0.95
    budget: int = 8
    seed: int = 0
    preset: str = "gated"
    regress: RegressSettings = field(default_factory=RegressSettings)

    def __post_init__(self) -> None:
        rules = {name: (getattr(self, name) >= 1, "1 or more") for name in _COUNTS}
        rules |= {
            "batch": (self.batch >= 2, "2 or more"),
            "lr": (0 < self.lr < math.inf, "a number above 0"),
            "entropy": (0 <= self.entropy < math.inf, "0 or more"),
            "gamma": (0 <= self.gamma <= 1, "a number from 0 to 1"),
            "seed": (0 <= self.seed < 2**32, "an integer from 0 to 4294967295"),
            "preset": (self.preset in PRESETS, " or ".join(PRESETS)),
        }
        for name, (fits, expected) in rules.items():
            if not fits:
                raise UsageError(f"{name} is {getattr(self, name)}", expected, f"correct {name}")


#: Settings of the packaged policies. The entropy bonus is at the lower end of a sweep's range. The policy begins near
#: its final order, which a larger bonus only blurs.
RECIPE = PpoSettings(entropy=0.01, steps=32_768)

#: Called with (transitions done, total transitions, message).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainingRun:
    """The place of a training's checkpoints and logs.

    Attributes:
        path: the folder; None: keep nothing.
        regressor: file of the regressor, read if it exists. None: ``regressor.npz`` in ``path``. Trainings of equal
            settings may share one.
        tensorboard: True writes TensorBoard logs to ``path``.
    """

    path: Path | None = None
    regressor: Path | None = None
    tensorboard: bool = False

    def file(self, name: str) -> Path | None:
        return None if self.path is None else self.path / name


def train(
    parts: Sequence[TrainingPart], settings: PpoSettings | None = None, run: TrainingRun | None = None,
    progress: Progress | None = None,
) -> Policy:  # fmt: skip
    """Train a policy on the recorded cells of ``parts``, and on no other cells.

    ``split_parts`` holds some problems back. Episodes take the parts in turns. The checkpoint that is best on the
    problems held back is returned. The first checkpoint is the regressor's greedy order, so a training that learns
    nothing returns that order.
    torch has one thread meanwhile. The result is the same for the same seed.

    Args:
        parts: recorded problems of one GPU or several, 10 or more in all. Episodes are of those in grid1000 with the
            layout, dtype and accumulator of a part's first problem. They are of all problems if grid1000 has none of
            them, or if problems have candidates of their own.
        run: place of checkpoints and logs. A folder with a training of the same settings is resumed. None: keep
            nothing.

    Raises:
        UsageError: a problem was not recorded, fewer than ten problems, or the folder has a training of other settings.
        RecordError: the folder lacks a file, it cannot be read or written, or another process trains in it.
    """
    settings, run = settings or PpoSettings(), run or TrainingRun()
    count = sum(len(part.problems) for part in parts)
    if count < 10:
        raise UsageError(f"there are only {count} problems to train on", "10 or more", "pass more problems")
    with contextlib.nullcontext() if run.path is None else lock_folder(run.path), one_thread():
        return _train(parts, settings, run, progress)


def _train(parts: Sequence[TrainingPart], settings: PpoSettings, run: TrainingRun, progress: Progress | None) -> Policy:
    def epoch(done: int, total: int, note: str) -> None:
        if progress is not None:  # the regressor's epochs come before the first transition
            progress(0, settings.steps, f"regressor, epoch {done} of {total}, {note}")

    claim_folder(run, settings, parts)
    kept = run.file("policy.npz")
    if kept is not None and kept.exists() and steps_done(run) >= settings.steps:
        return Policy.load(kept)
    learn, check = split_parts(parts, settings.seed)
    file = run.regressor or run.file("regressor.npz")
    regressor = cached_regressor(file, learn, settings.regress, settings.seed, epoch)
    torch.manual_seed(settings.seed)
    model, done = make_learner(learn, settings, Policy(regressor, {}), run)
    checkpoints = _Checkpoints(check, regressor, settings, run, progress)
    if done < settings.steps:
        model.learn(settings.steps - done, callback=checkpoints, reset_num_timesteps=done == 0, tb_log_name="ppo")
    return checkpoints.best()


def make_learner(
    parts: Sequence[TrainingPart], settings: PpoSettings, begun: Policy, run: TrainingRun,
    evaluator_of: Callable[[Recording], Evaluator] = ReplayEvaluator,
) -> tuple[Any, int]:  # fmt: skip
    """Return the learner, as new or from its last checkpoint ``ppo.zip``, and the transitions that it has seen.

    Raises:
        RecordError: the checkpoint cannot be read.
    """
    from outblas_lab.train.env import TuningEnv, most_offered
    from outblas_lab.train.network import CandidatePolicy

    catalogue = tuple(dict.fromkeys(c for part in parts for c in part.recording.catalogue))
    own = [most_offered(part.recording, part.problems) for part in parts]
    places = None if None in own else max(own)  # type: ignore[type-var]

    def make(part: TrainingPart) -> Any:
        first, known = part.problems[0], set(part.problems)
        # of one kind in the order of the grid, if the grid has any; with candidates of their own, all count
        grid = suite("grid1000", first.layout, first.dtype, first.acc) if places is None else ()
        problems = [p for p in grid if p in known] or part.problems
        evaluator = evaluator_of(part.recording)
        return TuningEnv(evaluator, catalogue, problems, begun, settings.budget, LAUNCHES[:2], settings.preset, places)

    count = max(settings.envs, len(parts))
    envs = VecMonitor(DummyVecEnv([partial(make, parts[i % len(parts)]) for i in range(count)]))
    envs.seed(settings.seed)
    logs = str(run.path) if run.path is not None and run.tensorboard else None
    kept = run.file("ppo.zip")
    if kept is not None and kept.exists():
        bounds = {"observation_space": envs.observation_space}  # an older release had none
        model = load_checkpoint(kept, env=envs, tensorboard_log=logs, custom_objects=bounds)
        return model, int(model.num_timesteps)
    model = MaskablePPO(
        CandidatePolicy, envs, learning_rate=settings.lr, n_steps=settings.rollout, batch_size=settings.batch,
        n_epochs=settings.epochs, gamma=settings.gamma, gae_lambda=settings.gae, clip_range=settings.clip,
        ent_coef=settings.entropy, seed=settings.seed, device="cpu", tensorboard_log=logs,
    )  # fmt: skip
    return model, 0


def steps_done(run: TrainingRun) -> int:
    """Return the transitions of a training up to its last checkpoint; 0 without one.

    Raises:
        RecordError: the checkpoint is damaged.
    """
    kept = run.file("ppo.zip")
    return int(load_checkpoint(kept).num_timesteps) if kept is not None and kept.exists() else 0


def save_checkpoint(model: Any, path: Path) -> None:
    """Write a learner atomically: a process that is killed meanwhile leaves the checkpoint before; return None.

    Raises:
        RecordError: the disk refuses. The old file is kept.
    """
    data = io.BytesIO()
    model.save(data)
    write_atomic(path, data.getvalue())


def load_checkpoint(path: Path, **arguments: Any) -> Any:
    """Return the learner of a checkpoint.

    Raises:
        RecordError: the file is damaged.
    """
    try:
        return MaskablePPO.load(path, **arguments)
    except (*DAMAGED, AssertionError) as error:  # Stable-Baselines3 asserts that a file has its parts
        wrong, do = f"checkpoint {path} cannot be read ({error})", "remove it to start over, or pass another --run"
        raise RecordError(wrong, "a complete checkpoint", do) from error


class _Checkpoints(BaseCallback):
    """After every few updates: a checkpoint, its score on the validation problems, and what is logged."""

    def __init__(
        self, parts: Sequence[TrainingPart], regressor: Regressor, settings: PpoSettings, run: TrainingRun,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._parts, self._regressor = parts, regressor
        known = Policy(regressor, {})
        self._searches = [s for part in parts for s in recorded_searches(known, part.recording, part.problems)]
        self._settings, self._run, self._progress = settings, run, progress
        kept = run.file("policy.npz")
        self._best = Policy.load(kept) if kept is not None and kept.exists() else None
        self._best_score = -np.inf if self._best is None else float(json.loads(self._best.about)["score"])
        self._invalid = self._steps = self._updates = 0
        self._speedups: list[float] = []

    def best(self) -> Policy:
        if self._best is None:  # judged before any update, so only where its file was taken away
            raise RecordError(f"{self._run.path} has no policy", "the file policy.npz", "pass another --run")
        return self._best

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        self._steps += len(infos)
        self._invalid += sum(bool(info["invalid_action"]) for info in infos)
        ends = zip(infos, self.locals["dones"], strict=True)
        self._speedups += [info["best_speedup"] for info, done in ends if done and info["best_speedup"] > 0]
        return True

    def _on_rollout_start(self) -> None:
        if self._updates % CHECKPOINT_EVERY_UPDATES == 0:  # the first before any update: the regressor's greedy order
            self._evaluate()
        self._updates += 1

    def _on_training_end(self) -> None:
        self._evaluate()
        self.logger.dump(self.num_timesteps)

    def _evaluate(self) -> None:
        arrays = self.model.policy.features_extractor.arrays()  # type: ignore[union-attr, operator]
        policy = Policy(self._regressor, arrays)
        budgets = [b for b in JUDGED_MEASUREMENTS if b <= self._settings.budget]
        quality = search_qualities(policy, self._searches, max(budgets))
        at = {b: float(np.exp(np.mean(np.log(quality[:, b - 1])))) for b in budgets}
        score = float(np.mean(np.log([at[b] for b in budgets])))
        figures = {f"quality/after_{b}": q for b, q in at.items()}
        figures |= {"quality/score": score, "rollout/invalid_share": self._invalid / max(1, self._steps)}
        if self._speedups:
            figures["rollout/best_speedup"] = float(np.exp(np.mean(np.log(self._speedups))))
        if self.model.ep_info_buffer:
            figures["rollout/reward"] = float(np.mean([e["r"] for e in self.model.ep_info_buffer]))
        self._invalid, self._steps, self._speedups = 0, 0, []
        for name, value in figures.items():
            self.logger.record(name, value)
        if score > self._best_score:
            about = {"settings": asdict(self._settings), "steps": int(self.num_timesteps), "commit": source_commit()}
            about |= {"score": score, "recordings": [part.recording.provenance for part in self._parts]}
            self._best_score, self._best = score, replace(policy, about=json.dumps(about, sort_keys=True))
            if (kept := self._run.file("policy.npz")) is not None:
                self._best.save(kept)
        if (kept := self._run.file("ppo.zip")) is not None:
            save_checkpoint(self.model, kept)
        if self._progress is not None:
            said = ", ".join(f"{q:.2%} after {b}" for b, q in at.items())
            words = f"speed on held-out problems, relative to the best: {said} measurements"
            self._progress(self.num_timesteps, self._settings.steps, words)


def claim_folder(run: TrainingRun, settings: Any, parts: Sequence[TrainingPart]) -> None:
    """Write the settings of a training to its folder, or refuse a folder of other settings; return None.

    Args:
        settings: a dataclass of settings with a field ``steps``, which may differ: a training may be prolonged.

    Raises:
        UsageError: the folder has a training of other settings.
        RecordError: the file of settings cannot be read or written.
    """
    path = run.file("settings.json")
    if path is None:
        return
    problems = [[part.recording.gpu.name, *(p.key for p in part.problems)] for part in parts]
    wanted = {**asdict(settings), "problems": problems, "inputs": input_names()}
    wanted.pop("steps")  # a training may be prolonged
    if path.exists():
        what, do = f"{run.path} was trained with other settings", "repeat those settings, or pass another --run"
        was = read_object(path, "the settings of a training", "pass another --run")
        check_same_settings(what, was, json.loads(json_text(wanted)), do)
        return
    write_json(path, wanted)
