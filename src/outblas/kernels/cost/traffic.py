"""Bytes that cross HBM, for the model of GPU time of the tiled families: order of tiles, L2 hints, ragged rows of C."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outblas.core.problem import ELEMENT_BYTES
from outblas.kernels.cost.terms import Columns, Floats, cluster_split


def traffic_bytes(
    x: Mapping[str, float], p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats
) -> Floats:
    """Bytes to and from HBM: operands and result once, and the operand that a band of tiles streams
    again for every further band as far as L2 does not keep it."""
    again, streamed = _streamed_again(p, c, tiles_m, tiles_n, slots)
    once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
    return once + again * streamed * _missed(x, streamed)


def _streamed_again(p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats) -> tuple[Floats, Floats]:
    """How often after the first time, and how many bytes at a time: B where tiles walk along M, else A."""
    along_m = c["raster_m"] > 0
    inner, outer = np.where(along_m, tiles_m / c["cm"], tiles_n / c["cn"]), np.where(along_m, tiles_n, tiles_m)
    group = np.minimum(c["group"], inner)
    at_once = np.maximum(slots / cluster_split(c) / (group * np.where(along_m, c["cm"], c["cn"]) * outer), 1.0)
    again = np.maximum(np.ceil(inner / group) / at_once, 1.0) - 1.0
    return again, ELEMENT_BYTES * p["k"] * np.where(along_m, p["n"], p["m"]) * 1.0


def _missed(x: Mapping[str, float], streamed: Floats) -> Floats:
    """Share of an operand that L2 has lost when it is streamed again."""
    return 1 / (1 + (x["cache"] / streamed) ** 2)


def hinted_bytes(
    x: Mapping[str, float], p: Columns, c: Columns, tiles_m: Floats, tiles_n: Floats, slots: Floats
) -> Floats:
    """What L2 hints add to (or take off) the bytes of HBM. Bytes that leave no trace in L2 count a little less than
    others, but those of B are then read again for every further band of tiles, too."""
    again, streamed = _streamed_again(p, c, tiles_m, tiles_n, slots)
    rows_at_once = slots / cluster_split(c) / np.maximum(np.minimum(c["group"], tiles_n), 1.0)
    bands = np.where(c["raster_m"] > 0, again * (1 - _missed(x, streamed)), np.maximum(tiles_m / rows_at_once, 1.0) - 1)
    of_b, of_c = ELEMENT_BYTES * p["n"] * p["k"], ELEMENT_BYTES * p["m"] * p["n"]
    return c["stream_b"] * of_b * (x["once_b"] - 1 + x["again_b"] * bands) + c["stream_c"] * of_c * (x["once_c"] - 1)


def partial_sector_bytes(x: Mapping[str, float], p: Columns, c: Columns, tiles_n: Floats) -> Floats:
    """Bytes that count for C's rows where tiles meet within one of HBM's 64-byte atoms, or within a 32-byte sector: two
    writes meet there, or a read and a write. A tile then has 16 columns in a broken one."""
    shared = ELEMENT_BYTES * p["m"] * p["n"] * 16 / c["bn"] * (tiles_n > 1)
    return shared * (x["broken_atom"] * (c["bn"] % 32 > 0) + x["broken_sector"] * (c["bn"] % 16 > 0))
