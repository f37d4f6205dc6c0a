"""A sample of the legal kernels compiles on every architecture, without spills."""

from __future__ import annotations

import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.derived_gpu import never_ran_on
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.catalogue import candidates
from outblas.kernels.source import make_source
from outblas.runtime.cubin import CubinCache
from outblas.runtime.nvrtc import ARCHITECTURES, compile_source
from support.gpus.fake_driver import DEVICES

GPUS = {architecture(device.gpu): device.gpu for device in DEVICES.values()}
PROBLEMS = (
    Problem(4096, 4096, 4096),
    Problem(4096, 4096, 4096, "NN", "bf16"),
    Problem(4096, 4096, 4096, "TN", "fp16", "fp16"),
    Problem(8, 4096, 4096, "NN"),
)


def sample(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the largest tile of each family, with PDL if it may have it, and the largest of ``sm80_mma_gemm``."""
    largest: dict[str, KernelConfig] = {}
    for config in candidates(problem, gpu):
        known = largest.get(config.family)
        if known is None or (config.bm * config.bn, config.pdl) > (known.bm * known.bn, known.pdl):
            largest[config.family] = config
    return list(largest.values())


def test_the_fakes_cover_every_architecture() -> None:
    assert {*GPUS, "sm_90"} == set(ARCHITECTURES)
    assert [arch for arch in GPUS if not never_ran_on(GPUS[arch].arch)] == ["sm_90a"]


@pytest.mark.parametrize(
    ("arch", "problems"),
    [
        *((arch, PROBLEMS[::3]) for arch in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")),
        ("sm_90a", PROBLEMS),
        # The others are like one of these.
        *(pytest.param(arch, PROBLEMS, marks=pytest.mark.slow) for arch in ("sm_80", "sm_120a")),
    ],
)
def test_legal_kernels_compile_without_spills(
    arch: str, problems: tuple[Problem, ...], fresh_cubins: CubinCache
) -> None:
    pytest.importorskip("cuda.bindings")
    gpu = GPUS[arch]
    tiles = set()
    for problem in problems:
        for config in sample(problem, gpu):
            cubin = compile_source(make_source(problem, config), arch, fresh_cubins)
            assert cubin.spill_bytes == 0, config_name(config)
            tiles.add((config.family, config.bm * config.bn))
    assert {family for family, _ in tiles} >= {"sm80_mma_gemm", "sm80_direct_gemm", "sm80_gemv_mma"}
    if arch != "sm_90a":
        assert ("sm80_mma_gemm", 256 * 128) in tiles
