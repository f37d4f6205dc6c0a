"""The kernel family sm80_mma_gemm compiles for all that it claims, and its machine code is what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import CompileError
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.source import make_source
from outblas.runtime.nvrtc import compile_source
from support.disassembly import disassembled_facts
from support.kernels.compiled_kernels import KINDS, P, build

pytest.importorskip("cuda.bindings")

pytestmark = pytest.mark.long

MMA = {
    "tile": Sm80MmaConfig(64, 64),
    "warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8),
    "large": Sm80MmaConfig(128, 128, 64, 3, 2, 4),
    "scalar": Sm80MmaConfig(64, 64, wn=4, vec=1),
    "pairs": Sm80MmaConfig(64, 64, vec=2),
}


@pytest.mark.parametrize("name", MMA)
def test_mma_kernels_multiply_by_warp(name: str) -> None:
    facts = build(P, MMA[name]).facts
    assert facts.hmma and not facts.hgmma and not facts.utmaldg
    assert bool(facts.ldgsts) == (MMA[name].vec > 1)  # cp.async, but for the scalar loads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_mma_kernels_of_every_kind_and_architecture(kind: str, arch: str) -> None:
    cubin = build(KINDS[kind], MMA["tile"], arch)
    assert cubin.arch == arch and cubin.facts.hmma and cubin.facts.ldgsts


def test_cluster_split_of_the_mma_family_is_hoppers() -> None:
    split = replace(MMA["tile"], split_k=4, pdl=True)
    assert build(P, split, "sm_90").facts.hmma
    with pytest.raises(CompileError):
        compile_source(make_source(P, split), "sm_80", cache=None)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (replace(P, acc="fp16"), MMA["tile"]),
    ],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts
