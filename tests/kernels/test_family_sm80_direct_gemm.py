"""The kernel family sm80_direct_gemm: legality, geometry, neighbours and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.cost import cost_model
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig, direct_registers
from outblas.kernels.geometry import launch_smem
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM
from outblas.kernels.legality import why_illegal
from outblas_lab.build.refine import neighbours
from support.family_tools import assert_device_agrees
from support.gpus.known import H200

P = Problem(4096, 4096, 4096)

NN = replace(P, layout="NN")

D, DECODE = Problem(8, 4096, 4096), Problem(16, 4096, 4096)

T = Sm80DirectConfig(32, 16, wk=4)

A100 = replace(H200, name="a100", arch=80, smem_optin=166912)

BLACKWELL = replace(H200, name="b200", arch=100)


LARGE = (4096, 4096, 8192)


TINY = Sm80DirectConfig(16, 8, pdl=True)


TINY_COST, LARGE_COST = Problem(64, 64, 64), Problem(8192, 8192, 4096)


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (P, replace(T, bn=0), H200, "extents must be positive"),
        (P, replace(T, unroll=0), H200, "extents must be positive"),
        (P, T, replace(H200, arch=75), "needs sm_80, not sm_75"),
        (replace(P, k=4100), T, H200, "rows are not multiples of 16 bytes"),
        (replace(NN, n=4100), T, H200, "rows are not multiples of 16 bytes"),
        (replace(P, n=4100), T, H200, "rows are not multiples of 16 bytes"),
        (P, replace(T, bm=48), H200, "bm / wm must be 16, 32 or 64"),
        (P, replace(T, bm=40), H200, "bm / wm must be 16, 32 or 64"),
        (P, replace(T, bm=8), H200, "bm / wm must be 16, 32 or 64"),
        (P, replace(T, bn=24), H200, "bn / wn must be 8, 16 or 32"),
        (P, replace(T, bn=64, unroll=1), H200, "bn / wn must be 8, 16 or 32"),
        (P, replace(T, bn=8, wn=2), H200, "bn / wn must be 8, 16 or 32"),
        (P, replace(T, wk=17), H200, "at most 16 warps"),
        (P, replace(T, bm=64, bn=32, wm=2, wn=2, wk=5), H200, "at most 16 warps"),
        (P, replace(T, bm=16, bn=8, unroll=9), H200, "unroll must be 1 to 8"),
        (P, replace(T, pdl=True), A100, "programmatic dependent launch needs sm_90"),
        (P, replace(T, even=True), H200, "even needs pdl"),
        (
            D,
            replace(T, pdl=True, even=True),
            replace(BLACKWELL, smem_optin=101376),
            "115712 bytes of shared memory exceed 101376",
        ),
        (P, replace(T, unroll=8), H200, "registers of operands and sums: the budget is 195"),
        (P, replace(T, bm=16, wk=16, unroll=4), H200, "the budget is 68 for 512 threads"),
        (Problem(8, 8 * 65536, 8), replace(T, bn=8), H200, "CTAs exceeds 65535 along y or z"),
        (
            P,
            replace(T, bm=64, bn=64, wm=2, wn=2, wk=4, unroll=1),
            replace(A100, smem_optin=65535),
            "bytes of shared memory",
        ),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: KernelConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize(
    "config",
    [
        T,
    ],
)
@pytest.mark.parametrize("problem", [P, NN, replace(P, acc="fp16"), replace(NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_what_the_rules_start_from_is_legal(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config, H200) is None


def test_the_direct_family_serves_older_gpus_and_any_m_and_k() -> None:
    for problem in (Problem(1, 8, 8), Problem(1, 8, 8, "NN", "bf16"), Problem(7, 24, 40, acc="fp16"), P, NN):
        for gpu in (H200, A100, BLACKWELL):
            assert why_illegal(problem, T, gpu) is None
    assert why_illegal(P, replace(T, pdl=True), BLACKWELL) is None


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        *(
            (Problem(*LARGE), c)
            for c in [
                Sm80DirectConfig(64, 32, 1, 1, 1, 1),
                Sm80DirectConfig(96, 24, 3, 3, 1, 2, pdl=True),
                Sm80DirectConfig(16, 8, 1, 1, 3, 8),
                Sm80DirectConfig(32, 32, 1, 2, 5, 2),
            ]
        ),
    ],
)
def test_shared_memory_and_threads_are_the_device_codes(problem: Problem, config: KernelConfig) -> None:
    assert_device_agrees(problem, config)


def test_registers_of_the_direct_family_are_its_loads_and_sums() -> None:
    """2 x 1 blocks of 16x8, three chunks: 8 registers of A and 4 of B each, and the sums."""
    assert direct_registers(Sm80DirectConfig(32, 8, unroll=3)) == (3 * (8 * 2 + 4) + 4 * 2, 255 - 60)
    assert direct_registers(Sm80DirectConfig(32, 8, wk=16, unroll=3))[1] == 128 - 60, "512 threads share 65,536"


def test_the_share_of_an_sm_is_all_that_fits_of_an_even_launch() -> None:
    even = replace(TINY, even=True)
    for share in range(1, 33):
        problem = Problem(16, 8 * 132 * share, 64)
        asked = launch_smem(problem, even, 132)
        assert asked % 128 == 0 and SM_SMEM // (asked + CTA_SMEM) == share
        assert launch_smem(replace(problem, n=problem.n - 8), even, 132) == asked


@pytest.mark.parametrize(
    "config",
    [
        Sm80DirectConfig(32, 32, 1, 1, 2, 2),
    ],
)
def test_every_family_has_some(config: KernelConfig) -> None:
    assert len(neighbours(Problem(8, 1024, 4096), config, H200)) >= 3


def test_a_longer_k_takes_the_direct_family_more_batches() -> None:
    config = Sm80DirectConfig(16, 16, wk=4, unroll=4)
    times = [cost_model.predict_us(Problem(64, 64, k), config, H200) for k in (512, 2048, 8192)]
    assert times[0] < times[1] < times[2]
    many = [cost_model.predict_us(Problem(64, 64, 4096), replace(config, wk=w), H200) for w in (1, 4, 8)]
    assert many[0] > many[1] > many[2]
