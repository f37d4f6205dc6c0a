"""Reading of ELF files that are built here byte by byte: each limit, and one past it."""

from __future__ import annotations

import struct

import pytest

from outblas.core.errors import CompileError
from outblas_lab.jail.elf import Section, called_on_gpu, cubins, dynamic_symbols, fat_binaries, kept_bytes, sections

PROGBITS, SYMTAB, STRTAB, NOBITS, DYNSYM = 1, 2, 3, 8, 11
CUDA, X86 = 190, 62
MAGIC = struct.pack("<I", 0xBA55ED50)


def elf(*parts, machine=CUDA, table_first=False, names=None, programs=(0, 0, 0)):
    """An ELF file of sections (name, kind, data or (data, size), link); the last section is the table of names."""
    text = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in parts) + b".names\0"
    given = [*parts, (".names", STRTAB, text, 0)]
    entry, count = 64, len(given)
    at = 64 + (entry * count if table_first else 0)
    rows, body, name_at = b"", b"", 1
    for name, kind, data, link in given:
        data, size = data if isinstance(data, tuple) else (data, len(data))
        flags = 2 if name.startswith(".nv.") else 0  # loaded
        rows += struct.pack("<IIQQQQIIQQ", name_at, kind, flags, 0, at + len(body), size, link, 0, 0, 0)
        name_at += len(name) + 1
        body += data
    table = 64 if table_first else at + len(body)
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", head, 18, machine)
    struct.pack_into("<QQ", head, 0x20, programs[0], table)
    last = count - 1 if names is None else names
    struct.pack_into("<HHHHH", head, 0x36, programs[1], programs[2], entry, count, last)
    return bytes(head) + (rows + body if table_first else body + rows)


def symbol(name, index=1, other=0):
    return struct.pack("<IBBHQQ", name, 0, other, index, 0, 0)


def with_symbols(*rows, kind=DYNSYM, names=b"\0malloc\0gemm\0", link=1, size=None):
    data = b"".join(rows)
    return elf((".sym", kind, (data, len(data) if size is None else size), link), (".str", STRTAB, names, 0))


@pytest.mark.parametrize("at", [0, 7])
def test_sections_are_those_of_the_table_wherever_the_file_begins(at):
    image = b"x" * at + elf((".a", PROGBITS, b"12345", 2), (".bss", NOBITS, (b"", 99), 0))
    found = sections(image, at)
    assert found[0] == Section(".a", PROGBITS, 0, at + 64, 5, 2)
    assert found[1] == Section(".bss", NOBITS, 0, at + 69, 99, 0)
    assert [each.name for each in found] == [".a", ".bss", ".names"] and image[found[0].offset :][:5] == b"12345"


@pytest.mark.parametrize(("names", "count"), [(1, 2), (2, 0), (65535, 0)])
def test_without_a_table_of_names_there_are_no_sections(names, count):
    assert len(sections(elf((".a", PROGBITS, b"", 0), names=names))) == count


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01\x01" + b"\0" * 90, elf()[:70], b"\x7fELF\x02\x01"])
def test_what_is_no_file_of_64_bits_is_refused(image):
    with pytest.raises(CompileError, match="cannot be read"):
        sections(image)


def test_symbols_are_asked_for_or_offered_by_their_index_and_visibility():
    rows = [symbol(0, 0), symbol(1, 0), symbol(1, 0, 2), symbol(8), symbol(8, 1, 1), symbol(8, 1, 2), symbol(8, 7, 3)]
    assert dynamic_symbols(with_symbols(*rows)) == (["malloc", "malloc"], ["gemm", "gemm"])
    assert dynamic_symbols(with_symbols(symbol(8, 1, 4 | 1), symbol(8, 1, 4))) == ([], ["gemm"])
    assert called_on_gpu(with_symbols(*rows)) == [], "those of a cubin are in its other table"
    assert called_on_gpu(with_symbols(*rows, kind=SYMTAB)) == ["malloc", "malloc"]
    assert dynamic_symbols(with_symbols(*rows, kind=SYMTAB)) == ([], [])


@pytest.mark.parametrize(("size", "count"), [(23, 0), (24, 1), (47, 1), (48, 2)])
def test_half_a_symbol_is_none(size, count):
    assert len(dynamic_symbols(with_symbols(symbol(8), symbol(8), size=size))[1]) == count


def test_a_table_whose_names_are_nowhere_is_passed_over():
    assert dynamic_symbols(with_symbols(symbol(1), link=2))[1] == [".sym"], "of the last section"
    assert dynamic_symbols(with_symbols(symbol(1), link=3)) == ([], [])


def test_the_number_of_symbols_and_the_length_of_a_name_are_limited():
    full = b"\0" * 24 * 65536
    assert dynamic_symbols(with_symbols(full)) == ([], [])
    with pytest.raises(CompileError, match="more than 65536 symbols"):
        dynamic_symbols(with_symbols(full, b"\0"))
    longest = b"n" * 4095
    assert dynamic_symbols(with_symbols(symbol(1), names=b"\0" + longest + b"\0"))[1] == [longest.decode()]
    with pytest.raises(CompileError, match="cannot be read"):
        dynamic_symbols(with_symbols(symbol(1), names=b"\0n" + longest + b"\0"))


@pytest.mark.parametrize("table_first", [False, True])
def test_each_device_image_is_cut_at_its_last_section_or_table(table_first):
    first = elf((".text", PROGBITS, b"1" * 100, 0), (".bss", NOBITS, (b"", 1 << 30), 0), table_first=table_first)
    second = elf((".text", PROGBITS, b"2" * 33, 0), table_first=table_first)
    host = elf((".text", PROGBITS, b"3", 0), machine=X86)
    assert cubins(b"ab" + first + host + b"cde" + second) == [first, second]


def test_a_device_image_reaches_to_the_end_of_its_program_headers():
    image = elf((".text", PROGBITS, b"1", 0), programs=(400, 56, 2))
    padded = image + b"\0" * (400 + 112 - len(image))
    assert cubins(padded + b"rest") == [padded]
    nowhere = elf((".text", PROGBITS, b"1", 0), programs=(0, 56, 200))
    assert cubins(nowhere + b"rest") == [nowhere], "no program headers at offset 0"


@pytest.mark.parametrize("table_first", [False, True])
def test_images_may_not_overlap(table_first):
    inner = elf((".text", PROGBITS, b"2" * 40, 0))
    outer = elf((".text", PROGBITS, inner, 0), table_first=table_first)
    with pytest.raises(CompileError, match="overlap"):
        cubins(outer)


def test_sixty_four_images_are_taken_and_one_more_is_not():
    image = elf()
    assert len(cubins(image * 64)) == 64
    with pytest.raises(CompileError, match="too many"):
        cubins(image * 65)


def test_only_the_compilers_own_fat_binary_does_not_count():
    def hidden(*parts):
        return fat_binaries(elf(*parts, machine=X86))

    assert hidden((".data", PROGBITS, b"none", 0)) == 0
    assert hidden((".nv_fatbin", PROGBITS, MAGIC, 0), ("__nv_relfatbin", PROGBITS, MAGIC, 0)) == 0
    assert hidden((".nv_fatbin", PROGBITS, MAGIC + MAGIC, 0)) == 1
    assert hidden((".nv_fatbin", PROGBITS, MAGIC, 0), (".data", PROGBITS, b"x" + MAGIC + MAGIC, 0)) == 2
    with pytest.raises(CompileError):
        fat_binaries(MAGIC)


def test_variables_of_a_device_image_are_those_of_both_sections():
    image = elf(
        (".nv.global", NOBITS, (b"", 1000), 0), (".nv.global.init", PROGBITS, b"1234567", 0), (".text", 1, b"1", 0)
    )
    assert kept_bytes(image) == 1007 and kept_bytes(elf()) == 0
