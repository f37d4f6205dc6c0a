from __future__ import annotations

import random

import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.suites import GRID_EXTENTS, suite
from outblas_lab.compare.splits import held_out_words, make_split, outside_held_out

#: Two layouts and two dtypes of 1000 shapes.
PROBLEMS = [p for kind in (("TN", "fp16"), ("NN", "fp16"), ("TN", "bf16")) for p in suite("grid1000", *kind)]


def shapes(problems: tuple[Problem, ...]) -> set[tuple[int, int, int]]:
    return {(p.m, p.n, p.k) for p in problems}


def families(problems: tuple[Problem, ...]) -> set[tuple[int, int]]:
    return {(p.n, p.k) for p in problems}


def test_a_shape_is_on_one_side_in_all_layouts_and_dtypes() -> None:
    split = make_split("shapes", PROBLEMS, 0.2)
    assert len(split.held_out) == 3 * 200 and len(split.training) == 3 * 800
    assert not shapes(split.training) & shapes(split.held_out)
    assert set(split.training) | set(split.held_out) == set(PROBLEMS)


def test_a_family_is_held_out_with_all_its_rows() -> None:
    split = make_split("families", PROBLEMS, 0.3)
    assert len(families(split.held_out)) == 30
    assert not families(split.training) & families(split.held_out)
    assert shapes(split.held_out) == {(m, n, k) for n, k in families(split.held_out) for m in GRID_EXTENTS}


def test_the_draw_depends_on_the_seed_and_not_on_the_order() -> None:
    for name in ("shapes", "families"):
        shuffled = random.Random(1).sample(PROBLEMS, len(PROBLEMS))
        assert set(make_split(name, PROBLEMS).held_out) == set(make_split(name, shuffled).held_out)
        assert make_split(name, PROBLEMS, seed=1).held_out != make_split(name, PROBLEMS).held_out


def test_the_layout_split_learns_from_tn_only() -> None:
    split = make_split("layout", PROBLEMS)
    assert {p.layout for p in split.training} == {"TN"} and {p.layout for p in split.held_out} == {"NN"}
    assert len(split.training) == 2000 and len(split.held_out) == 1000


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_one_layout_cannot_be_split_by_layout(layout: str) -> None:
    with pytest.raises(UsageError, match=f"the recording has only {layout}"):
        make_split("layout", [Problem(64, 64, 64, layout)])  # type: ignore[arg-type]


def test_an_extent_is_held_out_with_all_its_problems() -> None:
    split = make_split("k=64", PROBLEMS)
    assert len(split.held_out) == 3 * 100 and {p.k for p in split.held_out} == {64}
    assert len(split.training) == 3 * 900 and 64 not in {p.k for p in split.training}
    assert {p.m for p in make_split("m=16384", PROBLEMS).held_out} == {16384}
    others = [*suite("grid1000", "NN", "bf16"), Problem(64, 64, 100)]
    assert outside_held_out(split, others) == tuple(p for p in others if p.k != 64)
    assert held_out_words("k=64") == "K = 64" and held_out_words("families") == "(N, K) pairs"


def test_something_is_left_on_both_sides() -> None:
    two = [Problem(64, 64, 64), Problem(64, 128, 64)]
    for share in (0.001, 0.999):
        split = make_split("shapes", two, share)
        assert len(split.training) == len(split.held_out) == 1


@pytest.mark.parametrize(
    ("name", "problems", "share", "words"),
    [
        ("rows", PROBLEMS, 0.2, "unknown split 'rows'"),
        ("k=", PROBLEMS, 0.2, "unknown split 'k='"),
        ("k=064", PROBLEMS, 0.2, "unknown split 'k=064'"),
        ("k=65", PROBLEMS, 0.2, "split k=65 holds out 0 of 3000 problems"),
        ("k=64", [Problem(64, 64, 64)], 0.2, "holds out 1 of 1 problems"),
        ("shapes", PROBLEMS, 0.0, "held-out share is 0"),
        ("shapes", PROBLEMS, 1.0, "held-out share is 1"),
        ("shapes", PROBLEMS, float("nan"), "held-out share is nan"),
        ("shapes", PROBLEMS[:1], 0.2, "1 .M, N, K. shapes"),
        ("families", PROBLEMS[:1], 0.2, "1 .N, K. pairs"),
    ],
)
def test_what_cannot_be_split_is_refused(name: str, problems: list[Problem], share: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_split(name, problems, share)
