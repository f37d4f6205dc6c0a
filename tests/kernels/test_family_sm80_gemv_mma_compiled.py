"""The kernel family sm80_gemv_mma compiles for all that it claims, and its machine code is what its name says."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import CompileError
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_gemv_mma import FAMILY as GEMV_FAMILY
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig, gemv_blocks_per_sm, gemv_loads_per_step
from outblas.kernels.geometry import geometry
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.sass import _code_sections
from support.disassembly import Together, cases, disassembled, disassembled_facts
from support.gpus.known import H200
from support.helpers import half_of_pairs
from support.kernels.compiled_kernels import KINDS, build, covering

if TYPE_CHECKING:
    from collections.abc import Sequence

pytest.importorskip("cuda.bindings")

pytestmark = pytest.mark.long

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


WALKS = [c for c in GEMV_FAMILY.pool() if isinstance(c, Sm80GemvConfig) and c.persistent]

DECODE = Problem(16, 4096, 4096)

DECODE_8 = replace(DECODE, m=8)


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
    """Bandwidth depends on it: every weight of ``unroll`` steps is requested first, 16 bytes at a time."""
    problem = Problem(8, 4096, 4096, layout)  # type: ignore[arg-type]
    kernels = [c for c in GEMV_FAMILY.pool() if isinstance(c, Sm80GemvConfig) and c.ring == "registers" and c.bm == 8]
    legal = [c for c in kernels if why_illegal(problem, c, H200) is None and c.split_k == 1][::2]
    for config, code in zip(legal, disassembled("sm_90a", [build(problem, c).image for c in legal]), strict=True):
        opcodes = code.opcodes
        first = next(i for i, text in enumerate(opcodes) if text.startswith("HMMA"))
        batched = [text for text in opcodes[:first] if text.startswith("LDG.E.NA") and text.endswith(".128")]
        assert len(batched) == config.unroll * gemv_loads_per_step(problem, config)[0], config


def walked(config: Sm80GemvConfig, layout: str) -> Problem:
    return Problem(config.bm, 8192, config.kept_k or 8192, layout)  # type: ignore[arg-type]


#: 16-byte loads along N need 64 rows per warp. Those that have them are tested with one layout each, and slowly with
#: the other.
WIDE = [config for config in WALKS if why_illegal(walked(config, "NN"), config, H200) is None]
WALKED = [*half_of_pairs(WIDE, ("TN", "NN")), *((config, "TN") for config in WALKS if config not in WIDE)]


@pytest.fixture(scope="module")
def walks(request: pytest.FixtureRequest) -> Together[tuple[Sm80GemvConfig, str]]:
    named = cases(request, "test_walks_have_the_next_tiles_loads_in_flight_while_they_add_up_and_store")
    return Together(lambda key: build(walked(*key), key[0]), [(case["config"], case["layout"]) for case in named])


@pytest.mark.parametrize(
    ("config", "layout"),
    WALKED,
    ids=lambda value: value if isinstance(value, str) else config_name(value),
)
def test_walks_have_the_next_tiles_loads_in_flight_while_they_add_up_and_store(
    walks: Together[tuple[Sm80GemvConfig, str]], config: Sm80GemvConfig, layout: str
) -> None:
    """All loads of a round are issued before the sums of a tile, which wait for none of them.

    ptxas keeps the registers within the number that geometry.gemv_blocks_per_sm assumes.
    """
    problem = walked(config, layout)
    (cubin, disassembly), shape = walks[config, layout], geometry(problem, config)
    assert cubin.registers * shape.threads * gemv_blocks_per_sm(problem, config) <= 65536
    code = controlled(cubin.image, disassembly.texts)
    loads = [i for i, (text, _, _) in enumerate(code) if "LDG.E.NA" in text or "LDGSTS.E.BYPASS" in text]
    stores = [i for i, (text, _, _) in enumerate(code) if "STG" in text]
    per_step = gemv_loads_per_step(problem, config)[0]
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


def test_cluster_split_of_the_gemv_family_is_hoppers() -> None:
    split = replace(GEMV["registers"], split_k=4, pdl=True)
    assert build(DECODE, split, "sm_90").facts.hmma
    with pytest.raises(CompileError):
        compile_source(make_source(DECODE, split), "sm_80", cache=None)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (DECODE, GEMV["shared"]),
    ],
)
def test_the_disassembler_agrees(problem: Problem, config: KernelConfig) -> None:
    cubin = build(problem, config)
    assert disassembled_facts(cubin.image) == cubin.facts
