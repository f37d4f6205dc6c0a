"""Score the choice for any shape on problems that a fit has not seen: by problem, by weight, and from suite to suite.

A choice is made among the kernels that were measured on a problem, so its outcome is a measured time. A product that is
left to torch counts as torch's time. Bound and margin of a fold are chosen on the other folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, Launch, launch_of
from outblas.core.errors import OutblasError
from outblas.core.problem import Problem
from outblas.predict.any_shape import is_left_to_torch
from outblas_lab.train.fit_any_shape import RANDOM, OfferedCells, fit, inputs_of

#: How problems are kept out: each problem, each (N, K), or the suite of model layers as a whole.
SPLITS = ("problems", "weights", "suites")
#: Parts that the first two splits keep out in turn.
FOLDS = 3
#: The suite that the last split keeps out.
KEPT_SUITE = "llm"
#: A product below this times torch.matmul's speed is slower. This share of the problems of each source may be, with
#: aligned rows and without. It is less than the 1% of shapes that may be slower, as chance adds to it.
SLOW, MAX_SLOWER = 0.98, 0.0075
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
        cells: the problem and its measured kernels.
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


def folds_of(cells: Sequence[OfferedCells], split: str, seed: int = 0) -> list[int]:
    """Return the fold of each problem; -1: it is never kept out.

    Args:
        cells: one entry per problem.
        split: one of :data:`SPLITS`.
        seed: seed of the draw of the first two.
    """
    if split == "suites":
        return [0 if each.source == KEPT_SUITE else -1 for each in cells]
    keys = [each.problem.key if split == "problems" else f"{each.problem.n} {each.problem.k}" for each in cells]
    names = sorted(set(keys))
    drawn = np.random.default_rng(seed).permutation(len(names)) % FOLDS
    fold = dict(zip(names, drawn.tolist(), strict=True))
    return [fold[key] for key in keys]


def guess_held_out(
    cells: Sequence[OfferedCells], split: str, report: Callable[[str], None], seed: int = 0
) -> list[Guess]:
    """Predict each problem that a split keeps out by nets that have not seen it.

    Args:
        cells: one entry per problem.
        split: one of :data:`SPLITS`.
        report: called with ``"problems: fold 1 of 3"`` and so on.
        seed: seed of the folds and nets.
    """
    folds = folds_of(cells, split, seed)
    kept = sorted(set(folds) - {-1})
    found = []
    for number, fold in enumerate(kept, 1):
        nets = fit([each for each, one in zip(cells, folds, strict=True) if one != fold], seed)
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

    At most 0.75% of the problems of each source, with aligned rows and without, may be slower than 0.98 of
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
        raise OutblasError("no margin keeps products from getting slower", "a few problems", "record more problems")
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
        guesses: predictions for problems that were kept out.
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
