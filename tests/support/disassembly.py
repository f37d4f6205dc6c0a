"""nvdisasm on the machine code of many kernels in one start.

A start takes half a second of processor time, whatever there is to read. Instructions read the same behind those of
other kernels; only branches name places in the whole.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

from outblas.runtime.cubin import Cubin
from outblas.runtime.sass import _INSTRUCTION, _code_sections, find_nvdisasm

Key = TypeVar("Key", bound=Hashable)
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
