"""The kernel family sm80_mma_gemm: legality, geometry, neighbours and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.kernels.cost import cost_model
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.geometry import geometry, k_tiles, launch_smem
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM, SMEM_LIMIT
from outblas.kernels.legality import why_illegal
from outblas_lab.build.refine import neighbours
from support.family_tools import assert_device_agrees
from support.gpus.known import H200

P = Problem(4096, 4096, 4096)

NN = replace(P, layout="NN")

M = Sm80MmaConfig(64, 64)

A100 = replace(H200, name="a100", arch=80, smem_optin=166912)

BLACKWELL = replace(H200, name="b200", arch=100)


LARGE = (4096, 4096, 8192)


DEEP = Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8, pdl=True)


TINY, LARGE_COST = Problem(64, 64, 64), Problem(8192, 8192, 4096)


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (P, replace(M, bm=0), H200, "extents must be positive"),
        (P, M, replace(H200, arch=75), "needs sm_80, not sm_75"),
        (P, replace(M, wm=3), H200, "wm does not divide"),
        (P, replace(M, wn=3), H200, "wn does not divide"),
        (P, replace(M, wk=3), H200, "wk does not divide"),
        (P, replace(M, bk=96), H200, "bk must be 32, 64, 128 or 256"),
        (P, replace(M, bk=256, stages=1, wk=8), H200, "at most 16 warps"),
        (P, replace(M, stages=9), H200, "stages must be 1 to 8"),
        (P, replace(M, vec=3), H200, "vec must be 1, 2, 4 or 8"),
        (replace(P, k=4100), M, H200, "rows are not multiples of vec = 8"),
        (replace(NN, n=4098), replace(M, vec=4), H200, "rows are not multiples of vec = 4"),
        (P, replace(M, split_k=17), H200, "at most 16 CTAs"),
        (P, replace(M, split_k=2), A100, "cluster split-K needs sm_90"),
        (P, replace(M, pdl=True), A100, "programmatic dependent launch needs sm_90"),
        (NN, replace(M, bn=96, wn=2), H200, "NN needs bn a power of two"),
        (P, Sm80MmaConfig(128, 256, wm=1, wn=4), H200, "accumulator registers are too many"),
        (replace(P, k=64), replace(M, split_k=2), H200, "split_k 2 exceeds the 1 K tiles"),
        (P, replace(M, bm=128, bn=128, bk=128, wn=4, stages=4), H200, "bytes of shared memory exceed"),
        (P, replace(M, even=True), H200, "even needs pdl"),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: KernelConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize(
    "config",
    [
        M,
        replace(M, vec=1),
        replace(M, split_k=4),
    ],
)
@pytest.mark.parametrize("problem", [P, NN, replace(P, acc="fp16"), replace(NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_what_the_rules_start_from_is_legal(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config, H200) is None


def test_scalar_loads_serve_every_extent_on_every_gpu() -> None:
    """Whatever the alignment, something is legal."""
    scalar = replace(M, vec=1)
    for problem in (Problem(1, 1, 1), Problem(127, 1001, 333), Problem(3, 5, 7, "NN", "bf16")):
        for gpu in (H200, A100, BLACKWELL):
            assert why_illegal(problem, scalar, gpu) is None


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        *(
            (Problem(*LARGE), c)
            for c in [
                Sm80MmaConfig(48, 32, 32, 2, wm=3, wn=1, wk=2, split_k=3, vec=1),
                Sm80MmaConfig(16, 16, 256, 1, wm=1, wn=1, wk=16),
                Sm80MmaConfig(64, 128, 64, 3, vec=2, pdl=True),
            ]
        ),
    ],
)
def test_shared_memory_and_threads_are_the_device_codes(problem: Problem, config: KernelConfig) -> None:
    assert_device_agrees(problem, config)


def test_an_even_launch_asks_for_so_much_memory_that_no_more_than_its_share_fits() -> None:
    """16x4096 in 16x16 tiles: 256 CTAs, two to an SM of 132; three would fit."""
    problem, even = Problem(16, 4096, 4096), replace(DEEP, even=True)
    assert geometry(problem, even) == geometry(problem, DEEP)
    own = geometry(problem, DEEP).smem_bytes
    assert launch_smem(problem, DEEP, 132) == own and SM_SMEM // (own + CTA_SMEM) == 3
    asked = launch_smem(problem, even, 132)
    assert asked == (SM_SMEM // 2 - CTA_SMEM) // 128 * 128 == 115712 and SM_SMEM // (asked + CTA_SMEM) == 2
    assert launch_smem(problem, even, 256) == SMEM_LIMIT, "more SMs, a smaller share"


def test_k_tiles_round_up() -> None:
    config = Sm80MmaConfig(64, 64, 128)
    assert [k_tiles(Problem(8, 8, k), config) for k in (1, 128, 129, 1024)] == [1, 1, 2, 8]


@pytest.mark.parametrize(
    "config",
    [
        Sm80MmaConfig(64, 64),
    ],
)
def test_every_family_has_some(config: KernelConfig) -> None:
    assert len(neighbours(Problem(8, 1024, 4096), config, H200)) >= 3


def test_pdl_saves_time_on_a_tiny_problem() -> None:
    config = Sm80MmaConfig(16, 16, wm=1, wn=1, wk=4)
    assert cost_model.predict_us(TINY, replace(config, pdl=True), H200) < cost_model.predict_us(TINY, config, H200)


def test_a_gpu_without_a_model_is_predicted_by_its_rates() -> None:
    config = Sm80MmaConfig(32, 32)
    same = cost_model.predict_us(TINY, config, replace(H200, name="abacus"))
    assert same == cost_model.predict_us(TINY, config, H200)
    with pytest.raises(DeviceError, match="no cost model for GPU 'abacus'"):
        cost_model.load("abacus")


def test_clusters_find_fewer_places_where_an_sm_lets_in_one_cta() -> None:
    """32 clusters of four: 30 are resident at one CTA per SM, and the last two wait; two CTAs to an SM take all."""
    split = Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4, pdl=True)

    def two_more(config: KernelConfig) -> float:
        times = [cost_model.predict_us(Problem(16, 32 * clusters, 4096), config, H200) for clusters in (30, 32)]
        return times[1] / times[0]

    assert two_more(split) < 1.05 and two_more(replace(split, even=True)) > 1.2
