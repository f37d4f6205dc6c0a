"""Held-out scores of choices: what a split keeps out, which kernel a rule takes, and the figures of the outcome."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="choices for any shape are fitted by torch")

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import OutblasError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas_lab.train import fit_any_shape  # noqa: E402
from outblas_lab.train.fit_any_shape import (  # noqa: E402
    RANDOM,
    Guess,
    OfferedCells,
    Rule,
    choose_rule,
    figures,
    folds_of,
    joined,
    outcome,
)
from support.gpus.known import H200  # noqa: E402

PLAIN: KernelConfig = Sm90WgmmaConfig(64, 64, stages=4)
PDL = PLAIN.with_knobs(pdl=True)
PROBLEM = Problem(100, 200, 304)


def cells(problem: Problem = PROBLEM, gains: tuple[float, ...] = (0.1, 0.2), **changes: Any) -> OfferedCells:
    """Cells of the kernels without and with PDL."""
    made = np.array(gains, np.float32), np.ones(len(gains), dtype=bool)
    return replace(OfferedCells(problem, (PLAIN, PDL)[: len(gains)], *made, "grid1000", H200, rival=0.0), **changes)


def guess(of: OfferedCells, gain: tuple[float, ...], deviation: tuple[float, ...] = (0.0, 0.0), fold: int = 0) -> Guess:
    return Guess(of, np.array(gain), np.array(deviation[: len(gain)]), np.array([0, 1][: len(gain)]), fold)


def test_a_rule_takes_the_highest_bound_among_the_kernels_that_a_call_allows() -> None:
    found = guess(cells(), (0.15, 0.3))
    assert outcome(found, Rule(0, 1.05, 0), "plain") == pytest.approx(0.1)
    assert outcome(found, Rule(0, 1.05, 0), "pdl") == outcome(found, Rule(0, 1.05, 0), "weights")
    assert outcome(found, Rule(0, 1.05, 0), "pdl") == pytest.approx(0.2)
    unsure = guess(cells(), (0.15, 0.3), (0.0, 0.2))
    assert outcome(unsure, Rule(1, 1.05, 1), "pdl") == pytest.approx(0.1), "0.15 is more than 0.3 - 0.2"
    assert outcome(unsure, Rule(1, 1.2, 1), "pdl") is None, "exp(0.15) is below 1.2"
    assert outcome(guess(cells(replace(PROBLEM, n=1)), (0.5, 0.5)), Rule(0, 1.0, 0), "pdl") is None


def test_measurements_of_one_problem_are_joined() -> None:
    later = cells(gains=(0.3,), answer="id=66 tile=20", rival=0.07)
    (found,) = joined([cells(answer="id=66 tile=10"), later])
    assert found.configs == (PLAIN, PDL, PLAIN) and found.gains == pytest.approx([0.1, 0.2, 0.3])
    assert (found.answer, found.rival) == ("id=66 tile=20", 0.07)
    (found,) = joined([cells(answer="id=66 tile=10", rival=0.05), cells(gains=(0.3,), rival=math.nan)])
    assert (found.answer, found.rival) == ("id=66 tile=10", 0.05), "rivals were not timed later"


def test_a_split_keeps_out_whole_problems_weights_or_the_suite_of_layers() -> None:
    everything = [cells(Problem(m, n, 64)) for m in (1, 2, 3, 4) for n in range(64, 640, 64)]
    everything += [cells(Problem(5, 6, 7), source="llm"), cells(Problem(5, 6, 8), source=RANDOM)]
    assert set(folds_of(everything, "problems")) == set(range(fit_any_shape.FOLDS))
    by_weight = folds_of(everything, "weights")
    kept: dict[tuple[int, int], set[int]] = {}
    for each, fold in zip(everything, by_weight, strict=True):
        kept.setdefault((each.problem.n, each.problem.k), set()).add(fold)
    assert all(len(folds) == 1 for folds in kept.values()) and len(set(by_weight)) == fit_any_shape.FOLDS
    assert folds_of(everything, "suites") == [-1] * 36 + [0, -1]


def test_the_margin_leaves_few_problems_slower() -> None:
    """Small predictions are wrong here, so a margin must lie above them."""
    right = [guess(cells(replace(PROBLEM, m=m), (0.2,)), (0.1,)) for m in range(1, 50)]
    wrong = [guess(cells(replace(PROBLEM, m=m), (-0.2,)), (0.04,)) for m in range(50, 60)]
    rule = choose_rule([*right, *wrong])
    assert 0.04 < math.log(rule.margin) <= 0.1
    unaligned = [guess(cells(Problem(m, 201, 303), (-0.2,)), (0.2,)) for m in range(1, 50)]
    unsure = [one._replace(deviation=np.full(1, 0.05)) for one in unaligned]
    both = choose_rule([*(one._replace(deviation=np.full(1, 0.02)) for one in right), *wrong, *unsure])
    assert both.sure < both.sure_unaligned, "predictions for unaligned rows are wrong here"
    with pytest.raises(OutblasError, match="every margin"):
        choose_rule([guess(cells(gains=(-0.2,)), (0.5,))])


def test_figures_count_torchs_products_and_are_of_the_fastest_rival() -> None:
    served = guess(cells(gains=(math.log(1.2),), rival=math.log(1.1)), (0.2,))
    left = guess(cells(Problem(101, 200, 304), (math.log(2.0),), rival=math.log(1.25)), (0.0,), fold=1)
    plain = figures([served, left], {0: Rule(0, 1.05, 0), 1: Rule(0, 1.05, 0)})[0]
    assert (plain["source"], plain["layout"], plain["launch"], plain["problems"]) == ("grid1000", "TN", "plain", 2)
    assert plain["over_torch"][0] == pytest.approx(math.sqrt(1.2), abs=1e-4)
    assert plain["over_best"][0] == pytest.approx(math.sqrt(1.2 / 1.1 / 1.25), abs=1e-4)
    assert plain["served"][0] == 0.5 and plain["below_torch"][0] == 0.0 and plain["below_best"][0] == 0.5
    random = figures([guess(cells(source=RANDOM, rival=math.nan), (0.2, 0.2))], {0: Rule(0, 1.05, 0)})
    assert [row["launch"] for row in random] == ["plain"] and random[0]["over_best"] is None
