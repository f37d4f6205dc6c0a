"""A small interpreter of the classic BPF that seccomp runs, for filters of machines that are not here."""

from __future__ import annotations

import struct

_LOAD, _RETURN, _AND, _JUMP = 0x20, 0x06, 0x54, 0x05
_JUMPS = {
    0x15: lambda loaded, value: loaded == value,
    0x35: lambda loaded, value: loaded >= value,
    0x45: lambda loaded, value: bool(loaded & value),
}


def run(program: bytes, audit: int, call: int, arguments: tuple[int, ...] = ()) -> int:
    """Return the filter's result for a system call.

    Raises:
        ValueError: the program has an unknown instruction, or runs past its end.
    """
    given = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<IIQ6Q", call & 0xFFFFFFFF, audit, 0, *given)
    code = list(struct.iter_unpack("<HBBI", program))
    at = loaded = 0
    while at < len(code):
        kind, yes, no, value = code[at]
        at += 1
        if kind == _LOAD:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif kind == _AND:
            loaded &= value
        elif kind == _JUMP:
            at += value
        elif kind in _JUMPS:
            at += yes if _JUMPS[kind](loaded, value) else no
        elif kind == _RETURN:
            return int(value)
        else:
            raise ValueError(f"instruction {kind:#x}")
    raise ValueError("past the end")
