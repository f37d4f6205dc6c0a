"""The kernel family sm90_oddrows_gemm: legality, its maps, its place outside the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.geometry import geometry, grid, workspace_bytes
from outblas.kernels.geometry_terms import COMBS
from outblas.kernels.legality import breaks_extent_rule, why_illegal
from outblas.kernels.pool import mma_pool, pool, unaligned_pool
from outblas.runtime.tensor_map import combs_of
from outblas_lab.pool.knobs import all_knobs
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H200

C = Sm90OddrowsConfig(128, 128, consumers=2)
FEW = Sm90OddrowsConfig(64, 64, a_rows=16)
P = Problem(1001, 2003, 3005)
NN = replace(P, layout="NN")
NAME = Sm90OddrowsConfig.family


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (P, replace(C, bn=0), H200, "extents must be positive"),
        (P, C, DEVICES["B200"].gpu, "wgmma needs sm_90, not sm_100"),
        (replace(P, acc="fp16"), C, H200, "sums are in fp32"),
        (P, replace(C, bm=192), H200, "bm must be 64, 128 or 256"),
        (P, replace(C, bn=96), H200, "bn must be 64, 128, 192 or 256"),
        (P, replace(C, bk=32), H200, "bk must be 64 or 128"),
        (P, replace(C, stages=13), H200, "stages must be 2 to 12"),
        (P, replace(C, consumers=3), H200, "consumers must be 1 or 2"),
        (P, replace(C, bm=64), H200, "consumers do not divide"),
        (P, replace(C, split_k=33), H200, "at most 32 parts"),
        (P, replace(C, a_rows=16), H200, "a_rows must be 0, or 8 to 56 with bm 64"),
        (P, replace(FEW, a_rows=12), H200, "a_rows must be 0, or 8 to 56 with bm 64"),
        (P, replace(FEW, min_blocks=5, stages=2), H200, "min_blocks must be 1 to 4"),
        (P, replace(C, min_blocks=2), H200, "min_blocks above 1 needs one consumer"),
        (P, replace(C, bm=256, bn=256), H200, "the budget is 224"),
        (NN, replace(C, bm=256, bn=192), H200, "the budget is 224"),
        (NN, Sm90OddrowsConfig(64, 192, stages=2, min_blocks=2), H200, "the budget is 168"),
        (P, Sm90OddrowsConfig(64, 64, stages=2, min_blocks=4), H200, "the budget is 96"),
        (P, replace(C, bn=256, stages=5), H200, "bytes of shared memory exceed"),
        (replace(P, m=7), C, H200, "M, N and K must be 8 or more"),
        (replace(P, n=5), C, H200, "M, N and K must be 8 or more"),
        (replace(NN, k=7), C, H200, "M, N and K must be 8 or more"),
        (P, FEW, H200, "M = 1001 exceeds the 16 rows"),
        (Problem(8, 64 * 16385, 512), Sm90OddrowsConfig(64, 64, split_k=2), H200, "the counters of a workspace"),
        (replace(P, m=8001, n=8001), replace(C, split_k=2), H200, "exceeds 64 MiB"),
        (Problem(99, 99, 99), replace(C, split_k=3), H200, "split_k 3 exceeds the 2 K tiles"),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: Sm90OddrowsConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found


def test_rules_about_extents_serve_many_configs_at_once() -> None:
    configs = [replace(C, split_k=s) for s in (1, 2, 64)] + [FEW]
    columns = type("Columns", (), {})()
    for knob in (*C.knobs(), "even"):
        setattr(columns, knob, np.array([getattr(c, knob) for c in configs]))
    broken, unsure = breaks_extent_rule(Problem(99, 99, 199), NAME, columns, H200)
    assert broken.tolist() == [False, False, True, True] and not unsure.any()
    assert breaks_extent_rule(Problem(99, 99, 7), NAME, columns, H200)[0].all()


def test_it_is_in_no_pool_but_its_own() -> None:
    assert {c.family for c in unaligned_pool()} == {NAME}
    assert all(c.family != NAME for c in (*pool(), *mma_pool()))
    knobs = [knob for knob in all_knobs() if NAME in knob.families]
    assert all(getattr(c, knob.name) in knob.values for c in unaligned_pool() for knob in knobs)


@pytest.mark.parametrize(("problem", "rows"), [(P, 0), (NN, 0), (replace(P, m=13), 16), (replace(NN, m=49), 0)])
def test_searches_offer_it_for_rows_that_are_not_aligned(problem: Problem, rows: int) -> None:
    found: list[Any] = [c for c in candidates(problem, H200) if c.family == NAME]
    assert len(found) > 15 and {c.a_rows for c in found} == {rows} and {c.pdl for c in found} == {False, True}
    aligned = replace(problem, m=1024, n=2048, k=4096)
    assert all(c.family != NAME for c in candidates(aligned, H200))
    assert all(c.family != NAME for c in candidates(problem, DEVICES["A100"].gpu))


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_its_boxes_have_the_rows_of_one_comb(layout: Any) -> None:
    problem = replace(P, layout=layout)
    a, b = FAMILIES[NAME].tensor_boxes(problem, C)
    assert a == (1001, 3005, 16, 64)
    assert b == ((2003, 3005, 16, 64) if layout == "TN" else (3005, 2003, 8, 64))
    assert FAMILIES[NAME].tensor_boxes(problem, FEW)[0][2] == 2


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (10, 9), (23, 30), (64, 61), (9, 4)])
def test_combs_are_the_rows_of_the_matrix_at_aligned_addresses(rows: int, cols: int) -> None:
    flat = np.arange(rows * cols + 64)
    matrix, seen = flat[: rows * cols].reshape(rows, cols), set()
    combs = combs_of(rows, cols)
    assert len(combs) == COMBS
    for s, comb in enumerate(combs):
        assert comb.offset % 16 == 0 and comb.pitch * 2 % 16 == 0 and 0 <= comb.cols - cols < 8
        for j in range(comb.rows):
            begin = comb.offset // 2 + j * comb.pitch
            row = flat[begin : begin + comb.cols][comb.cols - cols :]
            np.testing.assert_array_equal(row, matrix[COMBS * j + s])
            seen.add(COMBS * j + s)
    assert seen == set(range(rows))


def test_grid_and_workspace() -> None:
    split = replace(C, split_k=3)
    assert grid(P, C, 132) == (8, 16, 1) and grid(P, split, 132) == (8, 16, 3)
    assert workspace_bytes(P, C) == 0
    assert workspace_bytes(P, split) == 65536 + 8 * 16 * 3 * 128 * 128 * 4
    assert geometry(P, C).threads == 384 and geometry(P, FEW).threads == 160
