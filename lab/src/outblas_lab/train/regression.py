"""Training of the regressor (``outblas.predict.posterior``) on recorded problems."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Status
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.predict.features import Features, candidate_features, problem_features
from outblas.predict.posterior import Regressor
from outblas_lab.recordings.recording import Recording, TrainingPart
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train.policy import Policy
from outblas_lab.train.training_part import split_parts, training_cache_folder

try:
    import torch
except ImportError as error:
    raise ToolchainMissing("torch is not installed", "torch >= 2.6", install_hint("rl")) from error

#: Cells this log time over the best of their task are the hinge between square and linear loss.
HUBER = 0.05
#: A cell counts by (best / time) to this power, and no less than FAR: it is to rank the front.
FRONT_WEIGHT_POWER, MIN_CELL_WEIGHT = 4, 0.02
#: Share of a task's mean error that is taken off: the regressor predicts up to a constant.
CENTRED_SHARE = 0.98


@dataclass(frozen=True)
class RegressSettings:
    """Settings of the regressor's training."""

    nets: int = 3
    width: int = 96
    epochs: int = 40
    batch: int = 16
    lr: float = 6e-3
    weight_decay: float = 1e-3


@dataclass(frozen=True)
class RegressionTask:
    """Proven cells of one problem and launch option.

    Attributes:
        inputs: float32[n, 66], problem features and then candidate features of each cell.
        log_us: float64[n], natural logs of microseconds.
    """

    inputs: Features
    log_us: np.ndarray


def tasks_of(recording: Recording, problems: Sequence[Problem]) -> list[RegressionTask]:
    """Return one task per problem and launch option that has two proven cells or more, in the order of the problems.

    The options of a problem are up to three: ``plain``, ``pdl`` and ``weights``.

    Raises:
        UsageError: a problem was not recorded.
    """
    found = []
    for problem in problems:
        row = recording.row(problem)
        about = problem_features(problem, recording.gpu)
        for columns in recording.by_launch(problem).values():
            cells = columns[recording.status[row, columns] == STATUS_CODES[Status.PASSED]]
            if len(cells) > 1:
                each = candidate_features(problem, [recording.catalogue[i] for i in cells], recording.gpu)
                wide = np.broadcast_to(about, (len(each), len(about)))
                log_us = np.log(recording.median_us[row, cells].astype(np.float64))
                found.append(RegressionTask(np.concatenate([wide, each], axis=1), log_us))
    return found


def regressor_cache_path(parts: Sequence[TrainingPart], settings: RegressSettings, seed: int) -> Path:
    """Return the file in the cache directory for the regressor of these parts, settings and seed. Nothing is created.

    The path changes with the problems, their order, the recorded times and the GPUs.

    Raises:
        UsageError: a problem was not recorded.
    """
    return training_cache_folder("regressors", parts, asdict(settings), seed) / "regressor.npz"


def cached_regressor(
    file: Path | None, parts: Sequence[TrainingPart], settings: RegressSettings, seed: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> Regressor:  # fmt: skip
    """Return the regressor of ``file`` if that exists. Otherwise train one on ``parts`` and write it there.

    An existing file is not compared with the other arguments.

    Raises:
        UsageError: as :func:`train_regressor`.
        RecordError: the file cannot be read or written.
    """
    if file is not None and file.exists():
        return Policy.load(file).regressor
    found = train_regressor(parts, settings, seed, progress)
    if file is not None:
        Policy(found, {}).save(file)
    return found


def regressor_of_ppo(parts: Sequence[TrainingPart], seed: int) -> Regressor:
    """Return the regressor that a training of agent ``ppo`` begins with, from the cache if it is there.

    Raises:
        UsageError: as :func:`train_regressor`.
        RecordError: the cached file cannot be read or written.
    """
    settings, learn = RegressSettings(), split_parts(parts, seed)[0]
    return cached_regressor(regressor_cache_path(learn, settings, seed), learn, settings, seed)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread within the ``with`` block, and its former number after it.

    The networks are small: more threads wait for each other. The result then depends on no number of threads, either.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Nets(torch.nn.Module):
    """Perceptrons of equal shape, evaluated together."""

    def __init__(self, inputs: int, settings: RegressSettings) -> None:
        super().__init__()
        sizes = [inputs, settings.width, settings.width, 1]
        self.weights, self.biases = torch.nn.ParameterList(), torch.nn.ParameterList()
        for fan_in, fan_out in pairwise(sizes):
            gain = math.sqrt(2 / fan_in) * (0.1 if fan_out == 1 else 1.0)
            self.weights.append(torch.randn(settings.nets, fan_in, fan_out) * gain)
            self.biases.append(torch.zeros(settings.nets, 1, fan_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tasks, cells, inputs] -> [nets, tasks, cells]."""
        h = x.reshape(1, -1, x.shape[-1]).expand(len(self.weights[0]), -1, -1)
        for layer, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = torch.baddbmm(b, h, w)
            if layer + 1 < len(self.weights):
                h = torch.nn.functional.silu(h)
        return h.reshape(-1, *x.shape[:2])


def train_regressor(
    parts: Sequence[TrainingPart], settings: RegressSettings | None = None, seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Regressor:  # fmt: skip
    """Train a regressor on the recorded cells of ``parts``. The result is the same for the same seed.

    torch has one thread meanwhile. An input that is the same everywhere contributes nothing. On one GPU, so are all
    features of the GPU.

    Args:
        parts: recorded problems, of one GPU or several. Each task counts the same.
        progress: called after each epoch with (epoch, epochs, ``"loss 0.0123"``).

    Raises:
        UsageError: a problem was not recorded, or none has two proven cells.
    """
    settings = settings or RegressSettings()
    tasks = [task for part in parts for task in tasks_of(part.recording, part.problems)]
    if not tasks:
        expected = "problems with at least two proven cells each"
        raise UsageError("there are no cells to learn from", expected, "pass other problems")
    stacked = np.concatenate([t.inputs for t in tasks])
    mean, deviation = (of(axis=0, dtype=np.float64) for of in (stacked.mean, stacked.std))
    limits = np.stack([stacked.min(axis=0), stacked.max(axis=0)])
    # An input that was always the same tells nothing, and its weight stays what chance made it: it is left out.
    same = (limits[0] == limits[1]) | (deviation < 1e-6)
    scale = np.where(same, 0.0, 1.0 / np.maximum(deviation, 1e-6)).astype(np.float32)
    x, y, weight = _padded(tasks, mean.astype(np.float32), scale)
    with torch.random.fork_rng(), one_thread():
        torch.manual_seed(seed)
        nets = _fit(_Nets(x.shape[-1], settings), x, y, weight, settings, progress)
    weights, biases = ([p.detach().numpy().astype(np.float32) for p in part] for part in (nets.weights, nets.biases))
    return Regressor(mean.astype(np.float32), scale, tuple(weights), tuple(biases), limits)


def _fit(
    nets: _Nets, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, settings: RegressSettings,
    progress: Callable[[int, int, str], None] | None,
) -> _Nets:  # fmt: skip
    per_epoch = math.ceil(len(x) / settings.batch)
    optimizer = torch.optim.AdamW(nets.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, total_steps=per_epoch * settings.epochs, pct_start=0.1
    )
    for epoch in range(settings.epochs):
        order, total = torch.randperm(len(x)), 0.0
        for batch in order.split(settings.batch):
            cells = int((weight[batch] > 0).sum(dim=1).max())
            loss = _loss(nets(x[batch, :cells]), y[batch, :cells], weight[batch, :cells])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
        if progress is not None:
            progress(epoch + 1, settings.epochs, f"loss {total / len(x):.4f}")
    return nets


def _loss(predicted: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    share = weight / weight.sum(dim=1, keepdim=True)
    error = predicted - y
    size = (error - CENTRED_SHARE * (error * share).sum(dim=2, keepdim=True)).abs()
    huber = torch.where(size < HUBER, size**2 / (2 * HUBER), size - HUBER / 2)
    return (share * huber).sum(dim=2).mean()


def _padded(tasks: Sequence[RegressionTask], mean: Features, scale: Features) -> tuple[torch.Tensor, ...]:
    """Inputs [tasks, cells, F], log time over the task's best and weight [tasks, cells]; 0 behind a task's cells."""
    longest = max(len(t.log_us) for t in tasks)
    x = np.zeros((len(tasks), longest, len(mean)), dtype=np.float32)
    y, weight = (np.zeros((len(tasks), longest), dtype=np.float32) for _ in range(2))
    for i, task in enumerate(tasks):
        n, behind = len(task.log_us), task.log_us - task.log_us.min()
        x[i, :n], y[i, :n] = (task.inputs - mean) * scale, behind
        weight[i, :n] = np.maximum(np.exp(-FRONT_WEIGHT_POWER * behind), MIN_CELL_WEIGHT)
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight)
