"""The launch's figures and the device code's constants are computed twice; here they are held together."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.geometry_terms import MAX_GRID_YZ, SMEM_LIMIT, divisor_up_to
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from support.family_tools import assert_device_agrees
from support.gpus.known import H200

KINDS = [
    ("TN", "fp16", "fp32"),
    ("NN", "bf16", "fp32"),
    ("TN", "fp16", "fp16"),
    ("NN", "fp16", "fp16"),
    ("TN", "bf16", "fp32"),
]
LARGE = (4096, 4096, 8192)


#: Size of the sample.
PAIRS = 120


@cache
def sample() -> list[tuple[Problem, KernelConfig]]:
    """Legal (problem, config) pairs over all kinds, the same in every run."""
    rng = random.Random(20)
    pairs = []
    for i in range(PAIRS):
        problem = Problem(*LARGE, *KINDS[i % len(KINDS)])  # type: ignore[arg-type]
        if i % 4 == 3:  # few tokens: the gemv family is legal too
            problem = replace(problem, m=8, acc="fp32")
        pairs.append((problem, rng.choice(legal(problem))))
    return pairs


@cache
def legal(problem: Problem) -> list[KernelConfig]:
    return [c for c in pool() if why_illegal(problem, c, H200) is None]


@pytest.mark.parametrize("index", range(PAIRS))
def test_shared_memory_and_threads_are_the_device_codes(index: int) -> None:
    assert_device_agrees(*sample()[index])


def test_divisors() -> None:
    for value in range(1, 65):
        for limit in range(1, 20):
            found = divisor_up_to(value, limit)
            assert value % found == 0 and found <= limit
            assert not any(value % d == 0 for d in range(found + 1, min(value, limit) + 1))


@pytest.mark.parametrize(("value", "limit"), [(12, 0), (0, 3), (4, -1)])
def test_divisors_need_positive_numbers(value: int, limit: int) -> None:
    with pytest.raises(UsageError, match=f"{value} has no divisor up to {limit}; expected two positive integers"):
        divisor_up_to(value, limit)


def test_limits_are_hoppers() -> None:
    assert (SMEM_LIMIT, MAX_GRID_YZ) == (227 * 1024, 2**16 - 1)
