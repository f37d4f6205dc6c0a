"""The SASS facts are held against nvdisasm for every kind of matrix instruction, and gate 1 against liars."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

pytest.importorskip("cuda.bindings")

from outblas.core.errors import CompileError, ToolchainMissing
from outblas.kernels.source import Source
from outblas.runtime import sass
from outblas.runtime.cubin import SassFacts
from outblas.runtime.nvrtc import Cubin, compile_source
from outblas.runtime.sass import check_static, disassembled_facts, facts_of_opcodes, sass_facts
from support.disassembly import Together, cases

pytestmark = pytest.mark.long


def mma(shape: str, operand: str, acc: str, a_regs: int, b_regs: int) -> str:
    """A kernel with one mma.sync."""
    count, kind, letter = (4, "float", "f") if acc == "f32" else (2, "unsigned", "r")
    refs = [f"%{i}" for i in range(count + a_regs + b_regs)]
    d, a, b = refs[:count], refs[count : count + a_regs], refs[count + a_regs :]
    outs = ",".join(f'"+{letter}"(d[{i}])' for i in range(count))
    ins = ",".join(f'"r"(a[{i}])' for i in range(a_regs + b_regs))
    return f"""extern "C" __global__ void probe({kind}* o, unsigned* a) {{
  {kind} d[{count}]; for (int i = 0; i < {count}; i++) d[i] = o[i * 7];
  asm volatile("mma.sync.aligned.{shape}.row.col.{acc}.{operand}.{operand}.{acc} "
    "{{{",".join(d)}}},{{{",".join(a)}}},{{{",".join(b)}}},{{{",".join(d)}}};" : {outs} : {ins});
  for (int i = 0; i < {count}; i++) o[threadIdx.x * {count} + i] = d[i]; }}"""


def wgmma(n: int, operand: str, acc: str, a_in_registers: bool = False) -> str:
    """A kernel with one wgmma."""
    count, kind, letter = (n // 2, "float", "f") if acc == "f32" else (n // 4, "unsigned", "r")
    a_count = 4 if a_in_registers else 1
    k, tail = (32, "1,1,1") if operand == "e4m3" else (16, "1,1,1,0" if a_in_registers else "1,1,1,0,0")
    d = ",".join(f"%{i}" for i in range(count))
    a = "{" + ",".join(f"%{count + i}" for i in range(4)) + "}" if a_in_registers else f"%{count}"
    a_in = ",".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(da)'
    outs = ",".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return f"""typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128) probe({kind}* o, unsigned* a, u64 da, u64 db) {{
  {kind} d[{count}]; for (int i = 0; i < {count}; i++) d[i] = o[i * 7];
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{operand}.{operand} {{{d}}}, {a}, %{count + a_count}, "
    "{tail};" : {outs} : {a_in},"l"(db));
  asm volatile("wgmma.commit_group.sync.aligned;"); asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < {count}; i++) o[threadIdx.x * {count} + i] = d[i]; }}"""


TMA = """extern "C" __global__ void probe(const void* map, int x, float* o) {
  extern __shared__ float s[]; unsigned at = (unsigned)__cvta_generic_to_shared(s);
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%0],[%1,{%2,%2}],[%3];" :: "r"(at), "l"(map), "r"(x), "r"(at + 64) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    " [%0],[%1,{%2,%2}],[%3],%4;" :: "r"(at), "l"(map), "r"(x), "r"(at + 64), "h"((short)3) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%1,{%2,%2}],[%0];"
    :: "r"(at), "l"(map), "r"(x) : "memory"); }"""

LOCAL = """extern "C" __global__ void probe(float* o, int n) {
  float d[64]; __shared__ __align__(16) float s[256]; unsigned at = (unsigned)__cvta_generic_to_shared(s);
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(at), "l"(o));
  asm volatile("cp.async.ca.shared.global [%0],[%1],4;" :: "r"(at + 16), "l"(o + 4));
  asm volatile("cp.async.wait_all;");
  for (int i = 0; i < 64; i++) d[i] = o[i];
  for (int i = 0; i < n; i++) d[(int)o[i] & 63] += s[i];
  for (int i = 0; i < 64; i++) o[i + n] = d[(i * n) & 63]; }"""

#: name: (text, arch, family of facts that must be non-zero, accumulators)
PROBES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "tma": (TMA, "sm_90a", ("utmaldg", "utmastg"), ()),
    "local sm_80": (LOCAL, "sm_80", ("ldl", "stl", "ldgsts"), ()),
    "local sm_90": (LOCAL, "sm_90", ("ldl", "stl", "ldgsts"), ()),
}
for _arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"):
    for _shape, _a, _b in (("m16n8k16", 4, 2), ("m16n8k8", 2, 1)):
        for _operand, _acc in (("f16", "f32"), ("bf16", "f32"), ("f16", "f16")):
            PROBES[f"mma {_arch} {_shape} {_operand} {_acc}"] = (
                mma(_shape, _operand, _acc, _a, _b),
                _arch,
                ("hmma",),
                ("fp" + _acc[1:],),
            )
for _n in (8, 64, 256):
    for _operand, _acc in (("f16", "f32"), ("bf16", "f32"), ("f16", "f16"), ("e4m3", "f32"), ("e4m3", "f16")):
        for _regs in (False, True):
            PROBES[f"wgmma n{_n} {_operand} {_acc} {'registers' if _regs else 'shared'}"] = (
                wgmma(_n, _operand, _acc, _regs),
                "sm_90a",
                ("qgmma" if _operand == "e4m3" else "hgmma",),
                ("fp" + _acc[1:],),
            )


def source(text: str, acc: str = "fp32") -> Source:
    return Source(text, "probe", (), (), acc, "probe")


@cache
def build(text: str, acc: str = "fp32", arch: str = "sm_90a") -> tuple[Source, Cubin]:
    src = source(text, acc)
    return src, compile_source(src, arch, cache=None)


def gate(text: str, acc: str = "fp32") -> str | None:
    src, cubin = build(text, acc)
    return check_static(cubin.facts, src, cubin)


@pytest.mark.parametrize("name", PROBES)
def test_facts_name_the_instruction(name: str) -> None:
    text, arch, present, accumulators = PROBES[name]
    facts = build(text, arch=arch)[1].facts
    assert facts.accumulators == accumulators
    counted = {f.name for f in dataclasses.fields(facts) if f.name != "accumulators" and getattr(facts, f.name)}
    assert counted == set(present)


@pytest.fixture(scope="module")
def probes(request: pytest.FixtureRequest) -> Together[str]:
    try:
        sass.find_nvdisasm()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    names = [case["name"] for case in cases(request, "test_decoder_agrees_with_nvdisasm")]
    return Together(lambda name: build(PROBES[name][0], arch=PROBES[name][1])[1], names)


@pytest.mark.parametrize("name", [n for n in PROBES if "n64" in n or "wgmma" not in n])
def test_decoder_agrees_with_nvdisasm(probes: Together[str], name: str) -> None:
    cubin, code = probes[name]
    assert sass_facts(cubin.image) == facts_of_opcodes(code.opcodes)


def test_opcodes_are_the_same_alone_and_behind_other_kernels(probes: Together[str]) -> None:
    for name in ("tma", "local sm_90", "mma sm_90a m16n8k16 f16 f32", "wgmma n64 f16 f32 shared"):
        cubin, code = probes[name]
        assert sass._disassemble(cubin.image) == code.opcodes
        assert disassembled_facts(cubin.image) == sass_facts(cubin.image)


def test_opcode_text() -> None:
    facts = facts_of_opcodes(["HFMA2.MMA", "HMMA.16816.F32.BF16", "HMMA.1688.F16", "LDL.LU", "LDGSTS.E.BYPASS.128"])
    assert facts == SassFacts(0, 2, 0, 0, 0, 1, 0, 1, ("fp16", "fp32"))


def test_accumulator_as_claimed_passes() -> None:
    assert gate(mma("m16n8k16", "f16", "f32", 4, 2)) is None
    assert gate(mma("m16n8k16", "f16", "f16", 4, 2), "fp16") is None
    assert gate(wgmma(64, "bf16", "f32")) is None


@pytest.mark.parametrize("text", [mma("m16n8k16", "f16", "f16", 4, 2), wgmma(64, "f16", "f16")])
def test_fp16_accumulation_under_an_fp32_claim_is_rejected(text: str) -> None:
    assert "accumulates in fp16, the source claims fp32" in str(gate(text, "fp32"))


def test_one_fp16_instruction_among_fp32_ones_is_rejected() -> None:
    honest = mma("m16n8k16", "f16", "f32", 4, 2)
    liar = mma("m16n8k16", "f16", "f16", 4, 2).replace("probe(", "other(")
    assert "accumulates in fp16 and fp32" in str(gate(honest + "\n" + liar))


def test_eight_bit_operands_are_rejected() -> None:
    assert "QGMMA" in str(gate(wgmma(64, "e4m3", "f32")))


def test_no_matrix_instruction_is_rejected() -> None:
    assert "no matrix instruction" in str(gate('extern "C" __global__ void probe(float* o) { *o = 1; }'))


def test_spills_and_local_memory_are_rejected() -> None:
    src, cubin = build(mma("m16n8k16", "f16", "f32", 4, 2))
    spilling = dataclasses.replace(cubin, spill_bytes=8)
    assert "spill 8 bytes" in str(check_static(cubin.facts, src, spilling))
    assert "local memory" in str(check_static(dataclasses.replace(cubin.facts, stl=1), src, cubin))


@pytest.mark.parametrize("cut", [0, 3, 63, 200])
def test_damaged_image_is_a_compile_error(cut: int) -> None:
    image = build(mma("m16n8k16", "f16", "f32", 4, 2))[1].image
    with pytest.raises(CompileError, match="no cubin"):
        sass_facts(image[:cut])


def test_missing_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass.sys, "path", [])
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    sass.find_nvdisasm.cache_clear()
    try:
        with pytest.raises(ToolchainMissing, match="pip install"):
            sass.find_nvdisasm()
    finally:
        sass.find_nvdisasm.cache_clear()
