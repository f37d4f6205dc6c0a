"""Kernels that one input alone finds out, and kernels just inside and just outside the bound."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.gates import check_cell, prove  # noqa: E402
from outblas.judge.operands import Operands  # noqa: E402
from outblas.judge.proof_inputs import positive_inputs  # noqa: E402
from outblas.judge.reference import Reference, b_as_k_by_n, error_bound, fp64_product, magnitudes  # noqa: E402
from support.cheat_tools import Cheat, Honest  # noqa: E402

#: Number of the run of a proof that has each of the inputs (0/1 and other integers are 1 to 4).
RUNS = {"signed": 0, "positive": 5, "scaled": 6, "cancelling": 7, "special": 8}
WIDE = Problem(16, 16, 256)


def off_by(share, problem, a, b):
    """The product, with one element that is off by a share of the bound: the one that its steps let come nearest."""
    exact = fp64_product(problem, a, b)
    x, y = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (a, b))
    bound = error_bound(problem, fp64_product(problem, x, y), magnitudes(problem, x, y)[0])
    off = (exact + share * bound).to(a.dtype).double()
    missed = ((off - exact) / bound - share).abs().nan_to_num(torch.inf)
    missed[:7] = torch.inf  # the special inputs hold Inf and NaN there, or next to nothing
    row, column = divmod(int(missed.argmin()), problem.n)
    exact[row, column] = off[row, column]
    return exact


class OffOnce(Honest):
    """Off by a share of the bound in one of its runs."""

    def __init__(self, run, share):
        self._run, self._share, self._calls = run, share, -1

    def bind(self, problem, a, b, c):
        right = super().bind(problem, a, b, c)

        def call(stream):
            self._calls += 1
            if self._calls == self._run:
                c.copy_(off_by(self._share, problem, a, b))
            else:
                right(stream)

        return call


@pytest.mark.parametrize("what", RUNS)
@pytest.mark.parametrize(("share", "status"), [(0.97, Status.PASSED), (1.03, Status.WRONG), (1.9, Status.WRONG)])
def test_an_error_is_judged_by_the_whole_bound_and_no_more(what, share, status):
    verdict = prove(OffOnce(RUNS[what], share), WIDE, device="cpu")
    assert verdict.status is status, verdict.detail
    if status is Status.WRONG or what != "special":
        assert verdict.max_err_ratio == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("share", "status"), [(0.97, Status.PASSED), (1.03, Status.WRONG), (1.9, Status.WRONG)])
def test_a_cell_is_judged_by_the_whole_bound_and_no_more(share, status):
    data = Operands(WIDE, 1)
    data.fill_normal()
    a, b, c = data[0]
    reference, before = Reference(WIDE, a, b), data.input_sum(0).clone()
    verdict = check_cell(data, reference, before, lambda: c.copy_(off_by(share, WIDE, a, b)))
    assert verdict.status is status and verdict.max_err_ratio == pytest.approx(share, abs=0.02)


def verdict_of(problem, call):
    return prove(Cheat("wrong", lambda p, a, b, c, stream: c.copy_(call(p, a, b, c))), problem, device="cpu")


def fp32_product(problem, a, b):
    return a.float() @ b_as_k_by_n(problem, b).float()


def half_between(problem, a, b, c):
    """Two passes over K, with the sum of the first in half between them."""
    middle, y = problem.k // 2, b_as_k_by_n(problem, b).float()
    first = a[:, :middle].float() @ y[:middle]
    return first.half().float() + a[:, middle:].float() @ y[middle:]


@pytest.mark.parametrize(
    "problem", [Problem(4, 8, 16, "TN", "bf16"), Problem(1, 8, 32, "NN", "bf16")], ids=lambda p: p.key
)
def test_partial_sums_in_half_are_found_by_inputs_that_cancel_and_by_no_other(problem, monkeypatch):
    """A sum that cancels to nothing allows nothing for the rounding of its result."""
    verdict = verdict_of(problem, half_between)
    assert verdict.status is Status.WRONG and verdict.gates == ("static", "memory", "exact")
    assert verdict.max_err_ratio > 5
    monkeypatch.setattr("outblas.judge.gates.cancelling_inputs", lambda p, a, b: (a, b))
    assert verdict_of(problem, half_between).status is Status.PASSED


def loses_odd_numbers(problem, a, b, c):
    """A sum past 32,768 is even: an accumulator of 15 bits."""
    y, total = b_as_k_by_n(problem, b).float(), 0.0
    for part in (slice(0, 2**15), slice(2**15, None)):
        total = total + a[:, part].float() @ y[part]
        total = torch.where(total.abs() > 2**15, 2 * torch.round(total / 2), total)
    return total


@pytest.mark.parametrize("k", [2**15 + 15, 2**15 + 16])
def test_an_accumulator_that_loses_odd_numbers_is_found_by_rows_of_ones(k):
    verdict = verdict_of(Problem(1, 8, k), loses_odd_numbers)
    assert (verdict.status, verdict.gates) == (Status.WRONG, ("static", "memory"))
    assert verdict.detail.endswith("rows of ones")


def test_truncation_of_very_many_positive_terms_is_not_held_against_a_kernel():
    """The bias of a tensor core grows with their number, and the bound with its root: 1,024 of them are summed."""
    problem = Problem(16, 16, 2**17)
    a, b = positive_inputs(problem)
    parts = a.double().view(16, -1, 16).transpose(0, 1) @ b.double().view(16, -1, 16).permute(1, 2, 0)
    total = torch.zeros((16, 16), dtype=torch.float64)
    for part in parts:
        mantissa, exponent = torch.frexp(total + part)
        total = torch.ldexp(torch.floor(mantissa * 2**24), exponent - 24)
    assert float(Reference(problem, a, b).worst_error_ratio(total.half())) <= 1


def test_positive_inputs_are_1024_terms_of_every_sum():
    a, b = positive_inputs(Problem(3, 5, 2000))
    assert a.count_nonzero(dim=1).tolist() == [1024] * 3 and not a[:, 1024:].any()
    assert a.min() >= 0 and a.max() <= 1 and b.min() >= 0 and b.max() <= 1
    assert (
        a[:, :1024].float().mean() == pytest.approx(0.5, abs=0.05) == pytest.approx(b.float().mean().item(), abs=0.05)
    )


BY_WHAT_C_HELD = {
    "it adds to a C that is a number": lambda p, a, b, c: fp32_product(p, a, b) + c.float().nan_to_num(0.0),
    "it leaves a C that is 0": lambda p, a, b, c: torch.where(c == 0, c.float(), fp32_product(p, a, b)),
}


@pytest.mark.parametrize("what", BY_WHAT_C_HELD)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_result_that_depends_on_what_c_held_is_wrong(what, dtype):
    """Neither is seen over the NaN that C holds otherwise; each by one of two patterns."""
    verdict = verdict_of(Problem(16, 24, 64, dtype=dtype), BY_WHAT_C_HELD[what])
    assert verdict.status is Status.WRONG and verdict.detail == "the result depends on the previous content of C"
