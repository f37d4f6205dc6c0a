"""Prove a grouped kernel: each group against fp64, and nothing written outside of it.

The sizes of groups are random. Among them are empty groups, groups of 1, 7 and 129 rows, and one group with all rows.
Ends may run backwards or past the last row; they count as clamped. A NaN stays in its group, and the bits of a group do
not depend on the others.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.grouped_launch import GroupedKernel

#: Fills C before a run; no product of :class:`GroupedOperands` comes near it.
CANARY = 30_000.0
#: Bound of the fp32 sums: this times the root of K, times the sum of absolute products. Twice fp32's unit.
_SUMS = 2.0**-22
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class GroupedCase:
    """The groups of one run.

    Attributes:
        ends: where each group ends; a kernel clamps them.
        rows: rows of A.
        not_a_number: a group whose rows and weight are NaN; None: none is.
    """

    ends: tuple[int, ...]
    rows: int
    not_a_number: int | None = None

    def clamped(self) -> list[int]:
        """Return the ends that count: ascending, within the rows."""
        return list(itertools.accumulate((min(max(end, 0), self.rows) for end in self.ends), max))


class GroupedOperands:
    """Random operands of a problem on a device, N(0, 1), and a canary in each element of C."""

    def __init__(self, problem: GroupedProblem, case: GroupedCase, seed: int, device: str = "cuda") -> None:
        made = torch.Generator(device).manual_seed(seed)
        dtype = _DTYPES[problem.dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_(generator=made)

        shape = (problem.n, problem.k) if problem.layout == "TN" else (problem.k, problem.n)
        self.problem, self.case = problem, case
        self.a, self.w = normal(case.rows, problem.k), normal(problem.groups, *shape)
        self.bias = normal(problem.groups, problem.n) if problem.bias else None
        self.ends = torch.tensor(case.ends, dtype=torch.int32, device=device)
        self.c = torch.full((case.rows, problem.columns), CANARY, dtype=dtype, device=device)
        if case.not_a_number is not None:
            begin, end = [0, *case.clamped()][case.not_a_number :][:2]
            self.a[begin:end], self.w[case.not_a_number] = float("nan"), float("nan")

    def run(self, kernel: GroupedKernel) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.a.is_cuda else 0
        kernel.bind(self.a, self.w, self.ends, self.c, self.bias)(stream)

    def why_wrong(self) -> str:
        """Return in one line what is wrong with C; empty if nothing is."""
        begin = 0
        for group, end in enumerate(self.case.clamped()):
            if end > begin and (reason := self._why_group_wrong(group, begin, end)):
                return f"group {group}, rows {begin} to {end}: {reason}"
            begin = end
        untouched = bool((self.c[begin:] == CANARY).all())
        return "" if untouched else f"rows from {begin} on, which no group has, were written"

    def _why_group_wrong(self, group: int, begin: int, end: int) -> str:
        found = self.c[begin:end].double()
        if group == self.case.not_a_number:
            return "" if bool(found.isnan().all()) else "a number came of NaN"
        wanted, allowed = self._reference(group, begin, end)
        apart = (found - wanted).abs()
        wrong = ~(apart <= allowed)  # also where it is no number
        if not bool(wrong.any()):
            return ""
        return f"{int(wrong.sum())} elements are wrong, by up to {float(apart.max()):.3g}"

    def _reference(self, group: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a group in fp64, and how far fp32 sums and one rounding may lie from them."""
        problem, a, w = self.problem, self.a[begin:end].double(), self.w[group].double()
        w = w.T if problem.layout == "TN" else w
        wanted, size = a @ w, a.abs() @ w.abs()
        if self.bias is not None:
            bias = self.bias[group].double()
            wanted, size = wanted + bias, size + bias.abs()
        if problem.gated:
            (gate, up), (of_gate, of_up) = wanted.chunk(2, 1), size.chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
            size = of_gate * (1 + up.abs()) + of_up * (1 + gate.abs())  # the derivative of SiLU is at most 1.1
        unit = torch.finfo(self.c.dtype).eps
        return wanted, wanted.abs() * unit + size * _SUMS * problem.k**0.5 + unit / 64


def cases(groups: int, seed: int, most: int = 700) -> Iterator[GroupedCase]:
    """Yield the cases of a proof.

    Args:
        most: about how many rows a case has.
    """
    draw = random.Random(seed)

    def of_sizes(sizes: Sequence[int], spare: int = 5, not_a_number: int | None = None) -> GroupedCase:
        return GroupedCase(tuple(itertools.accumulate(sizes)), sum(sizes) + spare, not_a_number)

    def drawn() -> list[int]:
        return [draw.choice((0, 1, 7, draw.randrange(1 + 2 * most // groups))) for _ in range(groups)]

    sizes = drawn()
    sizes[draw.randrange(groups)] = 129
    yield of_sizes(sizes)
    one = [0] * groups
    one[draw.randrange(groups)] = most
    yield of_sizes(one)
    yield of_sizes([0] * groups)
    yield of_sizes([1] * groups)
    yield GroupedCase(tuple(draw.randrange(-most // 4, 2 * most) for _ in range(groups)), most)
    sizes = [max(1, size) for size in drawn()]
    yield of_sizes(sizes, not_a_number=draw.randrange(groups))


def prove_grouped(
    kernel: GroupedKernel, problem: GroupedProblem, seed: int, most: int = 700, device: str = "cuda"
) -> str:
    """Return in one line why a kernel is not right on a problem; empty if it passes all cases.

    Args:
        most: about how many rows a case has.
        device: torch's name of the device.
    """
    for number, case in enumerate(cases(problem.groups, seed, most)):
        operands = GroupedOperands(problem, case, seed + number, device)
        operands.run(kernel)
        if reason := operands.why_wrong():
            return f"{_words(case)}: {reason}"
    return _why_bits_differ(kernel, problem, seed, device)


def _why_bits_differ(kernel: GroupedKernel, problem: GroupedProblem, seed: int, device: str) -> str:
    """Return why the rows of a group have other bits beside other groups than alone; empty if they have not."""
    draw = random.Random(seed)
    group, size = draw.randrange(problem.groups), 40
    sizes = [draw.randrange(9) for _ in range(problem.groups)]
    sizes[group] = size
    alone = GroupedCase(tuple(size * (index >= group) for index in range(problem.groups)), size)
    beside = GroupedCase(tuple(itertools.accumulate(sizes)), sum(sizes))
    first, second = (GroupedOperands(problem, case, seed, device) for case in (alone, beside))
    begin = sum(sizes[:group])
    second.w.copy_(first.w)
    second.a[begin : begin + size] = first.a
    if first.bias is not None and second.bias is not None:
        second.bias.copy_(first.bias)
    first.run(kernel)
    second.run(kernel)
    same = torch.equal(first.c, second.c[begin : begin + size])
    return "" if same else f"the bits of group {group} depend on the rows of the others"


def _words(case: GroupedCase) -> str:
    sizes = [end - begin for begin, end in itertools.pairwise([0, *case.clamped()])]
    kept = f"{case.rows} rows in groups of {', '.join(map(str, sizes[:8]))}"
    return kept + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")
