"""Choose the kernels for shapes that no library has, and fit the predictions of :mod:`outblas.learn.any_shape`.

The kernels are few, because each is shipped and ranked.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, launch_of
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import first_search_candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.learn.any_shape import is_vector_product, network_inputs
from outblas.learn.posterior import Regressor
from outblas.records.library import Library
from outblas.records.recording import Recording

#: Counts of kernels by the reason of their choice. The first add most to the recorded problems; the second are those
#: that the library installs most. The last are ranked first by the model at extents that are no multiples of 8.
BY_RECORDING, BY_LIBRARY, GEMVS, BY_MODEL = 80, 24, 24, 24
#: Random problems of which the ranking model is asked.
RANDOM_PROBLEMS = 300
#: Of a recorded problem: its fastest kernels, and as many others, drawn.
FASTEST_PER_PROBLEM = 8
#: Nets, their width, passes over the data, cells a step, highest learning rate and weight decay.
NETS, WIDTH, EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 5, 96, 30, 512, 4e-3, 1e-2
#: Log speed-ups beyond this are as good as it; errors beyond HUBER count by their size, not its square.
LOG_SPEEDUP_BOUND, HUBER = 1.5, 0.1
#: What a cell of a problem that no suite has counts, of a suite's 1.
UNLISTED_WEIGHT = 2.0
#: Shares of the problems outside the suites that each fold keeps out.
FOLDS = 4


def general_kernels(gpu: Gpu, seed: int = 0) -> tuple[KernelConfig, ...]:
    """Return the kernels without PDL that are offered for any shape, without repeats, at most 152.

    First come those that add most to the recorded problems, then those that the packaged library installs most. Last
    come those that the ranking model puts first on random problems.

    Args:
        gpu: GPU with a packaged recording and library.
        seed: seed of the random problems.
    """
    found = dict.fromkeys(_covering(Recording.load(gpu.name), BY_RECORDING))
    for wanted, among in (
        (BY_LIBRARY, (c for c in _installed(gpu.name) if not FAMILIES[c.family].few_rows_only)),
        (GEMVS, (c for c in _installed(gpu.name) if FAMILIES[c.family].few_rows_only)),
        (BY_MODEL, _first_choices(gpu, seed)),
    ):
        counts = Counter(c for c in among if c not in found)
        found.update(dict.fromkeys(config for config, _ in counts.most_common(wanted)))
    return tuple(found)


@dataclass(frozen=True)
class OfferedCells:
    """Measured kernels of one problem.

    Attributes:
        problem: the problem.
        configs: the kernels.
        gains: float32, natural log of each kernel's speed-up over torch.matmul.
        outside: True if the problem is in no suite.
    """

    problem: Problem
    configs: tuple[KernelConfig, ...]
    gains: NDArray[np.float32]
    outside: bool


def cells_of_recording(recording: Recording, seed: int = 0) -> list[OfferedCells]:
    """Return one :class:`OfferedCells` per recorded problem, in the recording's order, each with ``outside=False``.

    It has the problem's 8 fastest kernels without PDL, and up to 8 others, drawn.
    """
    rng, found = np.random.default_rng(seed), []
    plain = np.array([launch_of(c) == "plain" for c in recording.catalogue])
    for i, problem in enumerate(recording.problems):
        timed = np.flatnonzero((recording.rounds[i] > 0) & plain)
        order = timed[np.argsort(recording.median_us[i, timed], kind="stable")]
        chosen = [*order[:FASTEST_PER_PROBLEM], *rng.permutation(order[FASTEST_PER_PROBLEM:])[:FASTEST_PER_PROBLEM]]
        us = recording.median_us[i, chosen].astype(float)
        gains = np.log(float(recording.baselines["torch"][i]) / us).astype(np.float32)
        found.append(OfferedCells(problem, tuple(recording.catalogue[c] for c in chosen), gains, outside=False))
    return found


def fit(cells: Sequence[OfferedCells], gpu: Gpu, seed: int = 0) -> Regressor:
    """Return 5 nets trained on the cells: inputs of ``network_inputs``, output the log speed-up over torch.matmul.

    Log speed-ups are clipped to [-1.5, 1.5]. A cell of a problem outside the suites counts twice. The result is the
    same for the same seed and number of threads.
    """
    x = np.concatenate([network_inputs(c.problem, c.configs, gpu) for c in cells])
    y = torch.from_numpy(np.clip(np.concatenate([c.gains for c in cells]), -LOG_SPEEDUP_BOUND, LOG_SPEEDUP_BOUND))
    counts = torch.tensor(np.concatenate([np.full(len(c.gains), UNLISTED_WEIGHT if c.outside else 1.0) for c in cells]))
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    scale = np.where(deviation < 1e-5, 0.0, 1.0 / np.maximum(deviation, 1e-5)).astype(np.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        nets = [_fit_one(torch.from_numpy((x - mean) * scale), y, counts.float()) for _ in range(NETS)]
    linear = [[part for part in net if isinstance(part, torch.nn.Linear)] for net in nets]
    layers = range(len(linear[0]))
    weights = tuple(np.stack([each[i].weight.detach().numpy().T for each in linear]) for i in layers)
    biases = tuple(np.stack([each[i].bias.detach().numpy()[None] for each in linear]) for i in layers)
    return Regressor(mean, scale, weights, biases)


def _fit_one(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.nn.Sequential:
    act, linear = torch.nn.SiLU, torch.nn.Linear
    net = torch.nn.Sequential(linear(x.shape[1], WIDTH), act(), linear(WIDTH, WIDTH), act(), linear(WIDTH, 1))
    steps = EPOCHS * max(1, len(x) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(x), (BATCH,))
        error = torch.nn.functional.huber_loss(net(x[some])[:, 0], y[some], delta=HUBER, reduction="none")
        optimizer.zero_grad()
        (counts[some] * error).mean().backward()
        optimizer.step()
        schedule.step()
    return net


@dataclass(frozen=True)
class KeptOutResult:
    """The choice for a problem that the fit had not seen.

    Attributes:
        gain: predicted natural log of the chosen kernel's speed-up over torch.matmul.
        deviation: standard deviation of that prediction.
        measured: measured natural log of the same speed-up.
    """

    gain: float
    deviation: float
    measured: float


def cross_validate(
    cells: Sequence[OfferedCells], gpu: Gpu, report: Callable[[str], None], seed: int = 0
) -> list[tuple[float, list[KeptOutResult]]]:
    """Cross-validate the choices for each number of standard deviations (0 to 4) of the lower bound.

    Four folds of the problems with ``outside=True`` are kept out in turn, vector products aside. All other
    cells are in every fit.

    Args:
        cells: measured kernels of problems.
        gpu: the GPU that was measured.
        report: called with ``"fold 1 of 4"`` and so on.
        seed: seed of the folds and nets.

    Returns:
        (0.0, results), (1.0, results) and so on to 4.0; one result per problem kept out.
    """
    outside = [i for i, c in enumerate(cells) if c.outside and not is_vector_product(c.problem)]
    found: list[tuple[float, list[KeptOutResult]]] = [(float(sure), []) for sure in range(5)]
    for fold in range(FOLDS):
        held = set(np.random.default_rng(seed).permutation(outside)[fold::FOLDS])
        nets = fit([c for i, c in enumerate(cells) if i not in held], gpu, seed)
        for i in held:
            gain, deviation = nets.predict(network_inputs(cells[i].problem, cells[i].configs, gpu))
            for sure, outcomes in found:
                best = int((gain - sure * deviation).argmax())
                outcomes.append(KeptOutResult(float(gain[best]), float(deviation[best]), float(cells[i].gains[best])))
        report(f"fold {fold + 1} of {FOLDS}")
    return found


def score_choices(outcomes: Sequence[KeptOutResult], sure: float, margin: float, slow: float) -> tuple[float, int]:
    """Score the rule that takes a choice if its lower bound reaches the margin, and leaves the product to torch
    otherwise.

    Args:
        outcomes: choices for problems that were kept out.
        sure: number of standard deviations down to the bound.
        margin: least lower bound, a ratio.
        slow: ratio below which a product counts as slower.

    Returns:
        (geometric mean of the speed-ups over torch.matmul, number of problems below ``slow``). A product left to torch
        counts as 1.
    """
    taken = [o.measured if o.gain - sure * o.deviation >= np.log(margin) else 0.0 for o in outcomes]
    return float(np.exp(np.mean(taken))), sum(gain < np.log(slow) for gain in taken)


def _covering(recording: Recording, count: int) -> Iterator[KernelConfig]:
    """Greedily: what adds most to the mean log speed-up over torch.matmul that those before give."""
    plain = np.array([launch_of(c) == "plain" for c in recording.catalogue])
    timed = (recording.rounds > 0) & plain
    us = np.where(timed, recording.median_us, np.inf).astype(float)
    gain = np.log(np.maximum(recording.baselines["torch"].astype(float)[:, None] / us, 1))
    best = np.zeros(len(gain))
    for _ in range(count):
        index = int(np.maximum(gain, best[:, None]).mean(axis=0).argmax())
        best = np.maximum(best, gain[:, index])
        yield recording.catalogue[index]


def _installed(name: str) -> Iterator[KernelConfig]:
    for row in Library.packaged(name).rows:
        if row.plain is not None and row.problem.acc == "fp32":
            yield row.plain.config


def _first_choices(gpu: Gpu, seed: int) -> Iterator[KernelConfig]:
    rng = random.Random(seed)
    for _ in range(RANDOM_PROBLEMS):
        m, n, k = (round(2 ** rng.uniform(0, 13)) for _ in range(3))
        problem = Problem(m, n, k, rng.choice(("TN", "NN")))
        offered: Sequence[KernelConfig] = [c for c in first_search_candidates(problem, gpu) if launch_of(c) == "plain"]
        yield offered[int(rank(problem, offered, gpu)[0])]
