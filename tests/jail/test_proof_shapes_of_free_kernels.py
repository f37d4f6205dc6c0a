"""The problems of a free kernel's full proof, by their extents."""

from __future__ import annotations

from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_worker import MAX_FLOPS, free_proof_shapes
from support.free_fixture import device_text
from support.gpus.known import H200


def shapes(problem, *requires):
    launch = FreeKernel.parse(device_text(requires=list(requires))).launch
    return [(p.m, p.n, p.k) for p in free_proof_shapes(problem, launch, H200)]


def test_the_first_fourteen_are_the_problem_its_neighbours_and_known_ones():
    assert shapes(Problem(70, 72, 80)) == [
        (70, 72, 80), (69, 72, 80), (70, 73, 80), (70, 72, 81), (62, 72, 80), (70, 80, 80), (70, 72, 88), (6, 72, 80),
        (70, 136, 80), (70, 72, 144), (256, 256, 256), (1, 8, 8), (129, 136, 264), (127, 1001, 333),
    ]  # fmt: skip


def test_problems_that_cannot_be_are_left_out_and_the_rest_comes():
    found = shapes(Problem(1, 8, 8))
    assert found == [
        (1, 8, 8), (1, 9, 8), (1, 8, 9), (1, 16, 8), (1, 8, 16), (1, 72, 8), (1, 8, 72), (256, 256, 256),
        (129, 136, 264), (127, 1001, 333), (16, 64, 4104), (33, 520, 72), (300, 257, 129), (512, 384, 1024),
    ]  # fmt: skip


def test_a_kernel_that_allows_whole_tiles_gets_several_numbers_of_them():
    whole = ("M % 128 == 0", "N % 128 == 0", "K % 64 == 0")
    assert shapes(Problem(4096, 4096, 4096), *whole) == [
        (1024, 1024, 1024), (256, 256, 256), (512, 384, 1024), (128, 128, 64), (128, 256, 128), (384, 128, 192),
        (384, 256, 384), (512, 512, 512), (128, 128, 128),
    ]  # fmt: skip


def test_a_kernel_for_a_multiple_gets_the_multiples_of_each_extent():
    found = shapes(Problem(96, 40, 48), "M % 96 == 0", "N % 40 == 0", "K % 48 == 0")
    assert found == [(96, 40, 48), (192, 40, 48), (96, 80, 48), (96, 40, 96)]
    assert shapes(Problem(97, 40, 48), "M == 98") == [(98, 48, 56)]
    assert shapes(Problem(97, 40, 48), "M == 161") == [(161, 104, 112)]


def test_ever_smaller_ones_come_at_last():
    assert shapes(Problem(34, 16, 18), "M <= 17", "N == 16", "K <= 9") == [(17, 16, 9), (8, 16, 9)]
    assert shapes(Problem(17, 9, 9), "M < 16", "N == 9") == [(9, 9, 9), (8, 9, 9)]
    assert shapes(Problem(16, 9, 9), "M == 8", "N == 9") == [(8, 9, 9)], "its neighbour, and none smaller"


def test_the_sister_has_its_largest_extents_halved_until_it_is_cheap():
    assert MAX_FLOPS == 2 * 1024**3
    assert shapes(Problem(1024, 1024, 1024), "M == 1024")[0] == (1024, 1024, 1024)
    assert shapes(Problem(1024, 1024, 1032))[0] == (1024, 1024, 516)
    assert shapes(Problem(8192, 2048, 64))[0] == (8192, 2048, 64)
    assert shapes(Problem(8192, 8192, 128))[0] == (2048, 4096, 128)
    assert shapes(Problem(8192, 8192, 64), "M == 8192 and N == 8192") == []
