"""The kernel family sm80_gemv_mma: legality, geometry, neighbours and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import config_columns
from outblas.kernels.cost.terms import ctas_on_busiest_sm
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig, gemv_blocks_per_sm
from outblas.kernels.geometry import geometry, grid
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas_lab.build.refine import neighbours
from support.family_tools import assert_device_agrees
from support.gpus.known import H200

D, DECODE = Problem(8, 4096, 4096), Problem(16, 4096, 4096)

DECODE_NN = replace(DECODE, layout="NN")

G = Sm80GemvConfig(16, 64, 1, 8, 2)

A100 = replace(H200, name="a100", arch=80, smem_optin=166912)


DECODE_SHAPES = [Problem(8, 4096, 8192), Problem(8, 4096, 8192, "NN", "bf16")]

DECODE_COST = Problem(1, 4096, 4096)


def legal(problem: Problem) -> list[KernelConfig]:
    found = [c for c in pool() if why_illegal(problem, c, H200) is None]
    return found + [replace(c, pdl=True) for c in found]


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (D, replace(G, bm=0), H200, "extents must be positive"),
        (D, replace(G, unroll=0), H200, "extents must be positive"),
        (D, G, replace(H200, arch=75), "needs sm_80, not sm_75"),
        (replace(D, acc="fp16"), G, H200, "sums are kept in fp32, not fp16"),
        (D, replace(G, bm=24), H200, "bm must be 8 or 16"),
        (replace(D, m=17), G, H200, "M = 17 exceeds the 16 tokens"),
        (DECODE, replace(G, bm=8), H200, "M = 16 exceeds the 8 tokens"),
        (replace(D, k=4100), G, H200, "rows are not multiples of vec = 8"),
        (replace(DECODE_NN, n=4100), G, H200, "rows are not multiples of vec = 8"),
        (D, replace(G, wn=3), H200, "wn does not divide bn"),
        (D, replace(G, bn=48), H200, "TN needs bn / wn of 16, 32, 64 or 128"),
        (DECODE_NN, replace(G, bn=32), H200, "NN needs bn / wn of 64 or 128"),
        (D, replace(G, wn=4, wk=8), H200, "at most 16 warps"),
        (D, replace(G, bn=16, unroll=9, ring="shared"), H200, "unroll must be 1 to 8"),
        (D, replace(G, prefetch=64), H200, "prefetch must be 128 or 256"),
        (D, replace(G, split_k=17), H200, "at most 16 CTAs"),
        (D, replace(G, split_k=2), A100, "cluster split-K needs sm_90"),
        (D, replace(G, pdl=True), A100, "programmatic dependent launch needs sm_90"),
        (D, replace(G, unroll=4), H200, "registers of operands and sums"),
        (D, replace(G, bn=32, wk=16, ring="shared", unroll=4), H200, "bytes of shared memory exceed"),
        (replace(D, k=64), replace(G, split_k=2), H200, "split_k 2 exceeds the 1 K tiles"),
        (D, replace(G, split_k=2, persistent=True), H200, "split_k is not persistent"),
        (D, replace(G, l2="stream_c"), H200, "stream_c is not for this family"),
        (D, replace(G, ring="shared", l2="stream_b"), H200, "stream_b needs the ring in registers"),
        (D, replace(G, kept_k=4096), H200, "kept_k needs persistent"),
        (D, replace(G, warm_k=4096), H200, "warm_k needs early"),
        (D, replace(G, pdl=True, early=True, warm_k=12), H200, "warm_k must be a multiple of 8"),
        (DECODE_NN, replace(G, pdl=True, early=True, warm_k=64), H200, "warm_k needs K-major weights"),
        (D, replace(G, persistent=True, kept_k=-1), H200, "kept_k must be 0 to"),
        (replace(D, k=4104), replace(G, persistent=True, kept_k=4096), H200, "K = 4104 exceeds the kept_k"),
        (replace(D, k=8192), replace(G, bm=16, persistent=True, kept_k=16384), H200, "bytes of shared memory exceed"),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: KernelConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize("config", [G, replace(G, split_k=8, pdl=True), replace(G, ring="shared")])
@pytest.mark.parametrize("problem", [D, DECODE, DECODE_NN, replace(DECODE_NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_the_gemv_family_serves_few_tokens(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config, H200) is None


def test_few_tokens_are_offered_gemv_kernels_of_their_size_and_many_tokens_none() -> None:
    for m, bm in ((1, 8), (8, 8), (9, 16), (16, 16)):
        for layout in ("TN", "NN"):
            offered = candidates(Problem(m, 4096, 4096, layout), H200)  # type: ignore[arg-type]
            found = [c for c in offered if isinstance(c, Sm80GemvConfig)]
            assert len(found) >= 16 and {c.bm for c in found} == {bm} and {c.pdl for c in found} == {False, True}
            assert len(set(offered)) == len(offered)
    assert not any(isinstance(c, Sm80GemvConfig) for c in candidates(Problem(17, 4096, 4096), H200))
    old = [c for c in candidates(Problem(4, 4096, 4096), A100) if isinstance(c, Sm80GemvConfig)]
    assert old and not any(c.pdl or c.split_k > 1 for c in old)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        *(
            (kind, c)
            for c in [
                Sm80GemvConfig(8, 64, 1, 5, 1),
                Sm80GemvConfig(16, 64, 1, 8, 2, split_k=4),
                Sm80GemvConfig(8, 128, 2, 3, 2, "shared", 3, pdl=True),
                Sm80GemvConfig(16, 128, 2, 4, 1, "shared", 16, 128),
                Sm80GemvConfig(8, 128, 2, 3, 2, persistent=True),
                Sm80GemvConfig(8, 64, 1, 5, 1, pdl=True, persistent=True, kept_k=8192),
                Sm80GemvConfig(16, 64, 1, 4, 3, "shared", persistent=True),
                Sm80GemvConfig(8, 64, 1, 3, 2, "shared", persistent=True, kept_k=8192),
            ]
            for kind in DECODE_SHAPES
        ),
    ],
)
def test_shared_memory_and_threads_are_the_device_codes(problem: Problem, config: KernelConfig) -> None:
    assert_device_agrees(problem, config)


def test_every_tile_has_its_ctas() -> None:
    """A grid covers all tiles of C: at least as many CTAs as tiles, none wasted but at the edges."""
    for config in pool():
        for m, n in ((64, 64), (1, 8), (1000, 3000), (16384, 16384), (130, 65)):
            problem = Problem(m, n - n % 8, 4096)
            x, y, z = grid(problem, config, 132)
            cluster = geometry(problem, config).cluster
            assert x % cluster == 0 and min(x, y, z) >= 1
            if getattr(config, "persistent", False):
                blocks = gemv_blocks_per_sm(problem, config) if isinstance(config, Sm80GemvConfig) else 1
                assert (y, z) == (1, 1) and x <= 132 * blocks
                continue
            if isinstance(config, Sm80GemvConfig):
                assert (x, y, z) == (cluster * -(-problem.n // config.bn), 1, 1)
                continue
            across = getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)
            tiles = [-(-e // (b * c)) for e, b, c in zip((m, problem.n), (config.bm, config.bn), across, strict=True)]
            parts = config.split_k // getattr(config, "cluster_split", config.split_k)  # one grid after the other
            assert z % parts == 0
            groups = x // cluster * y * z // parts
            assert groups >= tiles[0] * tiles[1]
            assert groups < tiles[0] * tiles[1] + x // cluster * y  # less than one band too many


def test_ctas_may_walk_keep_their_tokens_and_go_back() -> None:
    problem = Problem(8, 8192, 4096)
    still = Sm80GemvConfig(8, 16, 1, 8, 4)
    walking = replace(still, persistent=True)
    for config in (still, walking):
        found = neighbours(problem, config, H200)
        assert {replace(walking, kept_k=4096), replace(config, l2="stream_b")} <= set(found)
        assert not any(isinstance(c, Sm80GemvConfig) and c.kept_k == 2048 for c in found)
    assert still in neighbours(problem, walking, H200) and walking in neighbours(problem, still, H200)


@pytest.mark.parametrize(
    "config",
    [
        Sm80GemvConfig(8, 64, 1, 8, 2, split_k=2),
    ],
)
def test_every_family_has_some(config: KernelConfig) -> None:
    assert len(neighbours(Problem(8, 1024, 4096), config, H200)) >= 3


@pytest.mark.parametrize(
    "problem", [DECODE_COST, Problem(8, 8192, 28672), Problem(16, 128256, 4096), Problem(4, 14336, 4096)]
)
def test_few_tokens_are_the_gemv_familys(problem: Problem) -> None:
    """Predicted near the bandwidth of HBM, ahead of families that load whole tiles or near, none absurdly slow."""
    configs = [c for c in legal(problem) if not getattr(c, "a_rows", 0)]
    times = cost_model.predict_many(problem, configs, H200)
    own = [t for t, c in zip(times, configs, strict=True) if isinstance(c, Sm80GemvConfig)]
    assert len(own) > 100 and max(own) < 20 * min(own)
    assert min(own) < 1.15 * times.min()
    assert times.min() < 1.15 * problem.bytes / (H200.hbm_tbs * 1e6) + 3.0


def test_a_cta_with_little_in_flight_is_predicted_slower() -> None:
    base = Sm80GemvConfig(8, 16, 1, 4, 4, "shared")
    few, many = (cost_model.predict_us(Problem(1, 2048, 16384), replace(base, unroll=u), H200) for u in (1, 6))
    assert few > 1.3 * many


def test_under_pdl_ctas_stack_where_more_fit_on_an_sm_than_are_needed() -> None:
    few, x = Sm80GemvConfig(8, 32, 1, 8, 2), {"stacked": 0.5}
    c = config_columns([few, replace(few, pdl=True)], H200)
    assert (c["occupancy"] >= 2).all()
    fit = c["occupancy"][0]
    assert ctas_on_busiest_sm(x, c, np.array(100.0), c["occupancy"], H200).tolist() == [1.0, 1 + 0.5 * (fit - 1)]
    full = ctas_on_busiest_sm(x, c, np.array(132.0 * 9 * fit), c["occupancy"], H200)
    assert full.tolist() == [fit, fit]
