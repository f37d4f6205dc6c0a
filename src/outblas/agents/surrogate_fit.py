"""The surrogate's regression: a few small networks, each fitted with a part of the shapes left out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.agents.surrogate_features import features
from outblas.config import LAUNCHES, launch_of
from outblas.errors import ToolchainMissing, UsageError
from outblas.evaluation import Status
from outblas.model_terms import Floats
from outblas.problem import Problem
from outblas.recording import CODE, Recording
from outblas.roofline import Gpu

#: Networks, units of either hidden layer, passes over the tasks, tasks in a step, largest learning rate.
MEMBERS, WIDTH, EPOCHS, BATCH, RATE = 3, 128, 20, 16, 3e-3
#: Softness of the ranking, in logarithms of time: a candidate 3% slower is wanted 1/e as much.
SOFTNESS = 0.03
#: Standardised features are kept within so many standard deviations.
LARGEST = 5.0
#: The process is fitted to cells so near their task's best (logarithm), on so many tasks drawn.
NEAR, TASKS = 0.2, 150
_SPREADS, _LENGTHS, _OWN = (0.02, 0.04, 0.08, 0.12), (0.3, 0.5, 0.8, 1.2), (0.02, 0.03, 0.04)


@dataclass(frozen=True)
class Task:
    """What was recorded of one problem under one launch option.

    Attributes:
        shape: (M, N, K). x: float64[cells, features]. slower: float64[cells], log of time over the best of the task.
    """

    shape: tuple[int, int, int]
    x: Floats
    slower: Floats


@dataclass(frozen=True)
class Fitted:
    """Networks as arrays, and the process that what they leave follows; nothing here needs torch.

    Attributes:
        centre, scale: float64[features]. layers: of each network, (weights[out, in], bias[out]) of its three layers.
        spread, length, own: of the process: see :func:`covariance`; own: deviation of each candidate by itself.
    """

    centre: Floats
    scale: Floats
    layers: tuple[tuple[tuple[Floats, Floats], ...], ...]
    spread: float
    length: float
    own: float

    def places(self, x: Floats) -> Floats:
        """Standardised features."""
        return standardised(x, self.centre, self.scale)

    def mean(self, x: Floats) -> Floats:
        """Expected log time up to a constant of the problem and the launch option: float64[configs]."""
        return np.mean([_forward(layers, self.places(x)) for layers in self.layers], axis=0)


def standardised(x: Floats, centre: Floats, scale: Floats) -> Floats:
    return np.clip((x - centre) / scale, -LARGEST, LARGEST)


def covariance(places: Floats, spread: float, length: float) -> Floats:
    """Squared-exponential kernel, float64[configs, configs]; distances are root mean squares over the features."""
    squares = (places**2).sum(axis=1)
    distance = np.maximum(squares[:, None] + squares - 2 * places @ places.T, 0.0) / places.shape[1]
    return spread**2 * np.exp(-distance / (2 * length**2))


def fit(recording: Recording, problems: Sequence[Problem], gpu: Gpu) -> Fitted:
    """Networks and process from recorded problems; deterministic, one thread's arithmetic aside.

    The loss of a task is the cross-entropy between softmax(-time) as measured and as predicted, both logarithms over
    :data:`SOFTNESS` (ListNet: Cao et al., Learning to Rank: From Pairwise to Listwise Approach, 2007): only the order
    near the best counts. Each network is fitted with another part of the shapes left out, and the process on what
    the networks leave on the part that they did not see.

    Raises:
        UsageError: a problem is not in the recording, or there are too few shapes with two measured candidates.
        ToolchainMissing: torch is not installed.
    """
    tasks = _tasks(recording, problems, gpu)
    shapes = sorted({task.shape for task in tasks})
    if len(shapes) < 2 * MEMBERS:
        raise UsageError(
            f"{len(shapes)} recorded shapes with something to learn from", f"{2 * MEMBERS} or more",
            "prepare the agent on more problems",
        )  # fmt: skip
    cells = np.concatenate([task.x for task in tasks])
    deviation = cells.std(axis=0)
    centre, scale = cells.mean(axis=0), np.where(deviation > 1e-9, deviation, 1.0)
    order = np.random.default_rng(0).permutation(len(shapes))
    fold = {shapes[int(i)]: place % MEMBERS for place, i in enumerate(order)}
    places = [standardised(task.x, centre, scale) for task in tasks]
    layers, unseen = [], []
    for member in range(MEMBERS):
        seen = [i for i, task in enumerate(tasks) if fold[task.shape] != member]
        layers.append(_train([places[i] for i in seen], [tasks[i].slower for i in seen], member))
        unseen += [
            (places[i], task.slower - _forward(layers[-1], places[i]), task.slower)
            for i, task in enumerate(tasks)
            if fold[task.shape] == member
        ]
    return Fitted(centre, scale, tuple(layers), *_process(unseen))


def _tasks(recording: Recording, problems: Sequence[Problem], gpu: Gpu) -> list[Task]:
    launches = np.array([LAUNCHES.index(launch_of(config)) for config in recording.catalogue])
    tasks: list[Task] = []
    for problem in problems:
        row = recording.row(problem)
        passed = recording.status[row] == CODE[Status.PASSED]
        for launch in range(len(LAUNCHES)):
            cells = np.flatnonzero(passed & (launches == launch))
            if len(cells) > 1:
                times = np.log(recording.median_us[row, cells].astype(np.float64))
                found = features(problem, [recording.catalogue[int(i)] for i in cells], gpu)
                tasks.append(Task((problem.m, problem.n, problem.k), found, times - times.min()))
    return tasks


def _train(xs: Sequence[Floats], ys: Sequence[Floats], seed: int) -> tuple[tuple[Floats, Floats], ...]:
    try:
        import torch
    except ImportError as error:
        raise ToolchainMissing("torch is not installed", "torch 2.6 or later", "pip install 'outblas[gpu]'") from error
    longest = max(map(len, ys))
    x = torch.zeros((len(xs), longest, xs[0].shape[1]))
    y = torch.full((len(xs), longest), torch.inf)  # cells that are not there are wanted with weight 0
    for i, (cells, slower) in enumerate(zip(xs, ys, strict=True)):
        x[i, : len(cells)], y[i, : len(cells)] = torch.from_numpy(cells), torch.from_numpy(slower)
    wanted, absent = torch.softmax(-y / SOFTNESS, dim=1), torch.isinf(y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[2], WIDTH), torch.nn.SiLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.SiLU(),
            torch.nn.Linear(WIDTH, 1),
        )  # fmt: skip
        steps = EPOCHS * -(-len(xs) // BATCH)
        optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(xs)).split(BATCH):
                there = ~absent[batch]
                logits = torch.full(there.shape, -1e9).masked_scatter(there, -network(x[batch][there])[:, 0] / SOFTNESS)
                loss = -(wanted[batch] * torch.log_softmax(logits, dim=1)).sum() / len(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return tuple((_array(layer.weight), _array(layer.bias)) for layer in network[::2])


def _array(tensor: Any) -> Floats:
    return np.asarray(tensor.detach().numpy(), dtype=np.float64)


def _forward(layers: Sequence[tuple[Floats, Floats]], x: Floats) -> Floats:
    for weight, bias in layers[:-1]:
        x = x @ weight.T + bias
        x = x / (1 + np.exp(-np.clip(x, -60, 60)))
    weight, bias = layers[-1]
    return np.asarray((x @ weight.T + bias)[:, 0])


def _process(unseen: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[float, float, float]:
    """(spread, length, own) of the largest marginal likelihood on tasks drawn, each with a level of its own."""
    drawn = np.random.default_rng(0).permutation(len(unseen))[:TASKS]
    parts: list[tuple[Floats, Floats]] = []
    for places, left, slower in (unseen[int(i)] for i in drawn):
        near: NDArray[np.bool_] = slower < NEAR
        parts.append((places[near], left[near] - left[near].mean()))

    def likelihood(knobs: tuple[float, float, float]) -> float:
        spread, length, own = knobs
        total = 0.0
        for places, left in parts:
            kernel = covariance(places, spread, length) + 1.0 + own**2 * np.eye(len(left))
            total -= float(left @ np.linalg.solve(kernel, left) + np.linalg.slogdet(kernel)[1])
        return total

    return max(itertools.product(_SPREADS, _LENGTHS, _OWN), key=likelihood)
