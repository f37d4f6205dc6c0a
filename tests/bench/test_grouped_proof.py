"""The proof of grouped kernels, on a CPU: honest products pass, and each kind of mistake is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from outblas.kernels.grouped.grouped_problem import GroupedProblem

torch = pytest.importorskip("torch")

from outblas_lab.build.grouped_proof import cases, prove_grouped  # noqa: E402


class Kernel:
    """Computes each group by torch, then makes a mistake."""

    def __init__(self, problem: GroupedProblem, mistake: Callable[..., None] = lambda *_: None) -> None:
        self._problem, self._mistake = problem, mistake

    def bind(self, a: Any, w: Any, ends: Any, c: Any, bias: Any) -> Any:
        clamped = [0, *itertools.accumulate((min(max(end, 0), len(a)) for end in ends.tolist()), max)]

        def call(stream: int) -> None:
            for group, (begin, end) in enumerate(itertools.pairwise(clamped)):
                stored = w[group].float()
                y = a[begin:end].float() @ (stored.T if self._problem.layout == "TN" else stored)
                y = y if bias is None else y + bias[group].float()
                if self._problem.gated:
                    gate, up = y.chunk(2, 1)
                    y = torch.nn.functional.silu(gate) * up
                c[begin:end] = y.to(c.dtype)
            self._mistake(a, clamped, c)

        return call


PROBLEMS = (
    GroupedProblem(5, 64, 72),
    GroupedProblem(33, 16, 64, "NN", "fp16", bias=True),
    GroupedProblem(4, 64, 64, gated=True),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_an_honest_kernel_passes(problem: GroupedProblem) -> None:
    assert prove_grouped(Kernel(problem), problem, 1, 200, "cpu") == ""  # type: ignore[arg-type]


def wrong_element(a: Any, ends: list[int], c: Any) -> None:
    last = max(ends)
    if last:
        c[last - 1, -1] += 1.0


def last_row_missing(a: Any, ends: list[int], c: Any) -> None:
    if max(ends):
        c[max(ends) - 1] = 0.0


def writes_behind_the_end(a: Any, ends: list[int], c: Any) -> None:
    if max(ends) < len(c):
        c[max(ends)] = 0.0


def spreads_what_is_no_number(a: Any, ends: list[int], c: Any) -> None:
    if bool(a.isnan().any()):
        c[:] = float("nan")


def hides_what_is_no_number(a: Any, ends: list[int], c: Any) -> None:
    c.nan_to_num_(0.0)


def bits_of_neighbours(a: Any, ends: list[int], c: Any) -> None:
    """Two roundings in place of one, where more than one group has rows: within the bound of the sums."""
    if len({*ends}) > 2:
        rows = c[: max(ends)]
        wide = torch.frexp(rows.float())[0].abs() > 0.8  # the bound is above one and a half units there
        rows[:] = torch.where(wide, torch.nextafter(rows, torch.zeros_like(rows)), rows)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (wrong_element, "elements are wrong"),
        (last_row_missing, "elements are wrong"),
        (writes_behind_the_end, "which no group has, were written"),
        (spreads_what_is_no_number, "elements are wrong"),
        (hides_what_is_no_number, "a number came of NaN"),
        (bits_of_neighbours, "depend on the rows of the others"),
    ],
)
def test_each_mistake_is_found(mistake: Callable[..., None], words: str) -> None:
    problem = PROBLEMS[0]
    assert words in prove_grouped(Kernel(problem, mistake), problem, 1, 200, "cpu")  # type: ignore[arg-type]


def test_the_cases_have_what_trips_a_kernel_up() -> None:
    for groups in (1, 8, 256):
        found = list(cases(groups, 3))
        sizes = [[e - b for b, e in itertools.pairwise([0, *case.clamped()])] for case in found]
        assert any(129 in each for each in sizes) and any(sum(each) == 0 for each in sizes)
        assert any(each.count(0) == groups - 1 and max(each) >= 700 for each in sizes)
        assert any(set(each) == {1} for each in sizes) and any(case.not_a_number is not None for case in found)
        assert groups == 1 or any(list(case.ends) != sorted(case.ends) for case in found)
        assert any(max(case.ends) > case.rows or min(case.ends) < 0 for case in found) or groups == 1
        for case in found:
            ends = case.clamped()
            assert ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= case.rows
