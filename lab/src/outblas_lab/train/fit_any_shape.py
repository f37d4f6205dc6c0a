"""Choose the kernels for shapes that no library has, and fit the predictions of :mod:`outblas.predict.any_shape`.

The kernels are few, because each is shipped and ranked.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, launch_of
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.rivals import LT_HEURISTIC, RIVALS
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import first_search_candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.predict.any_shape import network_inputs, shape_features
from outblas.predict.features import Features
from outblas.predict.posterior import Regressor
from outblas.predict.rival_answer import ANSWER_FEATURES
from outblas.records.library import Library
from outblas_lab.recordings.recording import Recording

#: Counts of kernels by the reason of their choice. The first add most to the recorded problems; the second are those
#: that the library installs most. The last are ranked first by the model at extents that are no multiples of 8.
BY_RECORDING, BY_LIBRARY, GEMVS, BY_MODEL = 80, 24, 24, 24
#: Kernels for unaligned rows, and the least number of such kernels of a problem from which they are chosen.
FOR_UNALIGNED, LEAST_UNALIGNED = 40, 20
#: Random problems of which the ranking model is asked.
RANDOM_PROBLEMS = 300
#: Of a recorded problem, with and without PDL: the fastest kernels, and as many others, drawn.
FASTEST_PER_PROBLEM = 8
#: Log speed-ups beyond this are as good as it.
LOG_SPEEDUP_BOUND = 1.5
#: Nets of a fit.
NETS = 5
#: Source of the problems that no suite has.
RANDOM = "random"
#: What a cell of these problems counts, of a suite's 1.
UNLISTED_WEIGHT = 2.0
#: Share of the cells whose answer of cuBLASLt a fit does not see, so that the nets can do without it.
UNANSWERED = 0.3


class NetSettings(NamedTuple):
    """Settings of a training of nets.

    Attributes:
        width: of each of two hidden layers.
        epochs: passes over the data.
        batch: cells a step of each net.
        huber: errors beyond it count by their size, not its square.
        learning_rate: the highest.
        weight_decay: of AdamW.
    """

    width: int = 160
    epochs: int = 48
    batch: int = 2048
    huber: float = 0.1
    learning_rate: float = 1e-2
    weight_decay: float = 1e-2


SETTINGS = NetSettings()


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
        configs: the kernels.
        gains: float32, natural log of each kernel's speed-up over torch.matmul.
        fitted: bool, which kernels a fit sees.
        source: suite of the problem, or ``random``.
        gpu: the GPU that was measured.
        answer: first answer of cuBLASLt's heuristic (:func:`outblas.runtime.cublas.describe`); empty: unknown.
        rival: natural log of the speed-up of the fastest baseline over torch.matmul; NaN if torch alone was timed.
    """

    problem: Problem
    configs: tuple[KernelConfig, ...]
    gains: NDArray[np.float32]
    fitted: NDArray[np.bool_]
    source: str
    gpu: Gpu
    answer: str = ""
    rival: float = math.nan


def cells_of_recording(recording: Recording, gpu: Gpu, seed: int = 0) -> list[OfferedCells]:
    """Return one :class:`OfferedCells` per recorded problem, in the recording's order, with all measured kernels.

    A fit sees the 8 fastest kernels without PDL, the 8 fastest with it, and up to 8 others of each, drawn.

    Args:
        gpu: its GPU.
        seed: seed of the draw.
    """
    rng, found = np.random.default_rng(seed), []
    pdl = np.array([config.pdl for config in recording.catalogue])
    for i, problem in enumerate(recording.problems):
        timed = np.flatnonzero(recording.rounds[i] > 0)
        us = recording.median_us[i].astype(float)
        fitted = np.zeros(len(us), dtype=bool)
        for option in (False, True):
            same = timed[pdl[timed] == option]
            order = same[np.argsort(us[same], kind="stable")]
            fitted[order[:FASTEST_PER_PROBLEM]] = True
            fitted[rng.permutation(order[FASTEST_PER_PROBLEM:])[:FASTEST_PER_PROBLEM]] = True
        times = {name: float(recording.baselines[name][i]) for name in RIVALS if name in recording.baselines}
        found.append(
            OfferedCells(
                problem,
                tuple(recording.catalogue[c] for c in timed),
                np.log(times["torch"] / us[timed]).astype(np.float32),
                fitted[timed],
                recording.suite,
                gpu,
                recording.baseline_detail[LT_HEURISTIC][i],
                math.log(times["torch"] / np.nanmin(list(times.values()))),
            )
        )
    return found


def fit(cells: Sequence[OfferedCells], seed: int = 0) -> Regressor:
    """Return 5 nets trained on the cells: inputs of ``network_inputs``, output the log speed-up over torch.matmul.

    Log speed-ups are clipped to [-1.5, 1.5]. A cell of a random problem counts twice. The result is the same for the
    same seed and number of threads.
    """
    cells = [c for c in cells if c.fitted.any()]
    x = np.concatenate([inputs_of(c)[c.fitted] for c in cells])
    gains = np.concatenate([c.gains[c.fitted] for c in cells])
    counts = np.repeat([UNLISTED_WEIGHT if c.source == RANDOM else 1.0 for c in cells], [c.fitted.sum() for c in cells])
    blind = np.random.default_rng(seed).random(len(x)) < UNANSWERED
    x[blind, answer_columns()] = 0
    y = torch.from_numpy(np.clip(gains, -LOG_SPEEDUP_BOUND, LOG_SPEEDUP_BOUND))
    return fit_nets(x, y, torch.from_numpy(counts).float(), SETTINGS, seed)


def answer_columns() -> slice:
    """Return the columns of ``network_inputs`` that hold the features of cuBLASLt's answer."""
    first = len(shape_features(Problem(8, 8, 8), reference_gpu()))
    return slice(first, first + ANSWER_FEATURES)


def inputs_of(cells: OfferedCells) -> Features:
    """Return ``network_inputs`` of all kernels of a problem; kept for the fits of the next folds."""
    return _inputs(cells.problem, cells.configs, cells.gpu, cells.answer)


@functools.lru_cache(1 << 15)
def _inputs(problem: Problem, configs: tuple[KernelConfig, ...], gpu: Gpu, answer: str) -> Features:
    return network_inputs(problem, configs, gpu, answer)


def fit_nets(x: Features, y: torch.Tensor, counts: torch.Tensor, settings: NetSettings, seed: int = 0) -> Regressor:
    """Return 5 nets with two hidden layers, trained together. The result depends on seed and number of threads only.

    Args:
        x: float32[cells, inputs].
        y: float32[cells], the outputs.
        counts: float32[cells], what each cell counts.
        settings: how they are trained.
        seed: seed of the nets and batches.
    """
    mean, deviation = x.mean(axis=0), x.std(axis=0)
    scale = np.where(deviation < 1e-5, 0.0, 1.0 / np.maximum(deviation, 1e-5)).astype(np.float32)
    layers = _trained(torch.from_numpy((x - mean) * scale), y, counts, settings, seed)
    weights, biases = (tuple(each.detach().numpy() for each in side) for side in zip(*layers, strict=True))
    return Regressor(mean, scale, weights, biases)


def _trained(
    x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, settings: NetSettings, seed: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return (weights, biases) of each layer of all nets: float32[nets, in, out], [nets, 1, out]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (x.shape[1], settings.width, settings.width, 1)
    layers = [tuple(_drawn(n, inner, outer, generator) for n in (inner, 1)) for inner, outer in pairwise(sizes)]
    steps = settings.epochs * max(1, len(x) // settings.batch)
    parts = [part for layer in layers for part in layer]
    optimizer = torch.optim.AdamW(parts, settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(x), (NETS, settings.batch), generator=generator)
        h = x[some]
        for weight, bias in layers[:-1]:
            h = torch.nn.functional.silu(torch.baddbmm(bias, h, weight))
        h = torch.baddbmm(layers[-1][1], h, layers[-1][0])
        error = torch.nn.functional.huber_loss(h[:, :, 0], y[some], delta=settings.huber, reduction="none")
        optimizer.zero_grad()
        (counts[some] * error).mean(dim=1).sum().backward()
        optimizer.step()
        schedule.step()
    return layers


def _drawn(rows: int, inputs: int, outputs: int, generator: torch.Generator) -> torch.Tensor:
    """Return a layer's part, float32[nets, rows, outputs], drawn as torch.nn.Linear draws it for ``inputs``."""
    bound = 1 / math.sqrt(inputs)
    drawn = torch.rand((NETS, rows, outputs), generator=generator) * 2 * bound - bound
    return drawn.requires_grad_()


def unaligned_kernels(cells: Sequence[OfferedCells], count: int = FOR_UNALIGNED) -> tuple[KernelConfig, ...]:
    """Return kernels of the families for unaligned rows, which no recording has: each without PDL, then with it.

    Greedily, each adds most to the mean log speed-up over torch.matmul that those before give. A kernel counts with the
    faster of both launches. Problems with fewer than 20 such kernels do not count, as they may lack the best.

    Args:
        cells: measured kernels of one problem each.
        count: number of kernels, each of which is returned in both launches.
    """
    rows = []
    for each in cells:
        best: dict[KernelConfig, float] = {}
        for config, gain in zip(each.configs, each.gains.tolist(), strict=True):
            if FAMILIES[config.family].for_unaligned_rows:
                plain = config.with_knobs(pdl=False)
                best[plain] = max(gain, best.get(plain, 0.0))
        rows += [best] if len(best) >= LEAST_UNALIGNED else []
    configs = sorted({config for row in rows for config in row})
    gains = np.array([[row.get(config, 0.0) for config in configs] for row in rows])
    found, reached = list[KernelConfig](), np.zeros(len(rows))
    for _ in range(min(count, len(configs))):
        index = int(np.maximum(gains, reached[:, None]).mean(axis=0).argmax())
        reached = np.maximum(reached, gains[:, index])
        found.append(configs[index])
    return tuple(option for config in dict.fromkeys(found) for option in (config, config.with_knobs(pdl=True)))


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
