"""References and bounds against the formulas of the module's text, computed apart from it in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import reference  # noqa: E402
from outblas.judge.proof_inputs import normal_inputs  # noqa: E402
from outblas.judge.reference import Reference, allow_tf32, error_bound, magnitudes  # noqa: E402
from support.helpers import needed_c  # noqa: E402

#: dtype, acc, K, and by hand: factor of |C|, of |A| |B|, of Q, and what is added.
BOUNDS = [
    ("fp16", "fp32", 64, 2**-11, 4 * 8 / 2**24, 0.0, 2**-25),
    ("bf16", "fp32", 64, 2**-8, 4 * 8 / 2**24, 0.0, 2**-126),
    ("fp16", "fp32", 1, 2**-11, 4 / 2**24, 0.0, 2**-25),
    ("fp16", "fp16", 64, 2**-11 + 16 / 2**11, 0.0, 16 / 2**11, 5 * 2**-25),
    ("fp16", "fp16", 65, 2**-11 + 8 * 5**0.5 / 2**11, 0.0, 8 * 5**0.5 / 2**11, 6 * 2**-25),
    ("fp16", "fp16", 1, 2**-11 + 8 / 2**11, 0.0, 8 / 2**11, 2 * 2**-25),
]


@pytest.mark.parametrize(("dtype", "acc", "k", "of_c", "of_magnitude", "of_q", "least"), BOUNDS)
def test_a_bound_is_that_of_the_text(dtype, acc, k, of_c, of_magnitude, of_q, least):
    problem = Problem(1, 4, k, "TN", dtype, acc)
    c, magnitude, q = (
        np.array(x) for x in ([[-3.0, 0.0, 2.0, 1e-6]], [[7.0, 0.0, 2.5, 3e-6]], [[1.5, 0.0, 4.0, 2e-6]])
    )
    found = error_bound(problem, *(torch.from_numpy(x) for x in (c, magnitude, q)))
    expected = of_c * abs(c) + of_magnitude * magnitude + of_q * q + least
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("acc", "half_c"), [("fp32", 2.0), ("fp16", 4.0)])
def test_a_bound_of_another_c_is_linear_in_it(acc, half_c):
    problem = Problem(2, 3, 48, "TN", "fp16", acc)
    c, magnitude, q = torch.randn(3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).abs()
    none, half, whole = (error_bound(problem, c, magnitude, q, x) for x in (0.0, half_c, None))
    torch.testing.assert_close(2 * half, none + whole, rtol=1e-12, atol=0.0)


def arrays(problem, seed=1):
    """A, B as stored, and both as (M, K) and (K, N) of fp64."""
    a, b = normal_inputs(problem, seed)
    y = b.double().numpy()
    return a, b, a.double().numpy(), y.T if problem.layout == "TN" else y


@pytest.mark.parametrize(("layout", "acc"), [("TN", "fp32"), ("NN", "fp32"), ("TN", "fp16"), ("NN", "fp16")])
def test_magnitudes_are_of_absolute_values_and_of_squares(layout, acc):
    problem = Problem(5, 7, 33, layout, "fp16", acc)
    a, b, x, y = arrays(problem)
    magnitude, q = magnitudes(problem, a, b)
    np.testing.assert_allclose(magnitude.numpy(), abs(x) @ abs(y), rtol=1e-5)
    if acc == "fp32":
        assert q is None
    else:
        np.testing.assert_allclose(q.numpy(), np.sqrt((x * x) @ (y * y)), rtol=1e-5)


def bound_of(problem, x, y, c=None):
    """The text's bound once more, in numpy."""
    u, s = (2**-11, 2**-25) if problem.dtype == "fp16" else (2**-8, 2**-126)
    product, least = abs(x @ y), s
    if problem.acc == "fp32":
        return u * product + least + (4 if c is None else c) * problem.k**0.5 / 2**24 * (abs(x) @ abs(y))
    steps = -(-problem.k // 16)
    q = np.sqrt((x * x) @ (y * y))
    return u * product + (steps + 1) * s + (8 if c is None else c) * steps**0.5 / 2**11 * (product + q)


@pytest.mark.filterwarnings("error")  # a result of another shape would be resized with a warning
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("chunk", [2**26, 21, 14, 5])  # of 11 rows of 7: all, three, two, one at a time
@pytest.mark.parametrize(
    ("layout", "dtype", "acc"), [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
)
def test_the_worst_error_is_found_wherever_it_is(monkeypatch, layout, dtype, acc, chunk, sign):
    monkeypatch.setattr(reference, "_CHUNK", chunk)
    problem = Problem(11, 7, 40, layout, dtype, acc)
    a, b, x, y = arrays(problem)
    made = Reference(problem, a, b)
    bound = bound_of(problem, x, y)
    np.testing.assert_allclose(made.reference.numpy(), x @ y, rtol=1e-6, atol=1e-6)
    for row in range(11):
        c = (x @ y).astype(np.float32)
        c[row, row % 7] += sign * 1.75 * bound[row, row % 7]
        c[(row + 4) % 11, 3] -= sign * 0.5 * bound[(row + 4) % 11, 3]
        found = made.worst_error_ratio(torch.from_numpy(c))
        assert found.shape == () and float(found) == pytest.approx(1.75, rel=1e-2)
        c[row, 6] = math.nan
        assert math.isnan(float(made.worst_error_ratio(torch.from_numpy(c))))
    assert made.nbytes == 2 * 4 * 11 * 7


@pytest.mark.parametrize(("dtype", "acc"), [("fp16", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")])
def test_the_c_that_a_result_needs(dtype, acc):
    problem = Problem(6, 5, 80, "TN", dtype, acc)
    a, b, x, y = arrays(problem)
    zero = bound_of(problem, x, y, 0.0)
    needs = bound_of(problem, x, y, 3.0)
    c = x @ y
    c[2, 3] -= needs[2, 3]
    c[4, 1] += bound_of(problem, x, y, 1.5)[4, 1]
    assert needed_c(problem, a, b, torch.from_numpy(c)) == pytest.approx(3.0, rel=1e-3)
    c[2, 3] = (x @ y)[2, 3] + zero[2, 3] / 2
    assert needed_c(problem, a, b, torch.from_numpy(c)) == pytest.approx(1.5, rel=1e-3)
    assert needed_c(problem, a, b, torch.from_numpy(x @ y)) == 0.0


class Products(TorchDispatchMode):
    """Notes each product's left shape and whether TF32 was allowed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left = args[-2]
            self.seen.append((tuple(left.shape), left.dtype, torch.backends.cuda.matmul.allow_tf32))
        return func(*args, **(kwargs or {}))


def one_among_huge(m, k):
    """A whose rows sum, times ones, to 1: an fp32 accumulator that meets the huge term first has 0."""
    a = torch.zeros(m, k, dtype=torch.float16)
    a[:, 0], a[:, 600], a[:, -1] = 60000.0, 2.0**-10, -60000.0
    return a


@pytest.mark.parametrize(("m", "step"), [(20, 1), (32, 1), (63, 1), (64, 2), (70, 2), (96, 3)])
def test_above_the_limit_rows_are_sampled_in_fp64(monkeypatch, m, step):
    problem = Problem(m, 3, 1600, "NN")
    a, b = one_among_huge(m, 1600), torch.ones(1600, 3, dtype=torch.float16)
    monkeypatch.setattr(reference, "FP64_FLOPS", problem.flops)
    assert (Reference(problem, a, b).reference == 2.0**-10).all(), "at the limit all rows are fp64"
    monkeypatch.setattr(reference, "FP64_FLOPS", problem.flops - 1)
    with Products() as products, allow_tf32(True):
        made = reference._reference(problem, a, b)
    expected = np.where(np.arange(m) % step == 0, 2.0**-10, 0.0)
    assert made.dtype == torch.float32 and np.array_equal(made.numpy(), np.repeat(expected[:, None], 3, axis=1))
    blocks = [((m, size), torch.float32, False) for size in (512, 512, 512, 64)]
    assert products.seen == [*blocks, ((-(-m // step), 1600), torch.float64, True)]


@pytest.mark.parametrize(
    ("n", "k", "chunk", "rows"),
    [
        (4, 10, 100, [10, 10, 5]),
        (10, 4, 100, [10, 10, 5]),
        (4, 10, 259, [25]),
        (4, 10, 9, [1] * 25),
        (4, 10, 240, [24, 1]),
    ],
)
def test_fp64_products_are_made_some_rows_at_a_time(monkeypatch, n, k, chunk, rows):
    monkeypatch.setattr(reference, "_CHUNK", chunk)
    problem = Problem(25, n, k)
    a, b, x, y = arrays(problem)
    with Products() as products:
        made = reference._reference(problem, a, b)
    assert [seen[:2] for seen in products.seen] == [((r, k), torch.float64) for r in rows]
    np.testing.assert_allclose(made.numpy(), x @ y, rtol=1e-6, atol=1e-6)


def test_sizes_of_the_reference_are_those_that_were_calibrated():
    assert reference.FP64_FLOPS == 137_438_953_472
    assert (reference._K_BLOCK, reference._FP64_ROWS, reference._CHUNK) == (512, 32, 67_108_864)
    assert (reference.ERROR_C, reference.FP16_C) == (4.0, 8.0)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_tf32_is_as_before_after_an_error_too(monkeypatch, before, allowed):
    settings = torch.backends.cuda.matmul
    was = settings.allow_tf32
    try:
        settings.allow_tf32 = before
        with pytest.raises(ZeroDivisionError), allow_tf32(allowed):
            assert settings.allow_tf32 is allowed
            raise ZeroDivisionError
        assert settings.allow_tf32 is before
    finally:
        settings.allow_tf32 = was


def test_magnitudes_may_use_tf32():
    problem = Problem(4, 4, 4, "TN", "fp16", "fp16")
    a, b, _, _ = arrays(problem)
    with Products() as products, allow_tf32(False):
        magnitudes(problem, a, b)
    assert [allowed for _, _, allowed in products.seen] == [True, True]


def test_a_row_of_zeros_needs_no_c_for_an_error_of_half_a_step():
    problem = Problem(2, 2, 4)
    a, b = torch.zeros(2, 4, dtype=torch.float16), torch.ones(2, 4, dtype=torch.float16)
    assert needed_c(problem, a, b, torch.full((2, 2), 2.0**-25, dtype=torch.float64)) == 0.0
    assert needed_c(problem, a, b, torch.full((2, 2), 2.0**-24, dtype=torch.float64)) > 1e200
