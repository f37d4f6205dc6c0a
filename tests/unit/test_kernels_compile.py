"""All families compile for all that they claim, and the machine code is what the family's name says."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("cuda.bindings")

from disassembly import Code, Together, cases, disassembled
from outblas.compile import compile_source
from outblas.config import KernelConfig, Sm80DirectConfig, Sm80GemvConfig, Sm80MmaConfig, Sm90WgmmaConfig, config_name
from outblas.errors import CompileError
from outblas.geometry import gemv_blocks, gemv_loads, geometry
from outblas.pool import direct_kernels, gemv_kernels
from outblas.problem import Problem
from outblas.sass import _code_sections, check_static, disassembled_facts
from outblas.source import make_source
from outblas.space import why_illegal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outblas.cubin import Cubin

pytestmark = pytest.mark.long
P = Problem(1024, 1024, 4096)
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
MMA = {
    "tile": Sm80MmaConfig(64, 64),
    "warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8),
    "large": Sm80MmaConfig(128, 128, 64, 3, 2, 4),
    "scalar": Sm80MmaConfig(64, 64, wn=4, vec=1),
    "pairs": Sm80MmaConfig(64, 64, vec=2),
}

DECODE = Problem(16, 4096, 4096)
DECODE_8 = replace(DECODE, m=8)
DECODE_KINDS = {kind: replace(p, m=16) for kind, p in KINDS.items() if p.acc == "fp32"}
GEMV = {
    "registers": Sm80GemvConfig(16, 64, 1, 8, 2),
    "few_tokens": Sm80GemvConfig(8, 64, 1, 4, 2),
    "shared": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "narrow_prefetch": Sm80GemvConfig(16, 64, 1, 8, 2, "shared", prefetch=128),
    "walk": Sm80GemvConfig(16, 64, 1, 4, 2, persistent=True),
    "walk_kept": Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True, l2="stream_b", kept_k=4096),
    "walk_shared": Sm80GemvConfig(8, 64, 1, 8, 2, "shared", persistent=True),
}

DIRECT = {
    "one_warp": Sm80DirectConfig(16, 8),
    "two_by_two": Sm80DirectConfig(64, 64, 2, 2, unroll=2),
    "warps_over_k": Sm80DirectConfig(32, 16, 1, 1, 8, 3),
}


Kernel = tuple[Problem, KernelConfig, str]


@cache
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


def covering(names: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str, str]]:
    """(name, architecture, kind): every name of every kind on Hopper, and on the others one kind each, in turn."""
    kinds, cases = list(kinds), []
    for i, name in enumerate(names):
        cases += [(name, "sm_90a", kind) for kind in kinds]
        cases += [(name, arch, kinds[(2 * i + j) % len(kinds)]) for j, arch in enumerate(("sm_80", "sm_89"))]
    return cases


@pytest.mark.parametrize(("name", "arch", "kind"), covering(GEMV, DECODE_KINDS))
def test_gemv_kernels_of_every_kind_and_architecture(name: str, arch: str, kind: str) -> None:
    config = GEMV[name]
    problem = replace(DECODE_KINDS[kind], m=config.bm)
    cubin = build(problem, config, arch)
    facts = cubin.facts
    assert facts.hmma and not facts.hgmma and not facts.utmaldg
    assert bool(facts.ldgsts) == (config.ring == "shared" or config.kept_k > 0)
    once = config.bn // config.wn // 16 * (config.bm // 8) * (4 if problem.layout == "TN" else 2)  # mma of a step
    assert facts.hmma == once * (1 if config.ring == "shared" else config.unroll)


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_gemv_loads_are_all_in_flight_before_the_first_product(layout: str) -> None:
    """What bandwidth hangs on: every weight of ``unroll`` steps is asked for, 16 bytes at a time."""
    problem = Problem(8, 4096, 4096, layout)  # type: ignore[arg-type]
    kernels = [c for c in gemv_kernels() if isinstance(c, Sm80GemvConfig) and c.ring == "registers" and c.bm == 8]
    legal = [c for c in kernels if why_illegal(problem, c) is None and c.split_k == 1][::2]
    for config, code in zip(legal, disassembled("sm_90a", [build(problem, c).image for c in legal]), strict=True):
        opcodes = code.opcodes
        first = next(i for i, text in enumerate(opcodes) if text.startswith("HMMA"))
        batched = [text for text in opcodes[:first] if text.startswith("LDG.E.NA") and text.endswith(".128")]
        assert len(batched) == config.unroll * gemv_loads(problem, config)[0], config


def controlled(image: bytes, texts: Sequence[str]) -> list[tuple[str, int, set[int]]]:
    """(instruction, scoreboard that its result sets or 7, scoreboards that it waits for), in order.

    The control bits are not published: 105 to 125 of the 128, as disassemblers of earlier generations read them.
    """
    words = [struct.unpack(f"<{len(code) // 8}Q", code) for code in _code_sections(image)]
    assert len(words) == 1
    control = [high >> 41 for high in words[0][1::2]]
    assert len(texts) == len(control)
    return [
        (text, bits >> 5 & 7, {i for i in range(6) if bits >> 11 & 1 << i})
        for text, bits in zip(texts, control, strict=True)
    ]


WALKS = [c for c in gemv_kernels() if isinstance(c, Sm80GemvConfig) and c.persistent]


def walk(config: Sm80GemvConfig, layout: str) -> Kernel:
    problem = Problem(config.bm, 8192, config.kept_k or 8192, layout)  # type: ignore[arg-type]
    if why_illegal(problem, config) is not None:
        pytest.skip("16-byte loads along N need 64 rows per warp")
    return problem, config, "sm_90a"


@pytest.fixture(scope="module")
def walks(request: pytest.FixtureRequest) -> Together[tuple[Sm80GemvConfig, str]]:
    named = cases(request, "test_walks_have_the_next_tiles_loads_in_flight_while_they_add_up_and_store")
    return Together(lambda key: build(*walk(*key)), [(case["config"], case["layout"]) for case in named])


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("config", WALKS, ids=config_name)
def test_walks_have_the_next_tiles_loads_in_flight_while_they_add_up_and_store(
    walks: Together[tuple[Sm80GemvConfig, str]], config: Sm80GemvConfig, layout: str
) -> None:
    """All loads of a round are asked for before the sums of a tile, which wait for none of them; and ptxas holds the
    registers to what geometry.gemv_blocks counts on."""
    problem, _, _ = walk(config, layout)
    (cubin, disassembly), shape = walks[config, layout], geometry(problem, config)
    assert cubin.registers * shape.threads * gemv_blocks(problem, config) <= 65536
    code = controlled(cubin.image, disassembly.texts)
    loads = [i for i, (text, _, _) in enumerate(code) if "LDG.E.NA" in text or "LDGSTS.E.BYPASS" in text]
    stores = [i for i, (text, _, _) in enumerate(code) if "STG" in text]
    per_step = gemv_loads(problem, config)[0]
    in_loop = per_step * (1 if config.ring == "shared" else config.unroll)
    assert len(loads) == per_step * config.unroll + in_loop
    assert loads[-1] < stores[0], "weights of the next tile behind the stores of this one"
    if config.ring == "registers":
        pending = {code[i][1] for i in loads[-in_loop:]}
        sums = next(i for i in range(loads[-1], len(code)) if "STS" in code[i][0])
        waited = [text for text, _, waits in code[sums : stores[-1] + 1] if waits & pending]
        assert not waited, f"the sums wait for weights of the next tile: {waited}"
    else:
        waits = [i for i, (text, _, _) in enumerate(code) if "DEPBAR" in text and "LDGDEPBAR" not in text]
        assert not any(loads[-1] < i < stores[0] for i in waits)


def test_a_hint_for_l2_is_a_policy_on_every_load_of_weights() -> None:
    config = Sm80GemvConfig(8, 64, 1, 4, 2)
    images = [build(DECODE_8, replace(config, l2=l2)).image for l2 in ("plain", "stream_b")]  # type: ignore[arg-type]
    plain, hinted = ("\n".join(code.texts) for code in disassembled("sm_90a", images))
    assert hinted != plain and hinted.count("LDG") == plain.count("LDG")


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
    """What the family is for: one latency per ``unroll`` chunks. Without the fence ptxas interleaves them."""
    problem = replace(P, layout=layout)  # type: ignore[arg-type]
    configs = [*list(direct_kernels())[::38], *DIRECT.values()]
    for config, code in zip(configs, disassembled("sm_90a", [build(problem, c).image for c in configs]), strict=True):
        assert isinstance(config, Sm80DirectConfig)
        opcodes = code.opcodes
        first = next(i for i, text in enumerate(opcodes) if text.startswith("HMMA"))
        before, after = ([t for t in part if t.startswith("LDG")] for part in (opcodes[:first], opcodes[first:]))
        assert (len(before), len(after)) == (direct_loads(layout, config), 0), config
        if layout == "TN":
            assert all(text.endswith(".128") for text in before), config


def k_loop(code: Code) -> tuple[str, ...]:
    """Instructions from where the first wgmma's loop begins to the branch back to it."""
    first = next(i for i, text in enumerate(code.texts) if "HGMMA" in text)
    for i in range(first, len(code.texts)):
        begin = code.target(code.texts[i])
        if begin is not None and begin <= first:
            return code.texts[begin : i + 1]
    raise AssertionError("no branch goes back over the first HGMMA")


def looping(kind: str, across: tuple[int, int]) -> Kernel:
    return KINDS[kind], Sm90WgmmaConfig(128, 128, 64, 5, 2, "pingpong", *across, persistent=True), "sm_90a"


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
    [
        (replace(P, acc="fp16"), WGMMA["coop"]),
        (replace(P, acc="fp16"), MMA["tile"]),
        (DECODE, GEMV["shared"]),
        (P, DIRECT["one_warp"]),
    ],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts


def test_one_wgmma_per_16_of_k_and_64_rows() -> None:
    """The K loop is unrolled over one stage and nothing else."""
    for config, rows in ((WGMMA["direct"], 1), (replace(WGMMA["coop"], bm=256, bn=64), 2)):
        assert build(P, config).facts.hgmma == config.bk // 16 * rows
