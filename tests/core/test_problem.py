"""Problem: valid and invalid ones, and keys that parse back."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from outblas.core.errors import OutblasError, ProblemError
from outblas.core.problem import MAX_INDEX, Problem

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

extents = st.integers(1, 16384)
kinds = st.sampled_from([("fp16", "fp32"), ("fp16", "fp16"), ("bf16", "fp32")])


@st.composite
def problems(draw: Any) -> Problem:
    dtype, acc = draw(kinds)
    return Problem(draw(extents), draw(extents), draw(extents), draw(st.sampled_from(["TN", "NN"])), dtype, acc)


@given(problems())
def test_key_and_json_lead_back_to_the_same_problem(problem: Problem) -> None:
    assert Problem.from_key(problem.key) == problem
    assert Problem.from_json(problem.to_json()) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert Problem.from_mnk(problem.mnk, problem.layout.lower(), problem.dtype.upper(), problem.acc) == problem


@given(problems(), problems())
def test_keys_differ_exactly_where_problems_do(one: Problem, other: Problem) -> None:
    assert (one.key == other.key) == (one == other)
    assert len({one, other}) == (1 if one == other else 2)


@given(problems())
def test_work_and_traffic_follow_from_the_extents(problem: Problem) -> None:
    m, n, k = problem.m, problem.n, problem.k
    assert problem.flops == 2 * m * n * k
    assert problem.bytes == 2 * (m * k + k * n + m * n)
    rows, columns = problem.b_shape
    assert {rows, columns} == {n, k}
    assert rows == (n if problem.layout == "TN" else k)


@pytest.mark.parametrize(
    ("m", "n", "k", "layout", "aligned"),
    [
        (1, 8, 8, "TN", True),
        (127, 1001, 333, "TN", False),
        (64, 64, 4, "TN", False),
        (64, 12, 64, "TN", False),  # rows of C
        (64, 12, 64, "NN", False),  # rows of B and C
        (3, 64, 64, "NN", True),  # M is never the length of a row
    ],
)
def test_rows_aligned_needs_16_byte_rows_of_every_operand(m: int, n: int, k: int, layout: Any, aligned: bool) -> None:
    assert Problem(m, n, k, layout).rows_aligned is aligned


@pytest.mark.parametrize("axis", ["m", "n", "k"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "64", None])
def test_an_extent_must_be_a_positive_integer(axis: str, value: Any) -> None:
    with pytest.raises(ProblemError, match=axis.upper()):
        Problem(**{"m": 64, "n": 64, "k": 64, axis: value})


@pytest.mark.parametrize(
    ("m", "n", "k", "operand"), [(2**16, 1, 2**15, "A"), (1, 2**16, 2**15, "B"), (2**16, 2**15, 1, "C")]
)
def test_an_operand_past_32_bit_indices_is_refused_and_named(m: int, n: int, k: int, operand: str) -> None:
    with pytest.raises(ProblemError, match=f"operand {operand}"):
        Problem(m, n, k)


def test_the_largest_operand_that_indices_reach_is_accepted() -> None:
    assert Problem(MAX_INDEX, 1, 1).m == MAX_INDEX
    with pytest.raises(ProblemError):
        Problem(MAX_INDEX + 1, 1, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"layout": "NT"}, {"layout": "tn"}, {"dtype": "fp8"}, {"acc": "fp64"}, {"dtype": None}],
)
def test_what_is_not_supported_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="not supported"):
        Problem(64, 64, 64, **wrong)


def test_fp16_accumulation_is_for_fp16_inputs_only() -> None:
    assert Problem(64, 64, 64, acc="fp16").acc == "fp16"
    with pytest.raises(ProblemError, match="accumulator fp16"):
        Problem(64, 64, 64, dtype="bf16", acc="fp16")


@pytest.mark.parametrize(
    "mnk", ["", "64", "64_64", "64_64_64_64", "a_b_c", "64 64 64", "64_64_6.4", "64__64", "²_1_1", "9" * 5000 + "_1_1"]
)
def test_malformed_mnk_is_one_clear_line(mnk: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.from_mnk(mnk)
    assert "\n" not in str(caught.value)
    assert "64_4096_64" in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_is_more_than_refused(text: str) -> None:
    for read in (Problem.from_mnk, Problem.from_key):
        try:
            assert isinstance(read(text), Problem)
        except OutblasError as error:
            assert (error.wrong, error.expected, error.do) != ("", "", "")


def test_x_separates_extents_too() -> None:
    assert Problem.from_mnk("64x4096x32") == Problem(64, 4096, 32)
    assert Problem.from_mnk("64,4096,32") == Problem(64, 4096, 32)


@pytest.mark.parametrize("key", ["64_64_64_TN_fp16", "64_64_64_TN_fp16_fp32_none", "64_64_TN_64_fp16_fp32"])
def test_a_damaged_key_is_refused(key: str) -> None:
    with pytest.raises(ProblemError):
        Problem.from_key(key)
