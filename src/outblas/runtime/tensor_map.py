"""TMA descriptors: descriptions of a matrix in global memory that is read or written in boxes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES
from outblas.kernels.geometry_terms import COMBS
from outblas.runtime.driver import check, driver

#: The driver's names: dtype -> element type, and bytes of a box's row -> swizzle.
KINDS = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}
SWIZZLES = {16: "NONE", 32: "32B", 64: "64B", 128: "128B"}
#: (rows, columns, box rows, box columns) of matrices, elements.
Boxes = Sequence[tuple[int, int, int, int]]
#: Bytes of a descriptor.
MAP_BYTES = 128


class Comb(NamedTuple):
    """Rows s, s + 8, s + 16, ... of a matrix, with the elements between the 16-byte boundary before a row and the row.

    Attributes:
        rows: number of rows.
        cols: columns, those elements included.
        pitch: elements from a row to the next.
        offset: bytes from the matrix to the first row's boundary.
    """

    rows: int
    cols: int
    pitch: int
    offset: int


def combs_of(rows: int, cols: int) -> tuple[Comb, ...]:
    """Return the eight combs of a row-major matrix, which begins at a multiple of 16 bytes.

    Example: ``combs_of(10, 9)`` begins with ``Comb(2, 9, 72, 0), Comb(2, 10, 72, 16)``. Row 1 is 18 bytes from the
    first, so one element lies between it and the boundary.

    Args:
        rows: rows of the matrix, 8 or more.
    """
    unit = ROW_ALIGN_BYTES // ELEMENT_BYTES
    found = []
    for s in range(COMBS):
        before = cols * s % unit
        found.append(Comb(-(-(rows - s) // COMBS), cols + before, COMBS * cols, (cols * s - before) * ELEMENT_BYTES))
    return tuple(found)


@functools.lru_cache(maxsize=8192)
def encode_map(address: int, rows: int, cols: int, box_rows: int, box_cols: int, dtype: str) -> Any:
    """Return the descriptor (CUtensorMap) of a row-major matrix that is accessed in boxes whose row is one swizzle
    span.

    It depends only on the arguments, so it is cached. Example: ``encode_map(a.data_ptr(), m, k, 128, 64, "fp16")`` has
    boxes of 128 rows of 64 elements, which are 128 bytes.

    Args:
        box_cols: columns of a box: 8, 16, 32 or 64. Its row then has 16, 32, 64 or 128 bytes. KeyError for another.
        dtype: ``fp16`` or ``bf16``.

    Raises:
        DeviceError: the driver refused it.
    """
    return encode_boxes(address, (rows, cols), (box_rows, box_cols), dtype, SWIZZLES[box_cols * ELEMENT_BYTES])


@functools.lru_cache(maxsize=1024)
def encode_combs(address: int, rows: int, cols: int, box_rows: int, box_cols: int, dtype: str) -> Any:
    """Return the descriptors of a matrix's eight combs (:func:`combs_of`), one after the other: a ctypes array.

    It is cached. Arguments and errors are those of :func:`encode_map`. A box has rows of one comb.
    """
    swizzle = SWIZZLES[box_cols * ELEMENT_BYTES]
    maps = [
        encode_boxes(address + comb.offset, comb[:2], (box_rows, box_cols), dtype, swizzle, comb.pitch)
        for comb in combs_of(rows, cols)
    ]
    made = (ctypes.c_ubyte * (COMBS * MAP_BYTES))()
    for i, each in enumerate(maps):
        ctypes.memmove(ctypes.addressof(made) + i * MAP_BYTES, each.getPtr(), MAP_BYTES)
    return made


def encode_operands(operands: Sequence[Any], boxes: Boxes, dtype: str, combs: int, turn: int = 0) -> list[Any]:
    """Return the descriptors of A, B and C: of :func:`encode_map`. With eight combs: :func:`encode_combs` of A and B.

    Args:
        boxes: (rows, columns, box rows, box columns) of those that have descriptors.
        combs: descriptors of each: 1 or 8.
        turn: that of B is of :func:`encode_turns` with this number of rows; 0: it is not.

    Raises:
        DeviceError: the driver refused one.
    """
    encode = encode_map if combs == 1 else encode_combs
    encoders = [encode, functools.partial(encode_turns, turn=turn) if turn else encode, encode]
    each = zip(encoders, operands, boxes, strict=False)
    return [encode(tensor.data_ptr(), *box, dtype) for encode, tensor, box in each]


@functools.lru_cache(maxsize=1024)
def encode_turns(address: int, rows: int, cols: int, box_rows: int, box_cols: int, dtype: str, turn: int = 1) -> Any:
    """Return the descriptor of a row-major matrix whose boxes take rows of its upper and its lower half by turns.

    With ``turn`` 1 it has three extents: columns, the two halves, and rows of a half. Row 2j of a box at row r is row
    r + j of the upper half, and row 2j + 1 that of the lower half. With more it has four: columns, rows of a turn, the
    two halves, and turns of a half. It is cached. Other arguments, and errors, are those of :func:`encode_map`.

    Args:
        turn: rows of the upper half that come before as many of the lower half. Twice of it divides ``rows`` and
            ``box_rows``.
    """
    half, swizzle, turns = rows // 2, SWIZZLES[box_cols * ELEMENT_BYTES], box_rows // 2 // turn
    if turn == 1:
        return encode_extents(address, (cols, 2, half), (half * cols, cols), (box_cols, 2, turns), dtype, swizzle)
    extents, pitches = (cols, turn, 2, half // turn), (cols, half * cols, turn * cols)
    return encode_extents(address, extents, pitches, (box_cols, turn, 2, turns), dtype, swizzle)


def described_maps(boxes: Boxes, dtype: str, combs: int) -> tuple[tuple[int, ...], ...]:
    """Return the descriptors of the operands as numbers: ``PreparedLaunch.maps`` of :mod:`outblas.runtime.launch`.

    Args:
        boxes: (rows, columns, box rows, box columns) of each; may be empty.
    """
    found: list[tuple[int, ...]] = []
    for rows, cols, *box in boxes:
        kinds = map_kinds(dtype, SWIZZLES[box[1] * ELEMENT_BYTES])
        if combs == 1:
            found.append((rows, cols, *box, *kinds))
        else:
            found += [(c.rows, c.cols, *box, *kinds, c.pitch, c.offset) for c in combs_of(rows, cols)]
    return tuple(found)


def encode_boxes(
    address: int, extents: tuple[int, int], box: tuple[int, int], dtype: str, swizzle: str, pitch: int | None = None
) -> Any:
    """Return the descriptor (CUtensorMap) of a row-major matrix.

    Args:
        extents: (rows, columns) of the matrix.
        box: (rows, columns) of a box.
        dtype: ``fp16`` or ``bf16``.
        swizzle: suffix of the driver's enumeration: ``NONE``, ``32B``, ``64B`` or ``128B``.
        pitch: elements from a row to the next; None: the columns.

    Raises:
        DeviceError: the driver refused it.
    """
    (rows, cols), (box_rows, box_cols) = extents, box
    return encode_extents(address, (cols, rows), (pitch or cols,), (box_cols, box_rows), dtype, swizzle)


def encode_extents(
    address: int, extents: Sequence[int], pitches: Sequence[int], box: Sequence[int], dtype: str, swizzle: str
) -> Any:
    """Return a descriptor; extents, pitches (elements, from the second extent on) and box have the innermost first."""
    cu = driver()
    kind, swizzled, promotion = map_kinds(dtype, swizzle)
    result = cu.cuTensorMapEncodeTiled(
        kind, len(extents), address, [cu.cuuint64_t(extent) for extent in extents],
        [cu.cuuint64_t(pitch * ELEMENT_BYTES) for pitch in pitches], [cu.cuuint32_t(extent) for extent in box],
        [cu.cuuint32_t(1)] * len(extents), cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled,
        promotion, cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    whole, part = ("x".join(map(str, reversed(each))) for each in (extents, box))
    return check(f"cuTensorMapEncodeTiled({whole} in boxes of {part})", result)


def map_kinds(dtype: str, swizzle: str) -> tuple[Any, Any, Any]:
    """Return (element type, swizzle, L2 promotion) of a TMA map as the driver's enumerations.

    Args:
        dtype: ``fp16`` or ``bf16``; KeyError for another.
        swizzle: suffix of the driver's enumeration, e.g. ``128B``; AttributeError for an unknown one.
    """
    cu = driver()
    return (
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{KINDS[dtype]}"),
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    )
