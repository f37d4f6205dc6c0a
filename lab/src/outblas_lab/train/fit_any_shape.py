"""Choose the kernels for shapes that no library has, and fit the predictions of :mod:`outblas.predict.any_shape`.

The kernels are few, because each is shipped and ranked.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_of
from outblas.core.errors import OutblasError, RecordError
from outblas.core.gpu_records import gpu_of_product, reference_gpu
from outblas.core.problem import Problem
from outblas.core.rivals import LT_HEURISTIC, RIVALS
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import first_search_candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.predict.any_shape import ANSWER_FEATURES, is_left_to_torch, network_inputs, shape_features
from outblas.predict.features import Features
from outblas.predict.posterior import Regressor
from outblas.records.library import Library
from outblas.records.parquet import read_whole
from outblas_lab.recordings.recording import Recording

_T = TypeVar("_T")
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
#: Source of the problems that no suite has.
RANDOM = "random"
#: What a cell of these problems counts, of a suite's 1.
UNLISTED_WEIGHT = 2.0
#: Share of the cells whose answer of cuBLASLt a fit does not see, so that the nets can do without it.
UNANSWERED = 0.3


class NetSettings(NamedTuple):
    """Settings of a training of nets.

    Attributes:
        batch: cells a step of each net.
        huber: errors beyond it count by their size, not its square.
        quantile: what the first half of the nets, rounded down, predict of the outputs' distribution, e.g. 0.15. The
            others predict its middle. None: all do.
    """

    nets: int = 5
    width: int = 160
    epochs: int = 48
    batch: int = 2048
    huber: float = 0.1
    learning_rate: float = 1e-2
    weight_decay: float = 1e-2
    quantile: float | None = None


#: Two of five nets predict a low quantile. Errors that slow a problem down count more there, and where both kinds
#: differ, the deviation is large.
SETTINGS = NetSettings(quantile=0.15)
_known_inputs = functools.lru_cache(1 << 15)(network_inputs)


def general_kernels(gpu: Gpu) -> tuple[KernelConfig, ...]:
    """Return the kernels without PDL that are offered for any shape, without repeats, at most 152.

    First come those that add most to the recorded problems, then those that the packaged library installs most. Last
    come those that the ranking model puts first on random problems.

    Args:
        gpu: GPU with a packaged recording and library.
    """
    found = dict.fromkeys(_covering(Recording.load(gpu.name), BY_RECORDING))
    for wanted, among in (
        (BY_LIBRARY, (c for c in _installed(gpu.name) if not FAMILIES[c.family].few_rows_only)),
        (GEMVS, (c for c in _installed(gpu.name) if FAMILIES[c.family].few_rows_only)),
        (BY_MODEL, _first_choices(gpu)),
    ):
        counts = Counter(c for c in among if c not in found)
        found.update(dict.fromkeys(config for config, _ in counts.most_common(wanted)))
    return tuple(found)


@dataclass(frozen=True)
class OfferedCells:
    """Measured kernels of one problem.

    Attributes:
        gains: float32, natural log of each kernel's speed-up over torch.matmul.
        fitted: bool, which kernels a fit sees.
        source: suite of the problem, or ``random``.
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


def read_problems(
    path: Path, what: str, step: str, of_rows: Callable[[Problem, Gpu, Sequence[Mapping[str, Any]]], _T]
) -> tuple[list[_T], dict[str, Any]]:
    """Read a Parquet table of measurements; return what ``of_rows`` makes of each problem, and the provenance.

    Args:
        path: the table; column ``problem`` has the problem's key.
        what: content of the table, in an error.
        step: step of ``outblas fit any-shape`` that makes it.
        of_rows: called with each problem, the measured GPU and the problem's rows, in the order of the table.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """
    import pyarrow as pa

    if not path.is_file():
        raise RecordError(f"{path} does not exist", what, f"create it with: outblas fit any-shape {step}")
    try:
        table = read_whole(path)
        by_problem: dict[str, list[dict[str, Any]]] = {}
        for row in table.to_pylist():
            by_problem.setdefault(row["problem"], []).append(row)
        provenance = json.loads(table.schema.metadata[b"provenance"])
        gpu = gpu_of_product(str(provenance["gpu"])) or reference_gpu()
        return [of_rows(Problem.from_key(key), gpu, rows) for key, rows in by_problem.items()], provenance
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OutblasError) as error:
        wrong, do = f"{path} cannot be read ({error})", f"recreate it with: outblas fit any-shape {step}"
        raise RecordError(wrong, f"a complete table of {what}", do) from error


def cells_of_recording(recording: Recording, gpu: Gpu) -> list[OfferedCells]:
    """Return one :class:`OfferedCells` per recorded problem, in the recording's order, with all measured kernels.

    A fit sees the 8 fastest kernels without PDL, the 8 fastest with it, and up to 8 others of each, drawn.
    """
    rng, found = np.random.default_rng(0), []
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
    first = len(shape_features(Problem(8, 8, 8), reference_gpu()))  # the features of cuBLASLt's answer follow
    x[blind, first : first + ANSWER_FEATURES] = 0
    y = torch.from_numpy(np.clip(gains, -LOG_SPEEDUP_BOUND, LOG_SPEEDUP_BOUND))
    return fit_nets(x, y, torch.from_numpy(counts).float(), SETTINGS, seed)


def inputs_of(cells: OfferedCells) -> Features:
    """Return ``network_inputs`` of all kernels of a problem; kept for the fits of the next folds."""
    return _known_inputs(cells.problem, cells.configs, cells.gpu, cells.answer)


def fit_nets(x: Features, y: torch.Tensor, counts: torch.Tensor, settings: NetSettings, seed: int = 0) -> Regressor:
    """Return nets with two hidden layers, trained together. The result depends on seed and number of threads only.

    Args:
        x: float32[cells, inputs].
        y: float32[cells], the outputs.
        counts: float32[cells], what each cell counts.
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
    layers = [
        tuple(_drawn(settings.nets, n, inner, outer, generator) for n in (inner, 1)) for inner, outer in pairwise(sizes)
    ]
    steps = settings.epochs * max(1, len(x) // settings.batch)
    parts = [part for layer in layers for part in layer]
    optimizer = torch.optim.AdamW(parts, settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(x), (settings.nets, settings.batch), generator=generator)
        h = x[some]
        for weight, bias in layers[:-1]:
            h = torch.nn.functional.silu(torch.baddbmm(bias, h, weight))
        h = torch.baddbmm(layers[-1][1], h, layers[-1][0])
        optimizer.zero_grad()
        (counts[some] * _errors(h[:, :, 0], y[some], settings)).mean(dim=1).sum().backward()
        optimizer.step()
        schedule.step()
    return layers


def _errors(found: torch.Tensor, wanted: torch.Tensor, settings: NetSettings) -> torch.Tensor:
    """Return the error of each output, float32[nets, batch]: Huber's, or the pinball loss of nets for a quantile."""
    middle = torch.nn.functional.huber_loss(found, wanted, delta=settings.huber, reduction="none")
    if settings.quantile is None:
        return middle
    low, above = settings.nets // 2, wanted - found
    pinball = torch.maximum(settings.quantile * above, (settings.quantile - 1) * above)
    return torch.cat([pinball[:low], middle[low:]])


def _drawn(nets: int, rows: int, inputs: int, outputs: int, generator: torch.Generator) -> torch.Tensor:
    """Return a layer's part, float32[nets, rows, outputs], drawn as torch.nn.Linear draws it for ``inputs``."""
    bound = 1 / math.sqrt(inputs)
    drawn = torch.rand((nets, rows, outputs), generator=generator) * 2 * bound - bound
    return drawn.requires_grad_()


def unaligned_kernels(cells: Sequence[OfferedCells], count: int = FOR_UNALIGNED) -> tuple[KernelConfig, ...]:
    """Return kernels of the families for unaligned rows, which no recording has: each without PDL, then with it.

    Greedily, each adds most to the mean log speed-up over torch.matmul that those before give. A kernel counts with the
    faster of both launches. Problems with fewer than 20 such kernels do not count, as they may lack the best.

    Args:
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
    found = dict.fromkeys(configs[index] for index in _greedily(gains, min(count, len(configs))))
    return tuple(option for config in found for option in (config, config.with_knobs(pdl=True)))


def _greedily(gains: np.ndarray, count: int) -> Iterator[int]:
    """Yield the columns of float[problems, kernels] that each add most to the mean that those before give."""
    reached = np.zeros(len(gains))
    for _ in range(count):
        index = int(np.maximum(gains, reached[:, None]).mean(axis=0).argmax())
        reached = np.maximum(reached, gains[:, index])
        yield index


def _covering(recording: Recording, count: int) -> Iterator[KernelConfig]:
    """Greedily, what adds most to the mean log speed-up over torch.matmul."""
    plain = np.array([launch_of(c) == "plain" for c in recording.catalogue])
    timed = (recording.rounds > 0) & plain
    us = np.where(timed, recording.median_us, np.inf).astype(float)
    gain = np.log(np.maximum(recording.baselines["torch"].astype(float)[:, None] / us, 1))
    yield from (recording.catalogue[index] for index in _greedily(gain, count))


def _installed(name: str) -> Iterator[KernelConfig]:
    for row in Library.packaged(name).rows:
        if row.plain is not None and row.problem.acc == "fp32":
            yield row.plain.config


def _first_choices(gpu: Gpu) -> Iterator[KernelConfig]:
    rng = random.Random(0)
    for _ in range(RANDOM_PROBLEMS):
        m, n, k = (round(2 ** rng.uniform(0, 13)) for _ in range(3))
        problem = Problem(m, n, k, rng.choice(("TN", "NN")))
        offered: Sequence[KernelConfig] = [c for c in first_search_candidates(problem, gpu) if launch_of(c) == "plain"]
        yield offered[int(rank(problem, offered, gpu)[0])]


#: How problems are kept out: each problem, each (N, K), or the suite of model layers as a whole.
SPLITS = ("problems", "weights", "suites")
#: Parts that the first two splits keep out in turn.
FOLDS = 3
#: The suite that the last split keeps out.
KEPT_SUITE = "llm"
#: A product below this times torch.matmul's speed is slower. This share of the problems of each source may be, with
#: aligned rows and without. It is less than the 1% of shapes that may be slower, as chance adds to it.
SLOW, MAX_SLOWER = 0.98, 0.005
#: Bounds and margins among which the fit chooses.
SURES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
MARGINS = (1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.08, 1.12)
_RESAMPLES = 2000


class Rule(NamedTuple):
    """Condition under which a predicted kernel is used.

    Attributes:
        sure: number of standard deviations from the prediction down to the bound, where rows are aligned.
        margin: least bound, a ratio to torch.matmul.
        sure_unaligned: as ``sure``, of problems with unaligned rows.
    """

    sure: float
    margin: float
    sure_unaligned: float


class Guess(NamedTuple):
    """Predictions for one problem that was kept out.

    Attributes:
        gain: float64[kernels], predicted natural log of the speed-up over torch.matmul.
        deviation: float64[kernels], standard deviation of each.
        needed: int64[kernels], index in :data:`outblas.core.config.LAUNCHES` of the option that each kernel needs.
        fold: part of the split in which the problem is.
    """

    cells: OfferedCells
    gain: NDArray[np.float64]
    deviation: NDArray[np.float64]
    needed: NDArray[np.int64]
    fold: int


def joined(cells: Iterable[OfferedCells]) -> list[OfferedCells]:
    """Return one :class:`OfferedCells` per problem and GPU.

    Answer and rival are those of the last with times of rivals.
    """
    found: dict[tuple[Problem, str], OfferedCells] = {}
    for each in cells:
        key = each.problem, each.gpu.name
        before = found.get(key)
        if before is not None:
            known = before if math.isnan(each.rival) else each
            each = replace(
                before,
                configs=before.configs + each.configs,
                gains=np.concatenate([before.gains, each.gains]),
                fitted=np.concatenate([before.fitted, each.fitted]),
                answer=known.answer,
                rival=known.rival,
            )
        found[key] = each
    return list(found.values())


def folds_of(cells: Sequence[OfferedCells], split: str) -> list[int]:
    """Return the fold of each problem; -1: it is never kept out.

    Args:
        split: one of :data:`SPLITS`.
    """
    if split == "suites":
        return [0 if each.source == KEPT_SUITE else -1 for each in cells]
    keys = [each.problem.key if split == "problems" else f"{each.problem.n} {each.problem.k}" for each in cells]
    names = sorted(set(keys))
    drawn = np.random.default_rng(0).permutation(len(names)) % FOLDS
    fold = dict(zip(names, drawn.tolist(), strict=True))
    return [fold[key] for key in keys]


def guess_held_out(cells: Sequence[OfferedCells], split: str, report: Callable[[str], None]) -> list[Guess]:
    """Predict each problem that a split keeps out by nets that have not seen it.

    Args:
        split: one of :data:`SPLITS`.
        report: called with ``"problems: fold 1 of 3"`` and so on.
    """
    folds = folds_of(cells, split)
    kept = sorted(set(folds) - {-1})
    found = []
    for number, fold in enumerate(kept, 1):
        nets = fit([each for each, one in zip(cells, folds, strict=True) if one != fold])
        for each, one in zip(cells, folds, strict=True):
            if one == fold:
                needed = np.array([LAUNCHES.index(launch_of(config)) for config in each.configs])
                found.append(Guess(each, *nets.predict(inputs_of(each)), needed, fold))
        report(f"{split}: fold {number} of {len(kept)}")
    return found


def outcome(guess: Guess, rule: Rule, launch: Launch) -> float | None:
    """Return the measured log speed-up over torch.matmul of the kernel that a rule takes; None: torch runs."""
    if not guess.cells.configs or is_left_to_torch(guess.cells.problem, guess.cells.gpu):
        return None
    allowed = guess.needed <= LAUNCHES.index(launch)
    sure = rule.sure if guess.cells.problem.rows_aligned else rule.sure_unaligned
    low = np.where(allowed, guess.gain - sure * guess.deviation, -np.inf)
    best = int(low.argmax())
    return float(guess.cells.gains[best]) if low[best] >= math.log(rule.margin) else None


def choose_rule(guesses: Sequence[Guess]) -> Rule:
    """Return the rule with the most speed over all launch options, of those that make few problems slower.

    At most 0.5% of the problems of each source, with aligned rows and without, may be slower than 0.98 of
    torch.matmul.

    Raises:
        OutblasError: every rule makes more problems slower.
    """
    sides = [[g for g in guesses if g.cells.problem.rows_aligned == aligned] for aligned in (True, False)]
    best: tuple[float, Rule] | None = None
    for margin in MARGINS:
        aligned, unaligned = (_surest(side, margin) for side in sides)
        if aligned is None or unaligned is None:
            continue
        gain = aligned[0] + unaligned[0]
        if best is None or gain > best[0]:
            best = gain, Rule(aligned[1], margin, unaligned[1])
    if best is None:
        raise OutblasError("every margin makes too many matmuls slower", "better predictions", "record more problems")
    return best[1]


def _surest(guesses: Sequence[Guess], margin: float) -> tuple[float, float] | None:
    """Return (sum of log speed-ups, bound) of the bound with the most speed; None if all make more problems slower."""
    if not guesses:
        return 0.0, SURES[-1]
    sources = np.array([guess.cells.source for guess in guesses])
    found = []
    for sure in SURES:
        rule = Rule(sure, margin, sure)
        gains = np.array([[outcome(guess, rule, launch) or 0.0 for launch in LAUNCHES] for guess in guesses])
        slower = gains < math.log(SLOW)
        if all(slower[sources == name].mean() <= MAX_SLOWER for name in set(sources)):
            found.append((float(gains.sum()), sure))
    return max(found, default=None)


def figures(guesses: Sequence[Guess], rules: dict[int, Rule]) -> list[dict[str, Any]]:
    """Return one dict of figures per source, layout and launch option.

    Each has ``source``, ``layout``, ``launch`` and ``problems`` (their number). The others are [value, low, high], with
    95% bootstrap intervals over problems:

    - ``over_torch`` and ``over_best``: geometric means of speed-ups over torch and over the fastest baseline;
    - ``served``: share of problems with a kernel;
    - ``below_torch`` and ``below_best``: shares of problems below 0.98 of the same two.

    The two of the fastest baseline are None if it is unknown.

    Args:
        rules: fold -> rule.
    """
    found = []
    sources = sorted({guess.cells.source for guess in guesses})
    for source, layout, launch in product(sources, ("TN", "NN"), LAUNCHES):
        same = [g for g in guesses if (g.cells.source, g.cells.problem.layout) == (source, layout)]
        if not same or (source == RANDOM and launch != "plain"):  # measured without PDL alone
            continue
        taken = [outcome(guess, rules[guess.fold], launch) for guess in same]
        over_torch = np.array([0.0 if gain is None else gain for gain in taken])
        over_best = over_torch - np.array([guess.cells.rival for guess in same])
        known = bool(np.isfinite(over_best).all())
        found.append(
            {
                **{"source": source, "layout": layout, "launch": launch, "problems": len(same)},
                "over_torch": _with_interval(over_torch, np.exp),
                "over_best": _with_interval(over_best, np.exp) if known else None,
                "served": _with_interval(np.array([gain is not None for gain in taken], dtype=float)),
                "below_torch": _with_interval((over_torch < math.log(SLOW)).astype(float)),
                "below_best": _with_interval((over_best < math.log(SLOW)).astype(float)) if known else None,
            }
        )
    return found


def figures_in_words(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each dict of :func:`figures`; the speed-up is over the fastest baseline if that is known."""
    found = []
    for row in rows:
        rival = "torch" if row["over_best"] is None else "best"
        (gain, low, high), slow = row[f"over_{rival}"], row[f"below_{rival}"][0]
        found.append(
            f"{row['source']} {row['layout']} {row['launch']}: {gain:.3f} ({low:.3f} to {high:.3f}) over {rival}, "
            f"{row['served'][0]:.1%} of {row['problems']} served, {slow:.1%} below {SLOW} of {rival}, "
            f"{row['below_torch'][0]:.1%} of torch"
        )
    return found


def _with_interval(values: NDArray[np.float64], shown: Callable[[Any], Any] = lambda x: x) -> list[float]:
    """Return the mean of values over problems, and its 95% percentile-bootstrap interval, each passed to ``shown``."""
    drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return [round(float(shown(x)), 4) for x in (values.mean(), low, high)]
