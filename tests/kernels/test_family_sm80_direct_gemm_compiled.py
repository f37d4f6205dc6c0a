"""The kernel family sm80_direct_gemm compiles for all that it claims, and its machine code is what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import FAMILY as DIRECT_FAMILY
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from support.disassembly import Together, cases, disassembled, disassembled_facts
from support.kernels.compiled_kernels import KINDS, P, build, covering

pytest.importorskip("cuda.bindings")

pytestmark = pytest.mark.long

DIRECT = {
    "one_warp": Sm80DirectConfig(16, 8),
    "two_by_two": Sm80DirectConfig(64, 64, 2, 2, unroll=2),
    "warps_over_k": Sm80DirectConfig(32, 16, 1, 1, 8, 3),
}


def direct_loads(layout: str, c: Sm80DirectConfig) -> int:
    """Loads of one thread before its first product: rows of A, and columns (TN) or rows (NN) of B."""
    m_blocks, n_blocks = c.bm // c.wm // 16, c.bn // c.wn // 8
    return c.unroll * (2 * m_blocks + (n_blocks if layout == "TN" else 4))


@pytest.fixture(scope="module")
def direct(request: pytest.FixtureRequest) -> Together[tuple[str, str, str]]:
    named = cases(request, "test_direct_kernels_of_every_kind_and_architecture")
    keys = [(case["name"], case["arch"], case["kind"]) for case in named]
    return Together(lambda key: build(KINDS[key[2]], DIRECT[key[0]], key[1]), keys)


@pytest.mark.parametrize(("name", "arch", "kind"), covering(DIRECT, KINDS))
def test_direct_kernels_of_every_kind_and_architecture(
    direct: Together[tuple[str, str, str]], name: str, arch: str, kind: str
) -> None:
    """From global memory to the products: no copy to shared memory, which only warps that share K use, for sums."""
    config, problem = DIRECT[name], KINDS[kind]
    cubin, code = direct[name, arch, kind]
    facts, opcodes = cubin.facts, code.opcodes
    assert not facts.hgmma and not facts.utmaldg and not facts.utmastg and not facts.ldgsts
    blocks = config.bm // config.wm // 16 * (config.bn // config.wn // 8)
    assert facts.hmma == 2 * config.unroll * blocks
    assert any(text.startswith(("LDS", "STS", "BAR")) for text in opcodes) == (config.wk > 1)
    transposed = 4 * config.unroll * config.bn // config.wn // 8 if problem.layout == "NN" else 0
    assert sum(text.startswith("MOVM") for text in opcodes) == transposed


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_direct_loads_of_a_batch_all_come_before_the_first_product(layout: str) -> None:
    """The family exists to pay one latency per ``unroll`` chunks. Without the fence ptxas interleaves the loads."""
    problem = replace(P, layout=layout)  # type: ignore[arg-type]
    configs = [*list(DIRECT_FAMILY.pool())[::38], *DIRECT.values()]
    for config, code in zip(configs, disassembled("sm_90a", [build(problem, c).image for c in configs]), strict=True):
        assert isinstance(config, Sm80DirectConfig)
        opcodes = code.opcodes
        first = next(i for i, text in enumerate(opcodes) if text.startswith("HMMA"))
        before, after = ([t for t in part if t.startswith("LDG")] for part in (opcodes[:first], opcodes[first:]))
        assert (len(before), len(after)) == (direct_loads(layout, config), 0), config
        if layout == "TN":
            assert all(text.endswith(".128") for text in before), config


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P, DIRECT["one_warp"]),
    ],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts
