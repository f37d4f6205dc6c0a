"""nvdisasm on the machine code of many kernels in one start.

A start takes half a second of processor time, whatever there is to read. Instructions read the same behind those of
other kernels; only branches name places in the whole.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from outblas.core.errors import CompileError
from outblas.runtime.cubin import Cubin, SassFacts
from outblas.runtime.sass import _code_sections, _facts, find_nvdisasm

Key = TypeVar("Key", bound=Hashable)
#: A line of disassembly: offset, optional predicate, opcode with modifiers.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_BYTES = 16
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.M)


@dataclass(frozen=True)
class Code:
    """Instructions of one kernel, in order.

    Attributes:
        texts: with predicates and operands.
        first: where the first one stands in the whole that branches count in, in instructions.
    """

    texts: tuple[str, ...]
    first: int

    @property
    def opcodes(self) -> list[str]:
        """With their modifiers, as ``HMMA.16816.F32.BF16``."""
        return [_INSTRUCTION.match(f"/*0000*/ {text}")[1] for text in self.texts]  # type: ignore[index]

    def target(self, text: str) -> int | None:
        """Return the index of a plain branch's target; None for any other instruction."""
        found = re.search(r"\bBRA 0x([0-9a-f]+)", text)
        return int(found[1], 16) // _BYTES - self.first if found else None


class Together(Generic[Key]):
    """Kernels by key, all compiled and disassembled at the first request.

    Args:
        build: compiles the kernel of a key. Its exception is raised again when that key is requested.
        keys: the expected keys; another key is disassembled alone.
    """

    def __init__(self, build: Callable[[Key], Cubin], keys: Iterable[Key]) -> None:
        self._build, self._ahead = build, list(keys)
        self._found: dict[Key, tuple[Cubin, Code] | BaseException] = {}

    def __getitem__(self, key: Key) -> tuple[Cubin, Code]:
        if key not in self._found:
            self._read([*self._ahead, key])
            self._ahead = []
        found = self._found[key]
        if isinstance(found, BaseException):
            raise found
        return found

    def _read(self, keys: list[Key]) -> None:
        built: dict[str, dict[Key, Cubin]] = {}
        for key in dict.fromkeys(keys):
            try:
                cubin = self._build(key)
            except (Exception, pytest.skip.Exception) as error:
                self._found[key] = error
            else:
                built.setdefault(cubin.arch, {})[key] = cubin
        for arch, cubins in built.items():
            codes = disassembled(arch, [cubin.image for cubin in cubins.values()])
            self._found |= zip(cubins, zip(cubins.values(), codes, strict=True), strict=True)


def disassembled(arch: str, images: Iterable[bytes]) -> list[Code]:
    """The code of cubins for one architecture, in one start."""
    parts = [b"".join(_code_sections(image)) for image in images]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(parts))
        file.flush()
        command = [find_nvdisasm(), "-b", arch.replace("sm_", "SM"), "-c", "-raw", "-ndf", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    texts = _LINE.findall(done.stdout)
    assert _BYTES * len(texts) == sum(map(len, parts)), "every instruction is a line"
    codes, first = [], 0
    for part in parts:
        codes.append(Code(tuple(texts[first : first + len(part) // _BYTES]), first))
        first += len(part) // _BYTES
    return codes


def cases(request: pytest.FixtureRequest, function: str) -> list[dict[str, Any]]:
    """Arguments of each selected case of a function of the module at hand."""
    return [
        dict(item.callspec.params)  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path and getattr(item, "originalname", "") == function
    ]


def disassembled_facts(image: bytes) -> SassFacts:
    """Return the same facts from nvdisasm, one process per cubin: the reference for :func:`sass_facts`.

    Raises:
        ToolchainMissing: nvdisasm was not found.
        CompileError: nvdisasm cannot read the image.
    """
    return facts_of_opcodes(opcodes_of(image))


def facts_of_opcodes(opcodes: Iterable[str]) -> SassFacts:
    """Return the facts of a sequence of opcodes such as ``HMMA.16816.F32.BF16``.

    Example: ``["HGMMA.64x128x16.F32", "LDL.64"]`` gives ``hgmma`` 1, ``ldl`` 1, all other counts 0 and ``accumulators``
    ``("fp32",)``. A matrix instruction without ``F32`` counts as ``fp16``.
    """
    counts: Counter[str] = Counter()
    widths: set[str] = set()
    for opcode in opcodes:
        base, *modifiers = opcode.split(".")
        counts[base] += 1
        if base in ("HGMMA", "HMMA", "QGMMA"):
            widths.add("fp32" if "F32" in modifiers else "fp16")
    return _facts(counts, widths)


def opcodes_of(image: bytes) -> list[str]:
    """Return the opcodes with modifiers, in order."""
    return _INSTRUCTION.findall(disassemble(image))


def disassemble(image: bytes) -> str:
    """Return nvdisasm's output, a text with one label or instruction per line. Raises as :func:`disassembled_facts`."""
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([tool, "-c", "-raw", "-ndf", file.name], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(
            f"nvdisasm failed ({done.returncode}): {done.stderr.strip()[:200]}", "a readable cubin", "recompile it"
        )
    return done.stdout
