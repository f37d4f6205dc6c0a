"""Kernels of ``sm90_wgmma_gemm`` that compute the transpose of C, and those whose parts of K all sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import FAMILY
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_kernels import exact_rows_candidates, paired_candidates
from outblas.kernels.legality import why_illegal
from outblas.kernels.proof_shapes import proof_shapes
from outblas.kernels.source import make_source
from support.gpus.known import H200

P = Problem(100, 512, 512)
#: Tiles of 24 rows of C, which no kernel of C itself can have: wgmma has 64 rows.
SWAPPED = Sm90WgmmaConfig(24, 128, 64, 4, swap=True)


def test_a_transposed_kernel_has_its_rows_along_n() -> None:
    problem, config = FAMILY.as_computed(P, SWAPPED)
    assert (problem.m, problem.n, problem.k) == (512, 100, 512)
    assert (config.bm, config.bn, config.raster, config.swap) == (128, 24, "n", False)
    assert FAMILY.as_computed(P, replace(SWAPPED, swap=False)) == (P, replace(SWAPPED, swap=False))


def test_its_geometry_is_of_the_transpose_and_its_boxes_of_the_operands() -> None:
    constants = dict(FAMILY.geometry(P, SWAPPED).constants)
    assert (constants["BM"], constants["BN"], constants["SWAP"]) == ("128", "24", "true")
    assert FAMILY.grid(P, SWAPPED, H200.sms) == (5, 4, 1)  # 100 rows in tiles of 24, 512 columns in tiles of 128
    box_a, box_b, box_c = FAMILY.tensor_boxes(P, SWAPPED)
    assert (box_a, box_b) == ((100, 512, 24, 64), (512, 512, 128, 64))
    assert box_c[:2] == (100, 512)


def test_its_source_holds_the_instruction_of_the_rows_of_c() -> None:
    headers = dict(make_source(P, SWAPPED).headers)
    assert "n24k16" in headers["generated/wgmma_instance.cuh"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"store": "direct"}, "TMA"),
        ({"bn": 96}, "bn 64"),
        ({"a_rows": 8}, "all rows"),
    ],
)
def test_what_a_transposed_kernel_cannot_do_is_refused(change: dict[str, object], word: str) -> None:
    assert why_illegal(P, SWAPPED, H200) is None
    assert word in str(why_illegal(P, replace(SWAPPED, **change), H200))


def test_b_must_be_stored_n_by_k() -> None:
    assert "TN" in str(why_illegal(replace(P, layout="NN"), SWAPPED, H200))


def test_it_is_proved_on_ragged_shapes_and_less_than_a_tile() -> None:
    shapes = {(p.m, p.n) for p in proof_shapes(P, SWAPPED, H200)}
    assert (25, 136) in shapes and (1, 8) in shapes


def test_only_a_workspace_has_parts_that_all_sum() -> None:
    parts = Sm90WgmmaConfig(64, 64, 64, 4, split_k=4, store="direct", split_kind="workspace", reducers="all")
    long = Problem(64, 512, 8192)
    assert why_illegal(long, parts, H200) is None
    assert "REDUCE_ALL 1" in make_source(long, parts).text
    assert "REDUCE_ALL 0" in make_source(long, replace(parts, reducers="last")).text
    assert why_illegal(long, replace(parts, split_kind="cluster"), H200) is not None


def test_fewer_ctas_belong_to_persistent_kernels() -> None:
    tiles = Sm90WgmmaConfig(128, 128, 64, 4, 2, persistent=True, ctas=100)
    large = Problem(4096, 4096, 512)
    assert why_illegal(large, tiles, H200) is None and FAMILY.grid(large, tiles, H200.sms) == (100, 1, 1)
    assert why_illegal(large, replace(tiles, persistent=False), H200) is not None


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_tiles_of_which_two_share_an_sm_fill_the_sms_once(layout: str) -> None:
    sizes = set()
    for m, n in ((128, 16384), (256, 12288), (12288, 256), (512, 8192), (4096, 4096)):
        problem = Problem(m, n, 512, layout)  # type: ignore[arg-type]
        for config in paired_candidates(problem, H200):
            assert why_illegal(problem, config, H200) is None
            ctas = -(-m // config.bm) * -(-n // config.bn)
            assert H200.sms < ctas <= 2 * H200.sms and config.min_blocks == 2
            assert layout == "TN" or not config.swap
            sizes.add((config.bm, config.bn, config.pdl))
    assert {(128, 96, False), (128, 128, True), (64, 128, False)} <= sizes
    assert paired_candidates(Problem(4096, 4096, 512), H200) == [], "too many tiles"


@pytest.mark.parametrize(
    ("m", "rows"), [(104, {104, 56, 112, 64, 128}), (65, {72, 40, 80, 48, 96, 64}), (512, {256, 176, 192})]
)
def test_tiles_share_the_rows_of_m_evenly(m: int, rows: set[int]) -> None:
    found = exact_rows_candidates(Problem(m, 28672, 4096), H200)
    assert found and {c.bm for c in found} <= rows
    assert {c.cluster_n for c in found} >= {1, 2} and all(c.swap and not c.pdl for c in found)
    # No tile lies wholly past the rows, and no cluster along M is partly empty.
    assert all(-(-m // c.bm) * c.bm - m < c.bm and -(-m // c.bm) % c.cluster_m == 0 for c in found)


@pytest.mark.parametrize(
    "problem", [Problem(64, 28672, 4096), Problem(513, 28672, 4096), Problem(104, 28672, 4096, "NN")]
)
def test_exact_rows_are_for_a_few_hundred_rows_in_tn(problem: Problem) -> None:
    assert exact_rows_candidates(problem, H200) == []
