"""The launch's figures and the device code's constants are computed twice; here they are held together."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache

import pytest

from outblas.config import KernelConfig, Sm80DirectConfig, Sm80GemvConfig, Sm80MmaConfig, Sm90WgmmaConfig
from outblas.geometry import (
    CTA_SMEM,
    MAX_GRID_YZ,
    SM_SMEM,
    SMEM_LIMIT,
    direct_registers,
    divisor_up_to,
    gemv_blocks,
    geometry,
    grid,
    k_tiles,
    launch_smem,
    may_stack,
    workspace_bytes,
)
from outblas.problem import Problem
from outblas.source import make_source
from outblas.space import pool, why_illegal

KINDS = [
    ("TN", "fp16", "fp32"),
    ("NN", "bf16", "fp32"),
    ("TN", "fp16", "fp16"),
    ("NN", "fp16", "fp16"),
    ("TN", "bf16", "fp32"),
]
#: An incomplete type whose arguments the compiler's message spells out, before any code is generated.
PROBE = "\ntemplate <int, int, int> struct Probe;\nProbe<SMEM_BYTES, THREADS, {split}> probe;\n"
LARGE = (4096, 4096, 8192)


def device_constants(problem: Problem, config: KernelConfig) -> tuple[int, int]:
    """(SMEM_BYTES, THREADS) as the device code has them."""
    from outblas.compile import compile_source
    from outblas.errors import CompileError

    source = make_source(problem, config)
    probe = PROBE.format(split="SPLIT" if "SPLIT" in dict(geometry(problem, config).constants) else 1)
    with pytest.raises(CompileError) as caught:
        compile_source(replace(source, text=source.text + probe), cache=None)
    found = re.search(r"Probe<(\d+), (\d+), (\d+)>", caught.value.log)
    assert found and int(found[3]) == config.split_k, caught.value.log
    return int(found[1]), int(found[2])


def sample(count: int) -> list[tuple[Problem, KernelConfig]]:
    """Legal (problem, config) pairs over all kinds, the same in every run."""
    rng = random.Random(20)
    pairs = []
    for i in range(count):
        problem = Problem(*LARGE, *KINDS[i % len(KINDS)])  # type: ignore[arg-type]
        if i % 4 == 3:  # few tokens: the gemv family is legal too
            problem = replace(problem, m=8, acc="fp32")
        pairs.append((problem, rng.choice(legal(problem))))
    return pairs


@cache
def legal(problem: Problem) -> list[KernelConfig]:
    return [c for c in pool() if why_illegal(problem, c) is None]


UNUSUAL = [
    Sm90WgmmaConfig(64, 48, stages=5, store="direct"),
    Sm90WgmmaConfig(192, 96, stages=3, consumers=3),
    Sm90WgmmaConfig(64, 80, stages=3, split_k=3, store="direct"),
    Sm90WgmmaConfig(128, 96, stages=3, consumers=2, split_k=5, store="direct"),
    Sm90WgmmaConfig(64, 64, stages=2, min_blocks=3),
    Sm90WgmmaConfig(64, 80, stages=3, split_k=7, store="direct", split_kind="workspace"),
    Sm90WgmmaConfig(128, 96, stages=3, consumers=2, cluster_n=2, split_k=32, store="direct", split_kind="workspace"),
    Sm90WgmmaConfig(128, 112, stages=3, consumers=2, schedule="pingpong", persistent=True),
    Sm90WgmmaConfig(256, 80, stages=3, consumers=2, schedule="stagger"),
    Sm80MmaConfig(48, 32, 32, 2, wm=3, wn=1, wk=2, split_k=3, vec=1),
    Sm80MmaConfig(16, 16, 256, 1, wm=1, wn=1, wk=16),
    Sm80MmaConfig(64, 128, 64, 3, vec=2, pdl=True),
    Sm80DirectConfig(64, 32, 1, 1, 1, 1),
    Sm80DirectConfig(96, 24, 3, 3, 1, 2, pdl=True),
    Sm80DirectConfig(16, 8, 1, 1, 3, 8),
    Sm80DirectConfig(32, 32, 1, 2, 5, 2),
]
FEW = [
    Sm90WgmmaConfig(64, 16, 128, stages=3, store="direct", a_rows=8),
    Sm90WgmmaConfig(64, 96, stages=5, split_k=2, store="direct", a_rows=40),
    Sm80GemvConfig(8, 64, 1, 5, 1),
    Sm80GemvConfig(16, 64, 1, 8, 2, split_k=4),
    Sm80GemvConfig(8, 128, 2, 3, 2, "shared", 3, pdl=True),
    Sm80GemvConfig(16, 128, 2, 4, 1, "shared", 16, 128),
    Sm80GemvConfig(8, 128, 2, 3, 2, persistent=True),
    Sm80GemvConfig(8, 64, 1, 5, 1, pdl=True, persistent=True, kept_k=8192),
    Sm80GemvConfig(16, 64, 1, 4, 3, "shared", persistent=True),
    Sm80GemvConfig(8, 64, 1, 3, 2, "shared", persistent=True, kept_k=8192),
]
DECODE = [Problem(8, 4096, 8192), Problem(8, 4096, 8192, "NN", "bf16")]


@pytest.mark.parametrize(
    ("problem", "config"),
    [*sample(120), *((Problem(*LARGE), c) for c in UNUSUAL), *((kind, c) for c in FEW for kind in DECODE)],
)
def test_shared_memory_and_threads_are_the_device_codes(problem: Problem, config: KernelConfig) -> None:
    pytest.importorskip("cuda.bindings")
    if workspace_bytes(problem, config):
        problem = replace(problem, m=512, n=512)
    assert why_illegal(problem, config) is None
    shape = geometry(problem, config)
    assert device_constants(problem, config) == (shape.smem_bytes, shape.threads)


@pytest.mark.parametrize("config", [c for c in pool() if isinstance(c, Sm90WgmmaConfig)][::7])
def test_what_does_not_depend_on_extents_does_not(config: KernelConfig) -> None:
    """One cubin, one launch geometry for every M, N, K of a kind."""
    assert geometry(Problem(*LARGE), config) == geometry(Problem(8, 16, 24), config)


def test_every_tile_has_its_ctas() -> None:
    """A grid covers all tiles of C: at least as many CTAs as tiles, none wasted but at the edges."""
    for config in pool():
        for m, n in ((64, 64), (1, 8), (1000, 3000), (16384, 16384), (130, 65)):
            problem = Problem(m, n - n % 8, 4096)
            x, y, z = grid(problem, config, 132)
            cluster = geometry(problem, config).cluster
            assert x % cluster == 0 and min(x, y, z) >= 1
            if getattr(config, "persistent", False):
                blocks = gemv_blocks(problem, config) if isinstance(config, Sm80GemvConfig) else 1
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


def test_persistent_grids_fill_whole_clusters_of_the_gpu() -> None:
    config = Sm90WgmmaConfig(128, 128, consumers=2, cluster_m=2, cluster_n=2, persistent=True)
    assert grid(Problem(8192, 8192, 64), config, 132) == (132, 1, 1)
    assert grid(Problem(8192, 8192, 64), config, 78) == (76, 1, 1)
    assert grid(Problem(300, 200, 64), config, 132) == (8, 1, 1)


def test_registers_of_the_direct_family_are_its_loads_and_sums() -> None:
    """2 x 1 blocks of 16x8, three chunks: 8 registers of A and 4 of B each, and the sums."""
    assert direct_registers(Sm80DirectConfig(32, 8, unroll=3)) == (3 * (8 * 2 + 4) + 4 * 2, 255 - 60)
    assert direct_registers(Sm80DirectConfig(32, 8, wk=16, unroll=3))[1] == 128 - 60, "512 threads share 65,536"


DEEP = Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8, pdl=True)
TINY = Sm80DirectConfig(16, 8, pdl=True)


def test_an_even_launch_asks_for_so_much_memory_that_no_more_than_its_share_fits() -> None:
    """16x4096 in 16x16 tiles: 256 CTAs, two to an SM of 132; three would fit."""
    problem, even = Problem(16, 4096, 4096), replace(DEEP, even=True)
    assert geometry(problem, even) == geometry(problem, DEEP)
    own = geometry(problem, DEEP).smem_bytes
    assert launch_smem(problem, DEEP, 132) == own and SM_SMEM // (own + CTA_SMEM) == 3
    asked = launch_smem(problem, even, 132)
    assert asked == (SM_SMEM // 2 - CTA_SMEM) // 128 * 128 == 115712 and SM_SMEM // (asked + CTA_SMEM) == 2
    assert launch_smem(problem, even, 256) == SMEM_LIMIT, "more SMs, a smaller share"


def test_the_share_of_an_sm_is_all_that_fits_of_an_even_launch() -> None:
    even = replace(TINY, even=True)
    for share in range(1, 33):
        problem = Problem(16, 8 * 132 * share, 64)
        asked = launch_smem(problem, even, 132)
        assert asked % 128 == 0 and SM_SMEM // (asked + CTA_SMEM) == share
        assert launch_smem(replace(problem, n=problem.n - 8), even, 132) == asked


def test_one_cta_on_an_sm_is_given_no_more_than_a_cta_may_have() -> None:
    for config in (DEEP, TINY):
        even = replace(config, even=True)
        assert launch_smem(Problem(16, 512, 4096), even, 132) == SMEM_LIMIT == 232448


def test_an_even_launch_asks_for_nothing_more_where_many_ctas_come_to_an_sm() -> None:
    for problem in (Problem(16, 28672, 4096), Problem(4096, 4096, 4096)):
        even = replace(DEEP, even=True)
        assert launch_smem(problem, even, 132) == geometry(problem, DEEP).smem_bytes
        assert not may_stack(problem, even, 132) and not may_stack(problem, DEEP, 132)
    assert launch_smem(Problem(4096, 4096, 64), replace(TINY, even=True), 132) == 0, "993 to an SM"


def test_ctas_may_stack_where_more_fit_than_come() -> None:
    assert may_stack(Problem(16, 4096, 4096), DEEP, 132)
    assert not may_stack(Problem(16, 6144, 4096), DEEP, 132), "three to an SM, and three fit"
    threads = Sm80DirectConfig(16, 8, wk=16, unroll=1, pdl=True)  # 512: four fit
    assert may_stack(Problem(16, 8 * 132 * 3, 512), threads, 132)
    assert not may_stack(Problem(16, 8 * 132 * 4, 512), threads, 132)


def test_k_tiles_round_up() -> None:
    config = Sm80MmaConfig(64, 64, 128)
    assert [k_tiles(Problem(8, 8, k), config) for k in (1, 128, 129, 1024)] == [1, 1, 2, 8]


def test_divisors() -> None:
    for value in range(1, 65):
        for limit in range(1, 20):
            found = divisor_up_to(value, limit)
            assert value % found == 0 and found <= limit
            assert not any(value % d == 0 for d in range(found + 1, min(value, limit) + 1))


def test_limits_are_hoppers() -> None:
    assert (SMEM_LIMIT, MAX_GRID_YZ) == (227 * 1024, 2**16 - 1)
