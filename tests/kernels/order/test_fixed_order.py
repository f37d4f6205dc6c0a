"""Orders of summation: which knobs have one, and that a kernel of a weight's order exists for every problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import KernelConfig, launch_of
from outblas.core.problem import Problem
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.fixed_order import (
    FixedOrderKernels,
    fastest,
    fixed_order_candidates,
    kernels_for_few_rows,
    summation,
    summation_of_weight,
)
from outblas.kernels.legality import why_illegal
from support.gpus.known import H200

A100 = replace(H200, name="a100", arch=80)
SHAPES = ((4096, 4096), (7, 8), (1, 1), (1000, 1001), (8, 3), (1, 65536))


@pytest.mark.parametrize(
    ("config", "order"),
    [
        (Sm90WgmmaConfig(64, 64), "wgmma"),
        (Sm90WgmmaConfig(128, 256, 128, 3, 2, "pingpong", persistent=True), "wgmma"),
        (Sm90WgmmaConfig(40, 64, swap=True), "wgmma"),
        (Sm90WgmmaConfig(64, 64, split_k=2, store="direct"), None),
        (Sm90WgmmaConfig(64, 64, split_k=2, store="direct", split_kind="workspace"), None),
        (Sm80MmaConfig(64, 64), "mma"),
        (Sm80MmaConfig(64, 64, 128, 2, 1, 4, vec=1), "mma"),
        (Sm80MmaConfig(64, 64, wk=2), None),
        (Sm80MmaConfig(64, 64, split_k=2), None),
        (Sm80GemvConfig(8, 16), None),
        (Sm80DirectConfig(16, 16), None),
    ],
)
def test_a_kernel_that_shares_k_has_no_order_of_others(config: KernelConfig, order: str | None) -> None:
    assert summation(config) == order


def test_a_weight_has_one_order_whatever_its_m() -> None:
    for n, k in SHAPES:
        orders = {summation_of_weight(Problem(m, n, k), H200) for m in (1, 7, 8, 4096)}
        assert orders == {"wgmma" if n % 8 == k % 8 == 0 else "mma"}
        assert summation_of_weight(Problem(1, n, k), A100) == "mma"


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_problem_has_a_kernel_of_its_order(gpu, layout, n: int, k: int) -> None:  # type: ignore[no-untyped-def]
    for m in (1, 9, 64, 8192):
        problem = Problem(m, n, k, layout, "bf16")
        found = fixed_order_candidates(problem, gpu)
        assert found and {summation(c) for c in found} == {summation_of_weight(problem, gpu)}
        assert all(
            why_illegal(problem, c, gpu) is None and launch_of(c) == "plain" for c in found[:: len(found) // 9 + 1]
        )


def test_listed_kernels_are_chosen_alone_if_enough_are_legal() -> None:
    problem = Problem(100, 512, 4096)
    listed = [Sm90WgmmaConfig(64, bn, stages=stages) for bn in (32, 64, 128) for stages in (3, 4, 5)]
    others = [Sm90WgmmaConfig(64, 64, split_k=4, store="direct"), Sm80GemvConfig(8, 16), Sm80MmaConfig(64, 64)]
    dependent = [config.with_knobs(pdl=True) for config in listed]
    kernels = FixedOrderKernels((*others, *listed, *dependent))
    assert kernels.choose(problem, H200, "plain") in listed
    assert kernels.choose(problem, H200, "pdl") in (*listed, *dependent)
    assert FixedOrderKernels(others).choose(problem, H200, "plain") in fixed_order_candidates(problem, H200)


MANY = [Sm90WgmmaConfig(64, bn, stages=stages) for bn in (32, 64, 128) for stages in (3, 4, 5)]


@pytest.mark.parametrize("m", [1, 8, 13, 37, 56, 63])
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_a_small_m_gets_a_packaged_kernel_that_loads_no_row_past_it(m: int, layout: str) -> None:
    problem = Problem(m, 4096, 8192, layout, "bf16")  # type: ignore[arg-type]
    chosen = FixedOrderKernels(MANY).choose(problem, H200, "plain")
    assert isinstance(chosen, Sm90WgmmaConfig) and chosen.fits_m and 0 <= chosen.a_rows - m < 8
    assert chosen in {config for p, config in kernels_for_few_rows() if (p.layout, p.dtype) == (layout, "bf16")}


def test_other_problems_get_no_kernel_beyond_the_listed_ones() -> None:
    """A kernel that no pack holds is compiled at the first call."""
    for m in (64, 100):
        assert FixedOrderKernels(MANY).choose(Problem(m, 4096, 8192), H200, "plain") in MANY
    listed = [Sm80MmaConfig(bm, bn, vec=1) for bm in (32, 64, 128) for bn in (32, 64, 128)]
    assert FixedOrderKernels(listed).choose(Problem(13, 1001, 333), H200, "plain") in listed
    assert FixedOrderKernels(listed).choose(Problem(13, 4096, 4096), A100, "plain") in listed


def test_families_offer_only_kernels_of_an_order() -> None:
    for m in (1, 20, 500):
        for family in FAMILIES.values():
            assert all(summation(c) is not None for c in family.fixed_order_candidates(Problem(m, 64, 64)))


def test_rows_that_begin_within_a_sector_get_kernels_that_load_less() -> None:
    """TMA loads such rows more slowly, so a cluster that shares its loads wins (journal 0098)."""
    listed = [
        Sm90WgmmaConfig(bm, bn, stages=4, consumers=2, cluster_m=cluster)
        for bm in (64, 128, 256)
        for bn in (64, 128)
        for cluster in (1, 2)
    ]
    split, whole = Problem(4096, 7976, 4584), Problem(4096, 7984, 4608)
    assert fastest(split, listed, H200) == Sm90WgmmaConfig(256, 128, stages=4, consumers=2, cluster_m=2)
    assert fastest(whole, listed, H200) == listed[rank(whole, listed, H200)[0]]
    rows_of_b = Problem(4096, 7976, 4608, "NN")
    for problem in (split, rows_of_b):
        alone, shared = (FAMILIES["sm90_wgmma_gemm"].split_sector_us(problem, c, H200) for c in listed[-2:])
        assert shared < alone


def test_loads_of_split_sectors_are_counted_by_operand() -> None:
    """Every column of tiles loads A once, every row of tiles B once; a cluster shares one of them."""
    family, tile = FAMILIES["sm90_wgmma_gemm"], Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
    time = lambda problem, config: family.split_sector_us(problem, config, H200)  # noqa: E731
    split = Problem(256, 256, 8 * 101)
    rate = 22.0 * H200.sms * H200.clock_mhz
    assert time(split, tile) == pytest.approx(4 * 256 * 808 * 2 / rate)
    assert time(split, replace(tile, cluster_m=2)) == pytest.approx(3 * 256 * 808 * 2 / rate)
    assert time(split, replace(tile, cluster_m=4)) == time(split, replace(tile, cluster_m=2)), "two tiles to share"
    assert time(replace(split, k=800), tile) == pytest.approx(4 * 256 * 800 * 2 / (H200.l2_tbs * 1e6))
    assert FAMILIES["sm80_mma_gemm"].split_sector_us(split, Sm80MmaConfig(64, 64), H200) == 0
