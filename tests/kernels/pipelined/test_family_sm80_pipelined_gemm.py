"""The kernel family sm80_pipelined_gemm: legality, geometry, its pools, candidates and cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import candidates, catalogue, catalogue_of, pool_name
from outblas.kernels.cost import cost_model
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig
from outblas.kernels.geometry import geometry, grid, workspace_bytes
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.kernels.legality import breaks_extent_rule, never_legal, why_illegal
from outblas.kernels.pool import mma_pool, pool
from outblas_lab.build.refine import neighbours
from outblas_lab.pool.knobs import all_knobs
from support.family_tools import device_constants
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H100, H200

C = Sm80PipelinedConfig(128, 128)
LARGEST = Sm80PipelinedConfig(256, 128, 64, 3, 4, 2)
P = Problem(4096, 4096, 4096)
NN = replace(P, layout="NN")
A100, L40S = DEVICES["A100"].gpu, DEVICES["L40S"].gpu
#: GPUs without wgmma, on which the family is tried.
GPUS = {name: device.gpu for name, device in DEVICES.items() if device.gpu.wgmma_tflops == 0}
NAME = Sm80PipelinedConfig.family


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (P, replace(C, bm=0), A100, "extents must be positive"),
        (P, replace(C, group=0), A100, "extents must be positive"),
        (P, C, replace(A100, arch=75), "needs sm_80, not sm_75"),
        (P, replace(C, wm=3), A100, "wm does not divide bm / 16"),
        (P, replace(C, bn=136), A100, "wn does not divide bn / 16"),
        (P, replace(C, bm=512, wm=8), A100, "at most 256"),
        (P, replace(C, bn=160, wm=4, wn=5), A100, "at most 16 warps"),
        (P, replace(C, bk=128), A100, "bk must be 16, 32 or 64"),
        (P, replace(C, stages=1), A100, "stages must be 2 to 6"),
        (P, replace(C, stages=7), A100, "stages must be 2 to 6"),
        (P, replace(C, vec=3), A100, "vec must be 1, 2, 4 or 8"),
        (P, replace(C, split_k=33), A100, "K has at most 32 parts"),
        (P, replace(C, split_k=2, persistent=True), A100, "not persistent"),
        (P, replace(C, bm=32, bn=32, min_blocks=5), A100, "min_blocks must be 1 to 4"),
        (P, replace(C, pdl=True), A100, "programmatic dependent launch needs sm_90"),
        (P, replace(C, vec=1, pdl=True, early=True), H200, "early needs vec above 1"),
        (P, replace(C, bm=256), A100, "the budget is 255 for 128 threads"),
        (P, replace(C, wn=4, min_blocks=2), A100, "the budget is 128 for 256 threads"),
        (P, LARGEST, L40S, "147456 bytes of shared memory exceed 101376"),
        (P, replace(C, stages=6, min_blocks=2), A100, "shared memory exceed"),
        (replace(P, k=4100), C, A100, "rows are not multiples of vec = 8"),
        (replace(NN, n=4098), replace(C, vec=4), A100, "rows are not multiples of vec = 4"),
        (Problem(512, 512, 64), replace(C, split_k=3), A100, "split_k 3 exceeds the 2 K tiles"),
        (P, replace(C, split_k=2), A100, "exceeds 64 MiB"),
        (Problem(1, 16 * 16385, 64), Sm80PipelinedConfig(16, 16, 32, 2, 1, 1, 2), A100, "the counters of a workspace"),
        (Problem(2**15, 2**15, 64), Sm80PipelinedConfig(16, 16, 32, 2, 1, 1, persistent=True), A100, "4 million tiles"),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: Sm80PipelinedConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize("gpu", [A100, H200, DEVICES["RTX 5090"].gpu], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("problem", [P, NN, replace(P, acc="fp16"), replace(NN, dtype="bf16"), Problem(1, 8, 4096)])
@pytest.mark.parametrize("config", [C, replace(C, persistent=True), replace(C, vec=1), replace(C, bn=96)])
def test_what_the_rules_start_from_is_legal(problem: Problem, config: Sm80PipelinedConfig, gpu: Gpu) -> None:
    assert why_illegal(problem, config, gpu) is None


def test_scalar_loads_serve_every_extent() -> None:
    for problem in (Problem(1, 1, 1), Problem(127, 1001, 333), Problem(3, 5, 7, "NN", "bf16")):
        assert why_illegal(problem, replace(C, vec=1), A100) is None


@pytest.mark.parametrize("problem", [P, Problem(300, 500, 700), Problem(2**20, 2**10, 64), Problem(1, 300_000, 4096)])
def test_rules_about_extents_are_the_same_for_many_configs_at_once(problem: Problem) -> None:
    members = list(dict.fromkeys(FAMILIES[NAME].pool()))
    assert not any(never_legal(problem, c, H200) for c in members)
    columns = type("Columns", (), {k: np.array([getattr(c, k) for c in members]) for k in (*C.knobs(), "even")})
    broken, unsure = breaks_extent_rule(problem, NAME, columns, H200)
    each = np.array([why_illegal(problem, c, H200) is not None for c in members])
    np.testing.assert_array_equal(each[~unsure], broken[~unsure])


@pytest.mark.parametrize(
    "config",
    [
        replace(C, persistent=True),
        replace(C, split_k=3),
        Sm80PipelinedConfig(64, 256, 16, 2, 4, 4),
        Sm80PipelinedConfig(48, 96, 64, 6, 3, 2, vec=2, pdl=True),
    ],
)
def test_shared_memory_and_threads_are_the_device_codes(config: Sm80PipelinedConfig) -> None:
    pytest.importorskip("cuda.bindings")
    problem = Problem(512, 512, 8192)
    assert why_illegal(problem, config, H200) is None
    shape = geometry(problem, config)
    assert device_constants(problem, config) == (shape.smem_bytes, shape.threads)


def test_the_largest_tile_with_three_stages_fits_an_a100() -> None:
    assert why_illegal(P, LARGEST, A100) is None
    assert geometry(P, LARGEST).smem_bytes == 3 * 64 * (256 + 128) * 2 <= A100.smem_optin


def test_each_part_of_k_is_a_cta_of_each_tile() -> None:
    problem, config = Problem(1000, 1024, 8192), replace(C, split_k=3)
    assert grid(problem, config, 108) == (8, 8, 3)
    assert workspace_bytes(problem, config) == COUNTERS_BYTES + 64 * 3 * 128 * 128 * 4
    assert workspace_bytes(problem, C) == 0


def test_a_walk_has_as_many_ctas_as_are_resident() -> None:
    walk = Sm80PipelinedConfig(64, 64, 32, 4, persistent=True, min_blocks=2)
    assert grid(P, walk, 108) == (216, 1, 1)
    assert grid(Problem(64, 640, 64), walk, 108) == (10, 1, 1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_gpus_without_wgmma_have_hundreds_of_its_kernels(gpu: Gpu) -> None:
    mine = [c for c in catalogue("mma-pool") if isinstance(c, Sm80PipelinedConfig) and not c.pdl]
    legal = [c for c in mine if why_illegal(Problem(512, 512, 8192), c, gpu) is None]
    assert pool_name(gpu) == "mma-pool" and len(mine) >= 250 and len(legal) >= 200
    offered = [c for c in candidates(P, gpu) if c.family == NAME]
    assert len(offered) >= 100 and any(c.persistent for c in offered)
    assert any(c.pdl for c in offered) == (gpu.arch >= 90)
    large = (256, 128, 16) if gpu.smem_optin > 110_000 else (256, 128, 32)
    assert max((c.bm * c.bn) for c in offered) == large[0] * large[1]


def test_k_is_split_only_for_few_tiles() -> None:
    few, many = (candidates(p, A100) for p in (Problem(256, 256, 16384), Problem(8192, 8192, 16384)))
    assert max(c.split_k for c in few) == 16
    assert {c.split_k for c in many if c.family == NAME} == {1}


def test_rows_of_any_alignment_have_candidates() -> None:
    for problem, vec in ((Problem(2000, 2000, 777), 1), (Problem(2000, 2000, 774), 2), (Problem(64, 900, 508), 4)):
        found = [c for c in candidates(problem, A100) if isinstance(c, Sm80PipelinedConfig)]
        assert len(found) >= 100 and {c.vec for c in found} == {vec}


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_hopper_is_offered_none_of_it(gpu: Gpu) -> None:
    problems = (P, Problem(512, 512, 8192), Problem(8, 4096, 4096), Problem(127, 1001, 333, "NN"))
    found = Counter(c.family for p in problems for c in (*candidates(p, gpu, True, True), *catalogue_of(gpu), *pool()))
    assert found and NAME not in found and pool_name(gpu) == "pool"


def test_the_pool_for_gpus_without_wgmma_adds_to_the_other_families() -> None:
    others = [c for c in mma_pool() if c.family != NAME]
    assert others == [c for c in pool() if FAMILIES[c.family].instructions == "mma"]
    for config in mma_pool():
        assert all(getattr(config, k.name) in k.values for k in all_knobs() if config.family in k.families)


@pytest.mark.parametrize("config", [C, replace(C, persistent=True), replace(C, split_k=2), LARGEST])
def test_neighbours_change_ring_tile_and_ctas(config: Sm80PipelinedConfig) -> None:
    problem = Problem(1024, 1024, 4096)
    found = neighbours(problem, config, A100)
    assert len(found) >= 8 and all(isinstance(c, Sm80PipelinedConfig) for c in found)
    for knobs in (("stages", "bk"), ("bm", "bn", "wm", "wn"), ("persistent", "split_k", "group", "min_blocks")):
        assert any(getattr(c, knob) != getattr(config, knob) for c in found for knob in knobs)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_large_products_are_predicted_fastest_with_it(gpu: Gpu) -> None:
    for problem in (Problem(8192, 8192, 8192), Problem(8192, 8192, 8192, "NN", "bf16")):
        found = candidates(problem, gpu)
        best = found[cost_model.rank(problem, found, gpu)[0]]
        assert isinstance(best, Sm80PipelinedConfig) and min(best.bm, best.bn) >= 96 and best.split_k == 1
        own = cost_model.predict_many(problem, [best, replace(best, bm=64, bn=64, wm=2, wn=2)], gpu)
        assert own[0] < own[1]


def test_a_long_k_of_few_tiles_is_predicted_faster_in_parts() -> None:
    problem = Problem(512, 512, 16384)
    whole, parts = Sm80PipelinedConfig(64, 64, 64, 3), Sm80PipelinedConfig(64, 64, 64, 3, split_k=3)
    times = cost_model.predict_many(problem, [whole, parts], A100)
    assert times[1] < times[0]


def test_narrow_loads_and_shallow_rings_cost_time() -> None:
    base, *worse = (C, replace(C, vec=2), replace(C, vec=1))
    times = cost_model.predict_many(P, [base, *worse], A100)
    assert list(times) == sorted(times) and times[0] < times[2]
