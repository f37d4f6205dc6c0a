"""TMA descriptors: descriptions of a matrix in global memory that is read or written in boxes."""

from __future__ import annotations

import functools
from typing import Any

from outblas.core.problem import ELEMENT_BYTES
from outblas.runtime.driver import check, driver

#: The driver's names: dtype -> element type, and bytes of a box's row -> swizzle.
KINDS = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}
SWIZZLES = {16: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@functools.lru_cache(maxsize=8192)
def encode_map(address: int, rows: int, cols: int, box_rows: int, box_cols: int, dtype: str) -> Any:
    """Return the descriptor (CUtensorMap) of a row-major matrix that is accessed in boxes whose row is one swizzle
    span.

    It depends only on the arguments, so it is cached. Example: ``encode_map(a.data_ptr(), m, k, 128, 64, "fp16")`` has
    boxes of 128 rows of 64 elements, which are 128 bytes.

    Args:
        address: device address.
        rows: rows of the matrix.
        cols: columns of the matrix.
        box_rows: rows of a box.
        box_cols: columns of a box: 8, 16, 32 or 64. Its row then has 16, 32, 64 or 128 bytes. KeyError for another.
        dtype: ``fp16`` or ``bf16``.

    Raises:
        DeviceError: the driver refused it.
    """
    return encode_boxes(address, (rows, cols), (box_rows, box_cols), dtype, SWIZZLES[box_cols * ELEMENT_BYTES])


def encode_boxes(address: int, extents: tuple[int, int], box: tuple[int, int], dtype: str, swizzle: str) -> Any:
    """Return the descriptor (CUtensorMap) of a row-major matrix.

    Args:
        address: device address.
        extents: (rows, columns) of the matrix.
        box: (rows, columns) of a box.
        dtype: ``fp16`` or ``bf16``.
        swizzle: suffix of the driver's enumeration: ``NONE``, ``32B``, ``64B`` or ``128B``.

    Raises:
        DeviceError: the driver refused it.
    """
    cu = driver()
    (rows, cols), (box_rows, box_cols) = extents, box
    kind, swizzled, promotion = map_kinds(dtype, swizzle)
    result = cu.cuTensorMapEncodeTiled(
        kind,
        2,
        address,
        [cu.cuuint64_t(cols), cu.cuuint64_t(rows)],
        [cu.cuuint64_t(cols * ELEMENT_BYTES)],
        [cu.cuuint32_t(box_cols), cu.cuuint32_t(box_rows)],
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzled,
        promotion,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return check(f"cuTensorMapEncodeTiled({rows}x{cols} in boxes of {box_rows}x{box_cols})", result)


def map_kinds(dtype: str, swizzle: str) -> tuple[Any, Any, Any]:
    """Return (element type, swizzle, L2 promotion) of a TMA map as the driver's enumerations.

    Example: ``map_kinds("fp16", "128B")`` returns members with the values 6, 3 and 3.

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
