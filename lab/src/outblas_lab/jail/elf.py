"""Read the parts of ELF that the check of a shared object needs: sections, symbols, and the cubins inside it."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from outblas.core.errors import CompileError

_MAGIC = b"\x7fELF\x02\x01"
_EM_CUDA = 190
_ALLOCATED, _CODE = 2, 4  # SHF_ALLOC, SHF_EXECINSTR
#: Sections that are loaded for one launch only, or that hold addresses: shared memory, parameters, symbols' addresses.
_NOT_KEPT = re.compile(r"\.nv\.(?:shared\..+|constant0\..+|constant4)")
#: Kinds of records in ``.nv.info``: a frame of a function, the stack of a kernel with its callees.
_FRAME_BYTES, _STACK_BYTES, _SIZED = 0x11, 0x12, 4
_SYMTAB, _DYNSYM, _NOBITS, _UNDEFINED = 2, 11, 8, 0
_HIDDEN = (1, 2)  # STV_INTERNAL, STV_HIDDEN
#: Letters of a name; more are no name. Symbols, and device images, of one library.
_NAME_BYTES, _SYMBOLS, _IMAGES = 4096, 1 << 16, 64


class Section(NamedTuple):
    """A section of an ELF file.

    Attributes:
        kind: sh_type.
        flags: sh_flags.
        offset: position in the bytes that :func:`sections` was given.
        size: length in memory, bytes.
        link: sh_link, the index of a related section.
    """

    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int


def sections(image: bytes, at: int = 0) -> list[Section]:
    """Return the sections of the 64-bit little-endian ELF file that begins at offset ``at``, in the order of its table.

    The result is a list of :class:`Section`. The first one has the name "" as a rule. Without a table of names the list
    is empty.

    Raises:
        CompileError: no such file begins there. Empty bytes are no such file.
    """
    try:
        if image[at : at + 6] != _MAGIC:
            raise ValueError("not an ELF file")
        (table,) = struct.unpack_from("<Q", image, at + 0x28)
        entry, count, names = struct.unpack_from("<HHH", image, at + 0x3A)
        raw = [struct.unpack_from("<IIQQQQI", image, at + table + i * entry) for i in range(count)]
        if names >= len(raw):
            return []
        text = at + raw[names][4]
        return [
            Section(_name(image, text + n), k, flags, at + off, size, link) for n, k, flags, _, off, size, link in raw
        ]
    except (struct.error, ValueError, IndexError) as error:
        raise _unreadable(error) from error


def dynamic_symbols(image: bytes) -> tuple[list[str], list[str]]:
    """Return the dynamic symbols of a shared object.

    Returns:
        (names that it needs from other libraries, names that it offers), two lists of text. Hidden symbols are not
        offered. Example: ``(["malloc"], ["outblas_launch"])``.

    Raises:
        CompileError: the object cannot be read, or has more than 65,536 symbols.
    """
    return _symbols(image, _DYNSYM)


def called_on_gpu(cubin: bytes) -> list[str]:
    """Return the names that a cubin leaves to the driver, e.g. ``["vprintf"]`` for a kernel that prints.

    Raises:
        CompileError: it cannot be read, or has more than 65,536 symbols.
    """
    asked, _ = _symbols(cubin, _SYMTAB)
    return asked


def _symbols(image: bytes, kind: int) -> tuple[list[str], list[str]]:
    """Names that the symbol tables of a kind leave open, and those that they define."""
    asked: list[str] = []
    offered: list[str] = []
    found = sections(image)
    try:
        for section in found:
            if section.kind != kind or section.link >= len(found):
                continue
            if section.size > 24 * _SYMBOLS:
                raise ValueError(f"more than {_SYMBOLS} symbols")
            for at in range(section.offset, section.offset + section.size - 23, 24):
                name, _, other, index = struct.unpack_from("<IBBH", image, at)
                where = asked if index == _UNDEFINED else offered
                if name and (where is asked or other & 3 not in _HIDDEN):
                    where.append(_name(image, found[section.link].offset + name))
    except (struct.error, ValueError) as error:
        raise _unreadable(error) from error
    return asked, offered


def cubins(image: bytes) -> list[bytes]:
    """Return every CUDA ELF file in the bytes, in order: a cubin itself, or those inside a shared object.

    Raises:
        CompileError: one cannot be read, two overlap, or there are more than 64.
    """
    found, total, at = [], 0, image.find(_MAGIC)
    while at >= 0:
        if image[at + 18 : at + 20] == struct.pack("<H", _EM_CUDA):
            found.append(image[at : at + _extent(image, at)])
            total += len(found[-1])
            if total > len(image) or len(found) > _IMAGES:
                raise _unreadable("overlapping or too many device images")
        at = image.find(_MAGIC, at + 1)
    return found


def fat_binaries(image: bytes) -> int:
    """Return the number of fat binaries (magic 0xBA55ED50) in an ELF file that nvcc has not put there; 0 as a rule.

    The one at the beginning of section ``.nv_fatbin`` or ``__nv_relfatbin`` is nvcc's own and does not count.

    Raises:
        CompileError: ``image`` is no ELF file.
    """
    given = [s.offset for s in sections(image) if s.name in (".nv_fatbin", "__nv_relfatbin")]
    magic, count = struct.pack("<I", 0xBA55ED50), 0
    at = image.find(magic)
    while at >= 0:
        count += at not in given
        at = image.find(magic, at + 1)
    return count


def kept_bytes(cubin: bytes) -> int:
    """Return the bytes of a cubin's variables that live from launch to launch; 0 without any.

    These are ``__device__``, ``__managed__`` and ``__constant__`` variables, and the compiler's texts and tables. Every
    loaded section counts, except code and what each launch makes anew.

    Raises:
        CompileError: it cannot be read.
    """
    loaded = [s for s in sections(cubin) if s.flags & (_ALLOCATED | _CODE) == _ALLOCATED]
    return sum(s.size for s in loaded if not _NOT_KEPT.fullmatch(s.name))


def stack_bytes(cubin: bytes) -> int:
    """Return the bytes of local memory that the largest kernel of a cubin asks of the driver for each thread.

    Callees count. A recursive function counts 0: it gets the driver's default.

    Raises:
        CompileError: it cannot be read.
    """
    largest = 0
    try:
        for section in sections(cubin):
            if section.name != ".nv.info":
                continue
            at, end = section.offset, section.offset + section.size
            while at < end:
                form, kind, size = struct.unpack_from("<BBH", cubin, at)
                if form == _SIZED and kind in (_FRAME_BYTES, _STACK_BYTES):
                    largest = max(largest, struct.unpack_from("<II", cubin, at + 4)[1])
                at += 4 + (size if form == _SIZED else 0)
    except struct.error as error:
        raise _unreadable(error) from error
    return largest


def _extent(image: bytes, at: int) -> int:
    """Bytes of the file that begins at ``at``: to the end of its last section or table."""
    try:
        (programs, table) = struct.unpack_from("<QQ", image, at + 0x20)
        size, count, entry, number = struct.unpack_from("<HHHH", image, at + 0x36)
    except struct.error as error:
        raise _unreadable(error) from error
    ends = [table + entry * number, programs + size * count if programs else 0]
    ends += [s.offset - at + s.size for s in sections(image, at) if s.kind != _NOBITS]
    return max(ends)


def _name(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at, at + _NAME_BYTES)].decode(errors="replace")


def _unreadable(why: object) -> CompileError:
    return CompileError(f"the object cannot be read ({why})", "a 64-bit ELF file", "recompile it")
