"""The SASS facts are held against nvdisasm for every kind of matrix instruction, and gate 1 against liars."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

pytest.importorskip("cuda.bindings")

from outblas.core.errors import CompileError, ToolchainMissing  # noqa: E402
from outblas.kernels.source import Source  # noqa: E402
from outblas.runtime import sass  # noqa: E402
from outblas.runtime.cubin import SassFacts  # noqa: E402
from outblas.runtime.nvrtc import Cubin, compile_source  # noqa: E402
from outblas.runtime.sass import check_static, other_products, sass_facts  # noqa: E402
from support.disassembly import Together, cases, disassembled_facts, facts_of_opcodes, opcodes_of  # noqa: E402

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


def integer_mma(shape: str, operand: str, tail: str = "") -> str:
    """A kernel with one mma.sync of integers."""
    d, a, b = "%0,%1,%2,%3", "%4,%4,%4,%4", "%4,%4"
    return f"""extern "C" __global__ void probe(int* o, int x) {{
  int d[4] = {{x, x, x, x}};
  asm volatile("mma.sync.aligned.{shape}.row.col.s32.{operand}.{operand}.s32{tail} {{{d}}},{{{a}}},{{{b}}},{{{d}}};"
    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(x));
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = d[i]; }}"""


def integer_wgmma(k: int, operand: str, tail: str = "") -> str:
    """A kernel with one wgmma of integers."""
    d = "%0,%1,%2,%3"
    return f"""extern "C" __global__ void __launch_bounds__(128) probe(int* o, int x, unsigned long long at) {{
  int d[4] = {{x, x, x, x}};
  asm volatile("wgmma.fence.sync.aligned;");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k{k}.s32.{operand}.{operand}{tail} {{{d}}}, %4, %4, 1;"
    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "l"(at));
  asm volatile("wgmma.commit_group.sync.aligned;"); asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = d[i]; }}"""


def sparse_mma(shape: str, operand: str, acc: str, b_regs: int) -> str:
    """A kernel with one mma.sync of a sparse A."""
    dense = mma(shape, operand, acc, b_regs, b_regs).replace("mma.sync", "mma.sp::ordered_metadata.sync")
    last = (4 if acc == "f32" else 2) + 2 * b_regs
    return dense.replace('};" :', f'}},%{last},0x0;" :').replace(
        f'"r"(a[{2 * b_regs - 1}])', f'"r"(a[{2 * b_regs - 1}]),"r"(a[30])'
    )


def sparse_wgmma(operand: str, acc: str) -> str:
    """A kernel with one wgmma of a sparse A."""
    count = 32 if acc == "f32" else 16
    dense = wgmma(64, operand, acc).replace("mma_async.sync", "mma_async.sp.sync").replace("k16", "k32")
    return dense.replace(f'%{count + 1}, "', f'%{count + 1}, %{count + 2}, 0, "').replace(
        '"l"(db)', '"l"(db),"r"(a[9])'
    )


DOUBLE = """extern "C" __global__ void probe(double* o, double x) { double d = x, e = x;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%2},{%0,%1};"
    : "+d"(d), "+d"(e) : "d"(x));
  o[threadIdx.x] = d + e; }"""

#: name: (text, arch, mnemonic). Each multiplies other matrices than dense ones of 16 bits.
OTHER = {
    "mma s8": (integer_mma("m16n8k32", "s8"), "sm_90a", "IMMA"),
    "mma u8 sm_80": (integer_mma("m16n8k32", "u8"), "sm_80", "IMMA"),
    "mma s4": (integer_mma("m16n8k64", "s4"), "sm_90a", "IMMA"),
    "mma b1": (integer_mma("m16n8k256", "b1", ".and.popc"), "sm_90a", "BMMA"),
    "mma f64": (DOUBLE, "sm_90a", "DMMA"),
    "mma e4m3 sm_89": (mma("m16n8k32", "e4m3", "f32", 4, 2), "sm_89", "QMMA"),
    "mma e4m3": (mma("m16n8k32", "e4m3", "f32", 4, 2), "sm_90a", "F2FP of 8-bit floats"),
    "mma e5m2": (mma("m16n8k32", "e5m2", "f32", 4, 2), "sm_90a", "F2FP of 8-bit floats"),
    "mma e4m3 f16": (mma("m16n8k16", "e4m3", "f16", 2, 1), "sm_90a", "F2FP of 8-bit floats"),
    "wgmma s8": (integer_wgmma(32, "s8"), "sm_90a", "IGMMA"),
    "wgmma b1": (integer_wgmma(256, "b1", ".and.popc"), "sm_90a", "BGMMA"),
    "wgmma e4m3": (wgmma(64, "e4m3", "f32"), "sm_90a", "QGMMA"),
    "sparse mma": (sparse_mma("m16n8k32", "f16", "f32", 4), "sm_90a", "HMMA.SP"),
    "sparse mma bf16 sm_80": (sparse_mma("m16n8k16", "bf16", "f32", 2), "sm_80", "HMMA.SP"),
    "sparse wgmma": (sparse_wgmma("bf16", "f32"), "sm_90a", "HGMMA.SP"),
    "sparse wgmma f16": (sparse_wgmma("f16", "f16"), "sm_90a", "HGMMA.SP"),
}


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
        assert opcodes_of(cubin.image) == code.opcodes
        assert disassembled_facts(cubin.image) == sass_facts(cubin.image)


@pytest.mark.parametrize("name", OTHER)
def test_other_products_are_counted_as_nvdisasm_shows_them(name: str) -> None:
    text, arch, mnemonic = OTHER[name]
    image = build(text, arch=arch)[1].image
    found = other_products(image)
    try:
        opcodes = opcodes_of(image)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    first, _, rest = mnemonic.partition(".")
    shown = [each for each in opcodes if each.startswith(mnemonic if rest else first.split()[0] + ".")]
    if mnemonic.startswith("F2FP"):
        shown = [each for each in shown if "E4M3" in each or "E5M2" in each]
    assert found == {mnemonic: len(shown)} and shown


@pytest.mark.parametrize("name", [name for name in PROBES if "e4m3" not in name])
def test_dense_products_of_16_bits_are_no_others(name: str) -> None:
    text, arch, _, _ = PROBES[name]
    assert other_products(build(text, arch=arch)[1].image) == {}


def test_conversions_to_16_bits_and_products_of_tf32_are_no_others() -> None:
    narrow = """extern "C" __global__ void probe(unsigned* o, float* f, float g) { unsigned r;
      asm volatile("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(f[0]), "f"(g)); o[0] = r;
      asm volatile("cvt.rz.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(g), "f"(-f[1])); o[1] = r;
      asm volatile("cvt.rn.relu.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(f[2]), "f"(f[3])); o[2] = r; }"""
    for arch in ("sm_80", "sm_90a"):
        assert other_products(build(narrow, arch=arch)[1].image) == {}
        assert other_products(build(mma("m16n8k8", "tf32", "f32", 4, 2), arch=arch)[1].image) == {}


def test_opcode_text() -> None:
    facts = facts_of_opcodes(["HFMA2.MMA", "HMMA.16816.F32.BF16", "HMMA.1688.F16", "LDL.LU", "LDGSTS.E.BYPASS.128"])
    assert facts == SassFacts(0, 2, 0, 0, 0, 1, 0, 1, ("fp16", "fp32"))


def test_accumulator_as_claimed_passes() -> None:
    assert gate(mma("m16n8k16", "f16", "f32", 4, 2)) is None
    assert gate(mma("m16n8k16", "f16", "f16", 4, 2), "fp16") is None
    assert gate(wgmma(64, "bf16", "f32")) is None


@pytest.mark.parametrize("text", [mma("m16n8k16", "f16", "f16", 4, 2), wgmma(64, "f16", "f16")])
def test_fp16_accumulation_under_an_fp32_claim_is_rejected(text: str) -> None:
    assert "accumulates in fp16, but the source claims fp32" in str(gate(text, "fp32"))


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
    with pytest.raises(CompileError, match="not a cubin"):
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
