"""The kernel family sm90_wgmma_gemm compiles for all that it claims, and its machine code is what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import CompileError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.source import make_source
from outblas.runtime.nvrtc import compile_source
from support.disassembly import Code, Together, cases, disassembled_facts
from support.kernels.compiled_kernels import KINDS, P, build

pytest.importorskip("cuda.bindings")

pytestmark = pytest.mark.long

WGMMA = {
    "coop": Sm90WgmmaConfig(128, 128, stages=4, consumers=2),
    "direct": Sm90WgmmaConfig(64, 32, 128, store="direct"),
    "split": Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct"),
    "split_cluster": Sm90WgmmaConfig(128, 64, stages=3, consumers=2, cluster_m=2, split_k=2, store="direct"),
    "workspace": Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct", pdl=True, split_kind="workspace"),
    "workspace_cluster": Sm90WgmmaConfig(
        128, 128, stages=3, consumers=2, cluster_m=2, split_k=3, store="direct", split_kind="workspace"
    ),
    "cluster": Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2, cluster_n=2),
    "persistent": Sm90WgmmaConfig(128, 256, stages=3, consumers=2, cluster_n=2, persistent=True, raster="n"),
    "pingpong": Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True),
    "stagger": Sm90WgmmaConfig(256, 128, stages=4, consumers=2, schedule="stagger", persistent=True),
    "stagger_one_tile": Sm90WgmmaConfig(128, 128, stages=2, consumers=2, schedule="stagger", cluster_m=2),
    "three": Sm90WgmmaConfig(192, 128, stages=4, consumers=3),
    "two_blocks": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2, pdl=True),
}


def k_loop(code: Code) -> tuple[str, ...]:
    """Instructions from where the first wgmma's loop begins to the branch back to it."""
    first = next(i for i, text in enumerate(code.texts) if "HGMMA" in text)
    for i in range(first, len(code.texts)):
        begin = code.target(code.texts[i])
        if begin is not None and begin <= first:
            return code.texts[begin : i + 1]
    raise AssertionError("no branch goes back over the first HGMMA")


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_kernels_multiply_by_warpgroup_and_load_by_tma(name: str) -> None:
    facts = build(P, WGMMA[name]).facts
    assert facts.hgmma and facts.utmaldg and not facts.hmma and not facts.ldgsts and not facts.qgmma
    assert bool(facts.utmastg) == (WGMMA[name].store == "tma")


@pytest.mark.parametrize("kind", KINDS)
def test_wgmma_kernels_of_every_kind(kind: str) -> None:
    facts = build(KINDS[kind], WGMMA["coop"]).facts
    assert facts.hgmma and facts.utmaldg and facts.utmastg


def looping(kind: str, across: tuple[int, int]) -> tuple[Problem, KernelConfig]:
    return KINDS[kind], Sm90WgmmaConfig(128, 128, 64, 5, 2, "pingpong", *across, persistent=True)


@pytest.fixture(scope="module")
def loops(request: pytest.FixtureRequest) -> Together[tuple[str, tuple[int, int]]]:
    keys = [(case["kind"], case["across"]) for case in cases(request, "test_the_k_loop_is_short")]
    return Together(lambda key: build(*looping(*key)), keys)


@pytest.mark.parametrize(
    ("kind", "across", "most"),
    [
        (kind, *loop)  # a cluster in each direction, of either layout
        for i, kind in enumerate(KINDS)
        for loop in (((1, 1), 64), (((2, 1), (1, 2))[(i + i // 2) % 2], 72))
    ],
)
def test_the_k_loop_is_short(
    loops: Together[tuple[str, tuple[int, int]]], kind: str, across: tuple[int, int], most: int
) -> None:
    """Two consumers and a producer share the schedulers: at 122 instructions a stage the compute-bound products
    were about 5% slower. Descriptors are walked by adding; with a cluster there are the peers to tell."""
    loop = k_loop(loops[kind, across][1])
    assert sum("HGMMA" in text for text in loop) == 2 * 64 // 16, "the loop that is counted is the K loop"
    assert len(loop) <= most


def test_wgmma_is_for_sm_90a_alone() -> None:
    with pytest.raises(CompileError):
        compile_source(make_source(P, WGMMA["coop"]), "sm_90", cache=None)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (replace(P, acc="fp16"), WGMMA["coop"]),
    ],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts


def test_one_wgmma_per_16_of_k_and_64_rows() -> None:
    """The K loop is unrolled over one stage and nothing else."""
    for config, rows in ((WGMMA["direct"], 1), (replace(WGMMA["coop"], bm=256, bn=64), 2)):
        assert build(P, config).facts.hgmma == config.bk // 16 * rows
