"""A weight: the part of a problem that stays the same while M changes, and ranges of M."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from outblas.core.errors import ProblemError, UsageError
from outblas.core.problem import Acc, Dtype, Layout, Problem


@dataclass(frozen=True, order=True)
class Weight:
    """A weight matrix B with the kind of its products: all of a problem but M.

    Attributes:
        n: columns of C.
        layout: as in :class:`outblas.core.problem.Problem`.
        acc: type of the accumulator.

    Raises:
        ProblemError: the weight's problem with M = 1 is invalid.
    """

    n: int
    k: int
    layout: Layout = "TN"
    dtype: Dtype = "fp16"
    acc: Acc = "fp32"

    def __post_init__(self) -> None:
        self.problem(1)

    @classmethod
    def of(cls, problem: Problem) -> Weight:
        return cls(problem.n, problem.k, problem.layout, problem.dtype, problem.acc)

    @classmethod
    def from_nk(cls, nk: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32") -> Weight:
        """Return the weight of a text ``N_K`` or ``NxK``.

        Args:
            nk: both extents, e.g. ``4096_14336``.

        Raises:
            ProblemError: the text does not parse, or the weight is invalid.
        """
        if not re.fullmatch(r"-?\d{1,18}[_x]-?\d{1,18}", nk.strip()):
            raise ProblemError(f"invalid --linear {nk!r}", "two integers N_K", "pass e.g. --linear 4096_14336")
        return cls.of(Problem.from_mnk(f"1_{nk.strip()}", layout, dtype, acc))

    @classmethod
    def from_key(cls, key: str) -> Weight:
        """Return the weight of a :attr:`key`.

        Raises:
            ProblemError: the text is no key, or the weight is invalid.
        """
        if key.count("_") != 4:
            raise ProblemError(f"invalid weight {key!r}", "N_K_LAYOUT_DTYPE_ACC", "pass e.g. 4096_14336_TN_fp16_fp32")
        return cls.of(Problem.from_key(f"1_{key}"))

    @property
    def key(self) -> str:
        """Return the canonical name, unique per weight, e.g. ``4096_14336_TN_fp16_fp32``."""
        return f"{self.n}_{self.k}_{self.layout}_{self.dtype}_{self.acc}"

    def problem(self, m: int) -> Problem:
        """Return the product of the weight with ``m`` rows of A.

        Raises:
            ProblemError: the problem is invalid, e.g. an operand is too large.
        """
        return Problem(m, self.n, self.k, self.layout, self.dtype, self.acc)


@dataclass(frozen=True, order=True)
class WeightRange:
    """A weight with a range of M.

    Attributes:
        first: the smallest M.
        last: the largest M.

    Raises:
        ProblemError: ``first`` is below 1, or a problem of the range is too large.
        UsageError: ``last`` is below ``first``.
    """

    weight: Weight
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.last < self.first:
            wrong = f"the range of M is {self.first}:{self.last}"
            raise UsageError(wrong, "positive integers in ascending order", "pass e.g. 1:8192")
        self.weight.problem(self.first)
        self.weight.problem(self.last)

    @property
    def key(self) -> str:
        """Return the canonical name, e.g. ``1:8192_4096_14336_TN_fp16_fp32``."""
        return f"{self.first}:{self.last}_{self.weight.key}"

    def problem(self, m: int) -> Problem:
        """Return the product of the weight with ``m`` rows of A."""
        return self.weight.problem(m)


def spans_of(ms: Iterable[int]) -> list[tuple[int, int]]:
    """Return the (first, last) of each run of neighbours, e.g. ``[(1, 3), (8, 8)]`` for 1, 2, 3 and 8.

    Args:
        ms: M in rising order.
    """
    found: list[tuple[int, int]] = []
    for m in ms:
        if found and found[-1][1] == m - 1:
            found[-1] = (found[-1][0], m)
        else:
            found.append((m, m))
    return found


def parse_range(text: str) -> tuple[int, int]:
    """Return (first, last) of a text ``FIRST:LAST``: ``"1:8192"`` gives ``(1, 8192)``, and ``"64"`` gives ``(64, 64)``.

    Raises:
        UsageError: another form, or an M below 1. The order of the two is not checked.
    """
    match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if min(first, last) < 1:
        wrong = f"invalid --m {text!r}"
        raise UsageError(wrong, "the smallest and largest M, as positive integers", "pass e.g. --m 1:8192")
    return first, last
