"""Fit the choice among cuBLASLt's answers (:mod:`outblas.predict.answer_choice`) on recorded times of all answers.

``outblas_lab.build.any_shape_run`` records; the command is ``outblas fit any-shape fit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outblas.core.errors import OutblasError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.answer_choice import AnswerModel, network_inputs, other_answers
from outblas.predict.features import Features
from outblas.predict.posterior import Floats, Regressor
from outblas_lab.train.fit_any_shape import NetSettings, Rule, fit_nets, read_problems

#: Nets of a fit: wide enough for about a hundred inputs. Two of five predict a low quantile, as those of kernels do.
SETTINGS = NetSettings(width=128, epochs=60, batch=1024, huber=0.02, weight_decay=0.03, quantile=0.15)
#: Log speed-ups beyond this are as good as it.
BOUND = 0.5
#: Folds of the problems, of which each is predicted by nets that have not seen it.
FOLDS = 4
#: Bounds and margins among which a fit chooses.
SURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
MARGINS = (1.0, 1.005, 1.01, 1.015, 1.02, 1.03, 1.04)
#: A choice below this times the first answer's speed is slower. The first share of the problems with aligned rows may
#: be, and the second of those with unaligned rows: kernels slow more of them down.
SLOW, MAX_SLOWER = 0.98, (0.001, 0.0015)


@dataclass(frozen=True)
class Answers:
    """All answers for one problem on a GPU, the first in front, with their times in microseconds."""

    gpu: Gpu
    problem: Problem
    names: tuple[str, ...]
    us: tuple[float, ...]


def read_answers(path: Path) -> tuple[list[Answers], dict[str, Any]]:
    """Read a file of :func:`outblas_lab.build.any_shape_run.record_answers`.

    Returns:
        (one :class:`Answers` per problem with two answers or more, the provenance).

    Raises:
        RecordError: there is no such file, or it is damaged.
    """

    def answers_of(problem: Problem, gpu: Gpu, rows: Sequence[Mapping[str, Any]]) -> Answers:
        return Answers(gpu, problem, *zip(*((row["answer"], row["median_us"]) for row in rows), strict=True))

    every, provenance = read_problems(path, "recorded answers", "answers", answers_of)
    return [answers for answers in every if len(answers.names) > 1], provenance


def fit_answers(paths: Sequence[Path], folder: Path, report: Callable[[str], None]) -> list[str]:
    """Fit nets on all GPUs at once, and bound and margin for each; write them, and return a line on each fit.

    Raises:
        OutblasError: no margin keeps nearly all products from getting slower.
        RecordError: a file is missing.
    """
    read = [read_answers(path) for path in paths]
    problems = [each for found, _ in read for each in found]
    x = [network_inputs(each.problem, each.names, other_answers(each.names), each.gpu) for each in problems]
    gains = [np.array([math.log(each.us[0] / each.us[i]) for i in other_answers(each.names)]) for each in problems]
    predicted, nets, told = _predicted(problems, x, gains, report), _fit(x, gains), []
    folder.mkdir(parents=True, exist_ok=True)
    for gpu, provenance in {found[0].gpu: provenance for found, provenance in read if found}.items():
        same = [i for i, each in enumerate(problems) if each.gpu == gpu]
        own = [gains[i] for i in same]
        aligned = [problems[i].problem.rows_aligned for i in same]
        rule, taken = choose_answer_rule([predicted[i] for i in same], own, aligned)
        slower = int((taken < math.log(SLOW)).sum())
        best = np.array([max(0.0, each.max(initial=0.0)) for each in own])
        words = (
            f"held out: {math.exp(taken.mean()):.4f} over the first answer, the best answers "
            f"{math.exp(best.mean()):.4f}, {slower} of {len(taken)} below {SLOW}"
        )
        where = f"{provenance['gpu']}, driver {provenance['driver']}, {provenance['date'][:10]}"
        path = folder / f"{gpu.name}.npz"
        AnswerModel(nets, rule.margin, rule.sure, rule.sure_unaligned, f"{len(same)} problems; {where}; {words}").save(
            path
        )
        bound = f"bound {rule.sure:g} or {rule.sure_unaligned:g} (unaligned) deviations below, margin {rule.margin}"
        told.append(f"answers, {gpu.name}: {bound}; {words}: {path}")
    return told


def _predicted(
    problems: Sequence[Answers], x: Sequence[Features], gains: Sequence[Floats], report: Callable[[str], None]
) -> list[tuple[Floats, Floats]]:
    """Return gain and deviation of each problem's answers by nets that have not seen it on any GPU."""
    keys = sorted({each.problem.key for each in problems})
    drawn = dict(zip(keys, np.random.default_rng(0).permutation(len(keys)) % FOLDS, strict=True))
    fold = np.array([drawn[each.problem.key] for each in problems])
    found: list[tuple[Floats, Floats]] = [(np.empty(0), np.empty(0))] * len(problems)
    for number in range(FOLDS):
        seen = np.flatnonzero(fold != number).tolist()
        nets = _fit([x[i] for i in seen], [gains[i] for i in seen])
        for i in np.flatnonzero(fold == number).tolist():
            found[i] = nets.predict(x[i]) if len(x[i]) else found[i]
        report(f"answers: fold {number + 1} of {FOLDS}")
    return found


def _fit(x: Sequence[Features], gains: Sequence[Floats]) -> Regressor:
    """Nets that predict the log speed-up of an answer over the first."""
    inputs, wanted = np.concatenate([each for each in x if len(each)]), np.concatenate(gains)
    y = torch.from_numpy(np.clip(wanted, -BOUND, BOUND).astype(np.float32))
    return fit_nets(inputs, y, torch.ones(len(y)), SETTINGS)


def choose_answer_rule(
    predicted: Sequence[tuple[Floats, Floats]], gains: Sequence[Floats], aligned: Sequence[bool]
) -> tuple[Rule, Floats]:
    """Return the rule with the most speed of those that make few problems slower, and the log speed-ups that it takes.

    Args:
        predicted: gain and deviation of each problem's answers.
        gains: measured log speed-ups of these answers over the first.
        aligned: whether each problem's rows are aligned.

    Raises:
        OutblasError: every rule makes more problems slower.
    """
    rows = np.array(aligned, dtype=bool)
    found: list[tuple[float, Rule, Floats]] = []
    for margin in MARGINS:
        taken, sures = np.zeros(len(gains)), list[float]()
        for side, most in zip((rows, ~rows), MAX_SLOWER, strict=True):
            best = _surest_answers([(*predicted[i], gains[i]) for i in np.flatnonzero(side).tolist()], margin, most)
            if best is not None:
                taken[side], sure = best
                sures.append(sure)
        if len(sures) == len(MAX_SLOWER):
            found.append((float(taken.mean()), Rule(sures[0], margin, sures[1]), taken))
    if not found:
        raise OutblasError("every margin makes too many matmuls slower", "better predictions", "record more problems")
    return max(found, key=lambda one: one[0])[1:]


def _surest_answers(
    problems: Sequence[tuple[Floats, Floats, Floats]], margin: float, most: float
) -> tuple[Floats, float] | None:
    """Return (log speed-ups, bound) of the bound with the most speed; None if all make more problems slower."""
    found = []
    for sure in SURES:
        taken = np.array([_outcome(*each, sure, margin) for each in problems])
        if not len(taken) or (taken < math.log(SLOW)).mean() <= most:
            found.append((float(taken.sum()), sure, taken))
    best = max(found, key=lambda one: one[0], default=None)
    return None if best is None else (best[2], best[1])


def _outcome(gain: Floats, deviation: Floats, measured: Floats, sure: float, margin: float) -> float:
    low = gain - sure * deviation
    if not len(low) or not low.max() >= math.log(margin):
        return 0.0
    return float(measured[int(low.argmax())])
