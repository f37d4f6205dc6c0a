"""Inputs of proofs, number by number, drawn again here with torch's generators and plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import proof_inputs  # noqa: E402
from outblas.judge.proof_inputs import (  # noqa: E402
    cancelling_inputs,
    integer_draws,
    integer_inputs,
    normal_inputs,
    positive_inputs,
    scaled_inputs,
    special_inputs,
)
from outblas.judge.reference import fp64_product  # noqa: E402

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def drawn(problem, seed, fill):
    """(A, B as stored): fp32 numbers of one generator, A first, then rounded."""
    torch_generator = torch.Generator().manual_seed(seed)
    b_shape = (problem.n, problem.k) if problem.layout == "TN" else (problem.k, problem.n)
    made = [fill(torch.empty(shape), torch_generator) for shape in ((problem.m, problem.k), b_shape)]
    return tuple(t.to(DTYPES[problem.dtype]) for t in made)


def same(found, expected):
    assert len(found) == len(expected) == 2
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.array_equal(x.double().numpy(), y.double().numpy(), equal_nan=True)


@pytest.mark.parametrize(("layout", "dtype"), [("TN", "fp16"), ("NN", "fp16"), ("TN", "bf16")])
@pytest.mark.parametrize("scale", [None, 1.0, 0.125])
def test_normal_inputs_are_those_of_their_seed(layout, dtype, scale):
    problem = Problem(5, 3, 20, layout, dtype)
    found = normal_inputs(problem, 7) if scale is None else normal_inputs(problem, 7, scale=scale)
    same(found, drawn(problem, 7, lambda t, g: t.normal_(std=scale or 1.0, generator=g)))


def test_drawing_leaves_the_callers_generator_alone():
    before = torch.get_rng_state()
    normal_inputs(Problem(4, 4, 4), 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_takes_no_number_from_the_generator_that_other_threads_use(monkeypatch):
    """Between a fork of the state and its return, another thread's numbers would be drawn twice."""
    monkeypatch.setattr(torch.random, "fork_rng", lambda *a, **k: pytest.fail("the common generator is set back"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = proof_inputs._draw(Problem(2, 3, 4), 8, "cpu", lambda t, g: t.fill_(2.0).add_(torch.rand(()) * 0))
    assert (found[0] == 2).all() and (found[0].shape, found[1].shape) == ((2, 4), (3, 4))
    torch.manual_seed(5)
    normal_inputs(Problem(4, 4, 4), 1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("problem", [Problem(5, 7, 64), Problem(3, 4, 70_000, "NN"), Problem(4, 4, 4096, "TN", "bf16")])
def test_integers_filled_in_place_have_exact_sums(problem):
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    a = torch.empty(problem.m, problem.k, dtype=dtype)
    b = torch.empty(problem.b_shape, dtype=dtype)
    proof_inputs.fill_integers(problem, a, b)
    top = max(1, min(15, int((60000 / problem.k) ** 0.5)))
    for operand in (a, b):
        assert torch.equal(operand, operand.round()) and int(operand.abs().max()) == top
    product = fp64_product(problem, a, b)
    assert torch.equal(product.float().double(), product) and float(product.abs().max()) <= 60000
    again = torch.empty_like(a), torch.empty_like(b)
    proof_inputs.fill_integers(problem, *again)
    same(again, (a, b))


@pytest.mark.parametrize("k", [3, 1023, 1024, 1025, 1030])
def test_positive_inputs_have_1024_terms(k):
    problem = Problem(3, 2, k)
    a, b = drawn(problem, 6, lambda t, g: t.uniform_(0.0, 1.0, generator=g))
    a[:, 1024:] = 0
    found = positive_inputs(problem)
    same(found, (a, b))
    assert int((found[0].abs().sum(0) > 0).sum()) == min(k, 1024)


def test_rows_are_scaled_by_nine_powers_of_two():
    problem = Problem(20, 2, 6)
    a, b = normal_inputs(problem, 3)
    powers = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0]
    scaled, same_b = scaled_inputs(problem, a, b)
    assert same_b is b and scaled.dtype == a.dtype
    expected = (a.double().numpy() * np.array([*powers, *powers, *powers[:2]])[:, None]).astype(np.float16)
    assert np.array_equal(scaled.numpy(), expected)


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("k", [1, 2, 7, 8])
def test_the_second_half_cancels_the_first(layout, k):
    problem = Problem(3, 4, k, layout)
    a, b = normal_inputs(problem, 3)
    kept = a.clone(), b.clone()
    x, y = cancelling_inputs(problem, a, b)
    same((a, b), kept)
    half = k // 2
    x, y = x.numpy(), (y.t() if layout == "TN" else y).numpy()
    old_x, old_y = a.numpy(), (b.t() if layout == "TN" else b).numpy()
    assert np.array_equal(x, np.concatenate([old_x[:, :half], old_x[:, :half], old_x[:, 2 * half :]], axis=1))
    assert np.array_equal(y, np.concatenate([old_y[:half], -old_y[:half], old_y[2 * half :]]))


#: acc, K, largest integer, and the share of them that is kept.
INTEGERS = [
    ("fp32", 1, 15, 1.0),
    ("fp32", 234, 15, 1.0),  # 15 * 15 * 234 = 52,650; 16 would be left at 60,000 / 256 = 234.4
    ("fp32", 266, 15, 1.0),
    ("fp32", 267, 14, 1.0),
    ("fp32", 600, 10, 1.0),
    ("fp32", 15000, 2, 1.0),
    ("fp32", 15001, 1, 1.0),
    ("fp32", 60000, 1, 1.0),
    ("fp32", 60001, 1, math.sqrt(60000 / 60001)),
    ("fp32", 240000, 1, 0.5),
    ("fp16", 4, 1, 1.0),
    ("fp16", 1024, 1, 1.0),
    ("fp16", 1025, 1, math.sqrt(1024 / 1025)),
    ("fp16", 4096, 1, 0.5),
]


@pytest.mark.parametrize(("acc", "k", "top", "density"), INTEGERS)
def test_integers_are_as_large_and_as_many_as_sums_allow(acc, k, top, density):
    problem = Problem(2, 3, k, "TN", "fp16", acc)

    def fill(low, high):
        def one(t, g):
            t.copy_(torch.randint(low, high + 1, t.shape, generator=g))
            return t if density == 1.0 else t * torch.empty_like(t).bernoulli_(density, generator=g)

        return one

    draws = list(integer_draws(problem))
    assert [what for what, _ in draws] == [
        "0/1 inputs",
        f"integers 0..{top}",
        f"integers -{top}..{top}",
        "rows of ones",
    ]
    for (_, draw), seed, low, high in zip(draws, (2, 3, 4), (0, 0, -top), (1, top, top), strict=False):
        same(draw(), drawn(problem, seed, fill(low, high)))


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(
    ("acc", "k", "first", "terms"),
    [
        ("fp32", 1, 3, 1), ("fp32", 8, 2, 8), ("fp32", 9, 3, 9), ("fp32", 2001, 3, 2001), ("fp32", 60000, 2, 60000),
        ("fp32", 60003, 3, 60000), ("fp32", 60004, 2, 60000), ("fp16", 8, 2, 8), ("fp16", 1999, 3, 1999),
        ("fp16", 2000, 2, 2000), ("fp16", 2001, 3, 2000), ("fp16", 2004, 2, 2000),
    ],
)  # fmt: skip
def test_rows_of_ones_sum_to_an_odd_number_below_the_limit(layout, acc, k, first, terms):
    problem = Problem(2, 3, k, layout, "fp16", acc)
    what, a, b = list(integer_inputs(problem))[-1]
    expected_a = np.repeat((np.arange(k) < terms).astype(np.float16)[None], 2, axis=0)
    expected_b = np.ones((k, 3), np.float16)
    expected_b[0] = first
    assert what == "rows of ones" and np.array_equal(a.numpy(), expected_a)
    assert np.array_equal((b.t() if layout == "TN" else b).numpy(), expected_b)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 16), (2, 2, 8), (3, 3, 9), (4, 4, 12), (5, 5, 13), (6, 4, 16), (7, 4, 16), (8, 6, 23), (7, 3, 4)],
)
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_special_rows_stand_where_they_should(layout, dtype, m, n, k):
    problem = Problem(m, n, k, layout, dtype)
    a, b = (t.double().numpy() for t in drawn(problem, 10, lambda t, g: t.normal_(generator=g)))
    tiny, huge = (2.0**-24, 60000.0) if dtype == "fp16" else (2.0**-133, 3.0e38)
    a = np.concatenate([a, np.zeros((max(0, 7 - m), k))])  # rows that are not there are cut off again
    a[0, 0], a[1, 0], a[2, k // 2], a[3, k - 1] = math.inf, -math.inf, math.nan, math.inf
    a[4] = np.where(np.arange(k) == k // 3, float(torch.tensor(huge).to(DTYPES[dtype])), 0.0)
    a[5] = [tiny * (j % 5) for j in range(k)]
    a[6, 0], a[6, 1] = math.inf, -math.inf
    y = b.T if layout == "TN" else b
    if n >= 4:
        y[k // 2, 1], y[k // 4, 2] = math.inf, math.nan
    x, found_b = special_inputs(problem)
    assert x.dtype == found_b.dtype == DTYPES[dtype]
    assert np.array_equal(x.double().numpy(), a[:m], equal_nan=True)
    assert np.array_equal(found_b.double().numpy(), b, equal_nan=True)


@pytest.mark.parametrize(("k", "seventh"), [(1, [0.0]), (2, [math.inf, -math.inf])])
def test_infinities_of_both_signs_need_two_terms(k, seventh):
    problem = Problem(7, 1, k)
    a = special_inputs(problem)[0]
    plain = normal_inputs(problem, 10)[0]
    assert a[6].tolist() == (plain[6].tolist() if k == 1 else seventh)
