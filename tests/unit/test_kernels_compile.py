"""All families compile for all that they claim, and the machine code is what the family's name says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("cuda.bindings")

from outblas.compile import compile_source
from outblas.config import KernelConfig, Sm80GemvConfig, Sm80MmaConfig, Sm90WgmmaConfig
from outblas.errors import CompileError
from outblas.geometry import gemv_loads
from outblas.problem import Problem
from outblas.sass import _disassemble, check_static, disassembled_facts
from outblas.source import make_source
from outblas.space import pool, why_illegal

if TYPE_CHECKING:
    from outblas.cubin import Cubin

P = Problem(4096, 4096, 4096)
KINDS = {
    "_".join((p.layout, p.dtype, p.acc)): p
    for p in (P, replace(P, layout="NN"), replace(P, dtype="bf16"), replace(P, layout="NN", dtype="bf16"),
              replace(P, acc="fp16"), replace(P, layout="NN", acc="fp16"))
}  # fmt: skip
WGMMA = {
    "coop": Sm90WgmmaConfig(128, 128, stages=4, consumers=2),
    "direct": Sm90WgmmaConfig(64, 32, 128, store="direct"),
    "split": Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct"),
    "split_cluster": Sm90WgmmaConfig(128, 64, stages=3, consumers=2, cluster_m=2, split_k=2, store="direct"),
    "cluster": Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2, cluster_n=2),
    "persistent": Sm90WgmmaConfig(128, 256, stages=3, consumers=2, cluster_n=2, persistent=True, raster="n"),
    "pingpong": Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True),
    "three": Sm90WgmmaConfig(192, 128, stages=4, consumers=3),
    "two_blocks": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2, pdl=True),
}
MMA = {
    "tile": Sm80MmaConfig(64, 64),
    "warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8),
    "large": Sm80MmaConfig(128, 128, 64, 3, 2, 4),
    "scalar": Sm80MmaConfig(64, 64, wn=4, vec=1),
    "pairs": Sm80MmaConfig(64, 64, vec=2),
}

DECODE = Problem(16, 4096, 4096)
DECODE_KINDS = [replace(p, m=16) for p in KINDS.values() if p.acc == "fp32"]
GEMV = {
    "registers": Sm80GemvConfig(16, 64, 1, 8, 2),
    "few_tokens": Sm80GemvConfig(8, 64, 1, 4, 2),
    "shared": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "narrow_prefetch": Sm80GemvConfig(16, 64, 1, 8, 2, "shared", prefetch=128),
}


def build(problem: Problem, config: KernelConfig, arch: str = "sm_90a") -> Cubin:
    assert why_illegal(problem, config) is None
    source = make_source(problem, config)
    cubin = compile_source(source, arch, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.facts.ldl, cubin.facts.stl, cubin.spill_bytes, cubin.stack_bytes) == (0, 0, 0, 0)
    assert cubin.facts.accumulators == (problem.acc,)
    return cubin


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_kernels_multiply_by_warpgroup_and_load_by_tma(name: str) -> None:
    facts = build(P, WGMMA[name]).facts
    assert facts.hgmma and facts.utmaldg and not facts.hmma and not facts.ldgsts and not facts.qgmma
    assert bool(facts.utmastg) == (WGMMA[name].store == "tma")


@pytest.mark.parametrize("kind", KINDS)
def test_wgmma_kernels_of_every_kind(kind: str) -> None:
    facts = build(KINDS[kind], WGMMA["coop"]).facts
    assert facts.hgmma and facts.utmaldg and facts.utmastg


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


@pytest.mark.parametrize("problem", DECODE_KINDS, ids=lambda p: p.key)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("name", GEMV)
def test_gemv_kernels_of_every_kind_and_architecture(name: str, arch: str, problem: Problem) -> None:
    config = GEMV[name]
    problem = replace(problem, m=config.bm)
    cubin = build(problem, config, arch)
    facts = cubin.facts
    assert facts.hmma and not facts.hgmma and not facts.utmaldg
    assert bool(facts.ldgsts) == (config.ring == "shared")
    once = config.bn // config.wn // 16 * (config.bm // 8) * (4 if problem.layout == "TN" else 2)  # mma of a step
    assert facts.hmma == once * (1 if config.ring == "shared" else config.unroll)


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_gemv_loads_are_all_in_flight_before_the_first_product(layout: str) -> None:
    """What bandwidth hangs on: every weight of ``unroll`` steps is asked for, 16 bytes at a time."""
    problem = Problem(8, 4096, 4096, layout)  # type: ignore[arg-type]
    for config in (c for c in pool() if isinstance(c, Sm80GemvConfig) and c.ring == "registers" and c.bm == 8):
        if why_illegal(problem, config) is not None or config.split_k > 1:
            continue
        opcodes = _disassemble(build(problem, config).image)
        first = next(i for i, text in enumerate(opcodes) if text.startswith("HMMA"))
        batched = [text for text in opcodes[:first] if text.startswith("LDG.E.NA") and text.endswith(".128")]
        assert len(batched) == config.unroll * gemv_loads(problem, config)[0], config


def test_cluster_split_of_the_gemv_family_is_hoppers() -> None:
    split = replace(GEMV["registers"], split_k=4, pdl=True)
    assert build(DECODE, split, "sm_90").facts.hmma
    with pytest.raises(CompileError):
        compile_source(make_source(DECODE, split), "sm_80", cache=None)


def test_cluster_split_of_the_mma_family_is_hoppers() -> None:
    split = replace(MMA["tile"], split_k=4, pdl=True)
    assert build(P, split, "sm_90").facts.hmma
    with pytest.raises(CompileError):
        compile_source(make_source(P, split), "sm_80", cache=None)


def test_wgmma_is_for_sm_90a_alone() -> None:
    with pytest.raises(CompileError):
        compile_source(make_source(P, WGMMA["coop"]), "sm_90", cache=None)


@pytest.mark.parametrize(
    ("problem", "config"),
    [(replace(P, acc="fp16"), WGMMA["coop"]), (replace(P, acc="fp16"), MMA["tile"]), (DECODE, GEMV["shared"])],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts


def test_one_wgmma_per_16_of_k_and_64_rows() -> None:
    """The K loop is unrolled over one stage and nothing else."""
    for config, rows in ((WGMMA["direct"], 1), (replace(WGMMA["coop"], bm=256, bn=64), 2)):
        assert build(P, config).facts.hgmma == config.bk // 16 * rows
