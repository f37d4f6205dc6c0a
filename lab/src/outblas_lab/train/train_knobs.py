"""PPO over knobs: on a simulated GPU, then on a recording (sb3-contrib's maskable PPO)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from outblas.core.config import LAUNCHES
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import lock_folder
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import sample
from outblas.kernels.kernel_space import KernelSpace, kernel_space
from outblas.predict.features import problem_features
from outblas.records.provenance import source_commit
from outblas_lab.recordings.recording import Recording, TrainingPart
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.cost_simulator import CostSimulator
from outblas_lab.train.knob_policy import KnobPolicy
from outblas_lab.train.knob_quality import KnobSearch, knob_search_qualities, knob_searches
from outblas_lab.train.knob_settings import KnobSettings
from outblas_lab.train.recorded_members import RecordedMembers
from outblas_lab.train.rl_packages import BaseCallback, DummyVecEnv, MaskablePPO, VecMonitor, torch
from outblas_lab.train.torch_threads import one_thread
from outblas_lab.train.train_ppo import Progress, TrainingRun, claim_folder, load_checkpoint, save_checkpoint
from outblas_lab.train.training_part import split_parts

#: Measurements after which a checkpoint is judged: the mean of the log quality at these.
JUDGED_MEASUREMENTS = (1, 4)
#: Held-back problems, at most, on which a checkpoint is judged.
JUDGED_PROBLEMS = 20
#: Compute capability, times 10, from which a packaged GPU is simulated.
SIMULATED_FROM_ARCH = 90


def train_knobs(
    recording: Recording, problems: Sequence[Problem], settings: KnobSettings | None = None,
    run: TrainingRun | None = None, progress: Progress | None = None, space: KernelSpace | None = None,
) -> KnobPolicy:  # fmt: skip
    """Train a policy that chooses kernels knob by knob.

    The first stage offers every legal member of the space on simulated GPUs: that of the recording, and the other
    packaged ones with wgmma. The second stage offers the recorded cells of ``problems`` only. ``split_parts`` holds
    some problems back; the checkpoint that is best on their recorded cells is returned. The first checkpoint is the
    untrained network. torch has one thread meanwhile. The result is the same for the same seed.

    Args:
        problems: recorded problems, 10 or more.
        settings: hyper-parameters. None: the defaults.
        run: place of checkpoints and logs. A folder with a training of the same settings is resumed; ``steps`` may
            differ. None: keep nothing.
        progress: called with (transitions done, transitions in all, text).
        space: the kernels. None: :func:`outblas.kernels.kernel_space.kernel_space`.

    Raises:
        UsageError: a problem was not recorded, fewer than ten problems, or the folder has a training of other settings.
        RecordError: the folder lacks a file, it cannot be read or written, or another process trains in it.
    """
    run, settings = run or TrainingRun(), settings or KnobSettings()
    if len(problems) < 10:
        raise UsageError(f"{len(problems)} problems to train on", "10 or more", "name more problems")
    with contextlib.nullcontext() if run.path is None else lock_folder(run.path), one_thread():
        claim_folder(run, settings, [TrainingPart(recording, tuple(problems))])
        return _Training(recording, problems, settings, run, progress, space or kernel_space()).run()


class _Training:
    """A training: the environments of both stages, the learner and the checkpoints."""

    def __init__(
        self, recording: Recording, problems: Sequence[Problem], settings: KnobSettings, run: TrainingRun,
        progress: Progress | None, space: KernelSpace,
    ) -> None:  # fmt: skip
        self.space = space
        self.recording, self.settings, self.place, self.progress = recording, settings, run, progress
        learn, judge = split_parts([TrainingPart(recording, tuple(problems))], settings.seed)
        self.learn, check = learn[0].problems, judge[0].problems
        few = (
            check if len(check) <= JUDGED_PROBLEMS else sample(check, JUDGED_PROBLEMS, settings.seed, gpu=recording.gpu)
        )
        self.gpus = simulated_gpus(recording.gpu)
        self.searches = knob_searches(recording, few)
        seen = np.stack([problem_features(p, gpu) for gpu in self.gpus for p in self.learn])
        self.fixed, self.typical = np.ptp(seen, axis=0) == 0, seen[0]

    def run(self) -> KnobPolicy:
        """Train both stages, or what is left of them; return the best checkpoint."""
        torch.manual_seed(self.settings.seed)
        checkpoints = _Checkpoints(self)
        model = None
        for envs, until in ((self._simulated, self.settings.simulated_steps), (self._recorded, self.settings.steps)):
            done = model.num_timesteps if model is not None else self._done()
            if done < until:
                model = self._model(envs(), model)
                model.learn(until - done, callback=checkpoints, reset_num_timesteps=done == 0, tb_log_name="knobs")
        return checkpoints.best()

    def _done(self) -> int:
        kept = self.place.file("knobs.zip")
        return int(load_checkpoint(kept).num_timesteps) if kept is not None and kept.exists() else 0

    def _model(self, envs: Any, model: Any) -> Any:
        """Return the learner on some environments: the given one, that of the last checkpoint, or a new one."""
        s, kept = self.settings, self.place.file("knobs.zip")
        logs = str(self.place.path) if self.place.path is not None and self.place.tensorboard else None
        if model is not None:
            model.set_env(envs)
            return model
        if kept is not None and kept.exists():
            return load_checkpoint(kept, env=envs, tensorboard_log=logs)
        network = {"net_arch": {"pi": [s.width] * 2, "vf": [s.width] * 2}, "activation_fn": torch.nn.SiLU}
        return MaskablePPO("MlpPolicy", envs, tensorboard_log=logs, policy_kwargs=network, **s.learner_arguments())

    def _simulated(self) -> Any:
        from outblas_lab.train.knob_env import KnobEnv

        simulators = [CostSimulator(gpu, self.space) for gpu in self.gpus]
        chosen = (simulators[i % len(simulators)] for i in range(self.settings.envs))
        return self._vector([
            partial(KnobEnv, one, self.learn, self.settings.budget, scale=one.reward_scale, space=self.space)
            for one in chosen
        ])  # fmt: skip

    def _recorded(self) -> Any:
        from outblas_lab.train.knob_env import KnobEnv

        members, replay = RecordedMembers(self.recording, self.space), ReplayEvaluator(self.recording)
        able = [p for p in self.learn if all(len(members.offered(p, launch)) for launch in LAUNCHES[:2])]
        make = partial(
            KnobEnv, replay, able, self.settings.budget, members.offered, members.reward_scale, space=self.space
        )  # fmt: skip
        return self._vector([make] * self.settings.envs)

    def _vector(self, makers: Sequence[Callable[[], Any]]) -> Any:
        envs = VecMonitor(DummyVecEnv(list(makers)))
        envs.seed(self.settings.seed)
        return envs


def simulated_gpus(gpu: Gpu) -> list[Gpu]:
    """Return the GPUs of the simulated stage: the given one first, then other packaged ones from sm_90 on.

    Args:
        gpu: GPU of the recording.
    """
    others = (record.gpu for record in packaged_records().values() if record.gpu.arch >= SIMULATED_FROM_ARCH)
    return [gpu, *(other for other in others if other.name != gpu.name)]


class _Checkpoints(BaseCallback):
    """After every few updates: a checkpoint, and its score on the held-back problems."""

    def __init__(self, training: _Training) -> None:
        super().__init__()
        self._training, self._updates = training, 0
        kept = training.place.file("policy.npz")
        self._best = KnobPolicy.load(kept) if kept is not None and kept.exists() else None
        self._best_score = -np.inf if self._best is None else float(json.loads(self._best.about)["score"])

    def best(self) -> KnobPolicy:
        """Return the best checkpoint so far."""
        if self._best is None:
            raise RecordError(
                f"{self._training.place.path} holds no policy", "the file policy.npz", "choose another --run"
            )
        return self._best

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self._updates % self._training.settings.checkpoint == 0:
            self._judge()
        self._updates += 1

    def _on_training_end(self) -> None:
        self._judge()
        self.logger.dump(self.num_timesteps)

    def _judge(self) -> None:
        training, settings = self._training, self._training.settings
        layers = network_layers(self.model.policy)
        policy = KnobPolicy(layers, training.fixed, training.typical)
        at = judged(policy, training.searches)
        score = float(np.mean(np.log(list(at.values()))))
        figures = {f"quality/after_{b}": q for b, q in at.items()} | {"quality/score": score}
        if self.model.ep_info_buffer:
            figures["rollout/reward"] = float(np.mean([e["r"] for e in self.model.ep_info_buffer]))
        for name, value in figures.items():
            self.logger.record(name, value)
        if score > self._best_score:
            about = {"settings": asdict(settings), "steps": int(self.num_timesteps), "commit": source_commit()}
            about |= {"score": score, "recording": training.recording.provenance}
            self._best_score, self._best = score, replace(policy, about=json.dumps(about, sort_keys=True))
            if (kept := training.place.file("policy.npz")) is not None:
                self._best.save(kept)
        if (kept := training.place.file("knobs.zip")) is not None:
            save_checkpoint(self.model, kept)
        if training.progress is not None:
            stage = "simulated" if 0 < settings.simulated_steps >= self.num_timesteps else "recorded"
            said = ", ".join(f"{b}: {q:.4f}" for b, q in at.items())
            training.progress(self.num_timesteps, settings.steps, f"{stage}, held back {said}")


def judged(policy: KnobPolicy, searches: Sequence[KnobSearch]) -> dict[int, float]:
    """Return measurements -> geometric mean of the quality after them, for each of ``JUDGED_MEASUREMENTS``."""
    quality = knob_search_qualities(policy, searches, max(JUDGED_MEASUREMENTS))
    return {b: float(np.exp(np.mean(np.log(quality[:, b - 1])))) for b in JUDGED_MEASUREMENTS}


def network_layers(policy: Any) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return (weights float32[in, out], biases float32[out]) of each layer of an sb3 policy that chooses actions."""
    linear = [layer for layer in policy.mlp_extractor.policy_net if isinstance(layer, torch.nn.Linear)]
    return tuple(
        (layer.weight.detach().numpy().T.astype(np.float32), layer.bias.detach().numpy().astype(np.float32))
        for layer in (*linear, policy.action_net)
    )
