"""Facts about a cubin's machine code: instruction counts and accumulator types.

Gate 1 of the proof uses them: the accumulator is read from the SASS, not from the source.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from outblas.core.errors import CompileError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.runtime.cubin import SassFacts

if TYPE_CHECKING:
    from outblas.kernels.source import Source
    from outblas.runtime.cubin import Cubin

#: The low nine bits of an instruction are its opcode (the three bits above encode the kinds of operands).
_OPCODE_MASK = 0x1FF
_OPCODES = {
    "HMMA": 0x03C, "LDL": 0x183, "STL": 0x187, "LDGSTS": 0x1AE, "UTMALDG": 0x1B4, "UTMASTG": 0x1B5, "HGMMA": 0x1F0,
    "QGMMA": 0x1F3,
}  # fmt: skip
#: Bit in an instruction's second word that means: accumulate in fp32.
_FP32_BIT = {_OPCODES["HMMA"]: 12, _OPCODES["HGMMA"]: 11, _OPCODES["QGMMA"]: 11}
#: Matrix instructions on 8-bit, 4-bit and 1-bit integers, 8-bit floats and fp64.
_OTHER_PRODUCTS = {
    0x037: "IMMA",
    0x03D: "BMMA",
    0x03F: "DMMA",
    0x07A: "QMMA",
    0x1F1: "IGMMA",
    0x1F2: "BGMMA",
    0x1F3: "QGMMA",
}
#: Bit in the second word of HMMA and HGMMA that means: A is sparse.
_SPARSE_BIT = 9
#: F2FP converts two floats; these bits of its second word are 0 unless one side has 8 bits.
_F2FP, _EIGHT_BIT_FLOATS = 0x03E, 0xF << 23
_INSTRUCTION_BYTES = 16
_EM_CUDA = 190
_SHF_EXECINSTR = 4


def sass_facts(image: bytes) -> SassFacts:
    """Return the facts of a cubin for sm_80 to sm_90a, decoded from its code sections. Needs no tool and no GPU.

    Example: ``sass_facts(cubin.image).accumulators`` is ``("fp32",)``, or ``()`` without matrix instructions.
    The encodings are not published; they were read off nvdisasm's output (``-hex``). Tests compare this function with
    nvdisasm for every kind of instruction that it counts.

    Raises:
        CompileError: the image is no cubin.
    """
    counts: Counter[int] = Counter()
    widths: set[str] = set()
    for code in _code_sections(image):
        words = struct.unpack(f"<{len(code) // 8}Q", code)
        for low, high in zip(words[::2], words[1::2], strict=True):
            opcode = low & _OPCODE_MASK
            counts[opcode] += 1
            if opcode in _FP32_BIT:
                widths.add("fp32" if high >> _FP32_BIT[opcode] & 1 else "fp16")
    named = {name: counts[code] for name, code in _OPCODES.items()}
    return _facts(named, widths)


def other_products(image: bytes) -> dict[str, int]:
    """Count the instructions of a cubin for sm_80 to sm_90a that multiply other matrices than dense ones of 16 bits.

    Conversions from and to 8-bit floats count, because the compiler makes ``mma.sync`` of e4m3 an HMMA behind them.
    tf32 does not count: every fp16 and bf16 value is exact in it.

    Example: ``{}`` for a half-precision kernel, ``{"IMMA": 4}`` for one of int8.

    Returns:
        Mnemonic -> count. The keys are ``IMMA``, ``BMMA``, ``DMMA``, ``QMMA``, ``IGMMA``, ``BGMMA``, ``QGMMA``,
        ``HMMA.SP``, ``HGMMA.SP`` and ``F2FP of 8-bit floats``; those with a count of 0 are absent.

    Raises:
        CompileError: the image is no cubin.
    """
    dense = {_OPCODES[name]: f"{name}.SP" for name in ("HMMA", "HGMMA")}
    found: Counter[str] = Counter()
    for code in _code_sections(image):
        words = struct.unpack(f"<{len(code) // 8}Q", code)
        for low, high in zip(words[::2], words[1::2], strict=True):
            opcode = low & _OPCODE_MASK
            if opcode in _OTHER_PRODUCTS:
                found[_OTHER_PRODUCTS[opcode]] += 1
            elif opcode in dense and high >> _SPARSE_BIT & 1:
                found[dense[opcode]] += 1
            elif opcode == _F2FP and high & _EIGHT_BIT_FLOATS:
                found["F2FP of 8-bit floats"] += 1
    return dict(found)


def check_static(facts: SassFacts, source: Source, cubin: Cubin) -> str | None:
    """Return why gate 1 rejects a cubin without running it; None if it passes.

    The accumulator in the SASS must be ``source.acc``. The SASS must have matrix instructions (HGMMA or HMMA, no
    QGMMA). Nothing may use local memory. Only the first reason is returned, e.g.
    ``the SASS accumulates in fp16, but the source claims fp32``.
    """
    if facts.qgmma:
        return f"the SASS multiplies in 8-bit precision ({facts.qgmma} QGMMA)"
    if facts.hgmma + facts.hmma == 0:
        return "no matrix instruction (HGMMA or HMMA) in the SASS"
    if facts.accumulators != (source.acc,):
        return f"the SASS accumulates in {' and '.join(facts.accumulators)}, but the source claims {source.acc}"
    if cubin.spill_bytes:
        return f"registers spill {cubin.spill_bytes} bytes to local memory"
    if facts.ldl or facts.stl:
        return f"the SASS uses local memory ({facts.ldl} LDL, {facts.stl} STL)"
    return None


def _facts(counts: Mapping[str, int], widths: set[str]) -> SassFacts:
    return SassFacts(
        **{field.name: counts.get(field.name.upper(), 0) for field in fields(SassFacts) if field.type == "int"},
        accumulators=tuple(sorted(widths)),
    )


def _code_sections(image: bytes) -> Iterator[bytes]:
    """Yield the bytes of every executable section of a 64-bit little-endian CUDA ELF file. Raises CompileError for
    others.
    """
    try:
        if image[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", image, 18)[0] != _EM_CUDA:
            raise ValueError("not a CUDA ELF file")
        (table,) = struct.unpack_from("<Q", image, 0x28)
        entry_bytes, count = struct.unpack_from("<HH", image, 0x3A)
        for index in range(count):
            flags, _, offset, size = struct.unpack_from("<4Q", image, table + index * entry_bytes + 8)
            if not flags & _SHF_EXECINSTR:
                continue
            if offset + size > len(image) or size % _INSTRUCTION_BYTES:
                raise ValueError("a code section is truncated")
            yield image[offset : offset + size]
    except (struct.error, ValueError) as error:
        raise CompileError(
            f"the image is not a cubin ({error})", "an ELF cubin for sm_80 to sm_90a", "recompile it"
        ) from error


@functools.cache
def find_nvdisasm() -> Path:
    """Return the path of nvdisasm: from the wheel, else on PATH, else in CUDA_HOME.

    Raises:
        ToolchainMissing: it was not found.
    """
    name = "nvdisasm.exe" if sys.platform == "win32" else "nvdisasm"
    for folder in sys.path:
        for found in sorted(Path(folder or ".", "nvidia").glob(f"*/bin/{name}")):
            if os.access(found, os.X_OK):
                return found
    home = os.environ.get("CUDA_HOME")
    found_text = shutil.which(name) or (shutil.which(name, path=os.path.join(home, "bin")) if home else None)
    if found_text:
        return Path(found_text)
    raise ToolchainMissing(
        "nvdisasm was not found", "the wheel nvidia-cuda-nvdisasm, or nvdisasm on PATH", install_hint("compile")
    )
