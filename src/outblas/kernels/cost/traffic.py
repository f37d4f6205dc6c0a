"""Bytes through HBM in the cost model of tiled families: tile order, L2 hints, ragged rows of C."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outblas.core.problem import ELEMENT_BYTES
from outblas.kernels.cost.terms import Columns, Floats, cluster_split


def traffic_bytes(
    x: Mapping[str, float], p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats
) -> Floats:
    """Return the bytes to and from HBM.

    Operands and result count once: 2 (M K + N K + M N). The operand that a band of tiles streams counts again for every
    further band, as far as L2 lost it. That is B if tiles walk along M (``raster_m`` above 0), else A. A band has
    ``group`` tiles; if one band has all tiles, nothing counts again.

    Args:
        x: coefficients; ``cache`` (bytes) is read.
    """
    again, streamed = _streamed_again(p, c, tiles_m, tiles_n, slots)
    once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
    return once + again * streamed * _missed(x, streamed)


def _streamed_again(p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats) -> tuple[Floats, Floats]:
    """Return (number of further times, bytes each time) of the streamed operand: B if tiles walk along M, else A."""
    along_m = c["raster_m"] > 0
    inner, outer = np.where(along_m, tiles_m / c["cm"], tiles_n / c["cn"]), np.where(along_m, tiles_n, tiles_m)
    group = np.minimum(c["group"], inner)
    at_once = np.maximum(slots / cluster_split(c) / (group * np.where(along_m, c["cm"], c["cn"]) * outer), 1.0)
    again = np.maximum(np.ceil(inner / group) / at_once, 1.0) - 1.0
    return again, ELEMENT_BYTES * p["k"] * np.where(along_m, p["n"], p["m"]) * 1.0


def _missed(x: Mapping[str, float], streamed: Floats) -> Floats:
    """Return the share of an operand that L2 has lost before it is streamed again."""
    return 1 / (1 + (x["cache"] / streamed) ** 2)


def hinted_bytes(
    x: Mapping[str, float], p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats
) -> Floats:
    """Return the change of HBM bytes due to L2 hints; may be negative. It is 0 without hints.

    Streamed bytes that L2 does not keep count a little less. But a streamed B is then read again for every further band
    of tiles. With ``stream_c`` alone, it is 2 M N (``once_c`` - 1).

    Args:
        x: coefficients; ``cache``, ``once_b``, ``again_b`` and ``once_c`` are read.
        c: columns of the configs; ``stream_b`` and ``stream_c`` say which operands stream.
    """
    again, streamed = _streamed_again(p, c, tiles_m, tiles_n, slots)
    rows_at_once = slots / cluster_split(c) / np.maximum(np.minimum(c["group"], tiles_n), 1.0)
    bands = np.where(c["raster_m"] > 0, again * (1 - _missed(x, streamed)), np.maximum(tiles_m / rows_at_once, 1.0) - 1)
    of_b, of_c = ELEMENT_BYTES * p["n"] * p["k"], ELEMENT_BYTES * p["m"] * p["n"]
    return c["stream_b"] * of_b * (x["once_b"] - 1 + x["again_b"] * bands) + c["stream_c"] * of_c * (x["once_c"] - 1)


def partial_sector_bytes(x: Mapping[str, float], p: Columns, c: Columns, tiles_n: Floats) -> Floats:
    """Return the extra HBM bytes where tiles of C meet within a 64-byte atom or a 32-byte sector.

    Two writes meet there, or a read and a write. A tile then has 16 columns in a shared one. The result is 0 if C has
    one column of tiles, or if ``bn`` is a multiple of 32. Otherwise it is 2 M N * 16 / ``bn`` times ``broken_atom``. If
    ``bn`` is no multiple of 16 either, ``broken_sector`` is added to ``broken_atom``.

    Args:
        x: coefficients; ``broken_atom`` and ``broken_sector`` are read.
        c: columns of the configs; ``bn`` is read.
    """
    shared = ELEMENT_BYTES * p["m"] * p["n"] * 16 / c["bn"] * (tiles_n > 1)
    return shared * (x["broken_atom"] * (c["bn"] % 32 > 0) + x["broken_sector"] * (c["bn"] % 16 > 0))
