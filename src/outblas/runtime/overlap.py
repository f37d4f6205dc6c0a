"""Decide from addresses, shapes and strides whether two tensors share memory."""

from __future__ import annotations

from typing import Any


def may_overlap(x: Any, y: Any) -> bool:
    """Return True if two tensors may share an element.

    False is certain. The answer is exact for disjoint address ranges and for two 2-D views of equal row pitch, e.g.
    blocks of columns of one matrix. Other tensors with overlapping address ranges give True. An empty tensor gives
    False.

    Example: ``may_overlap(a, a)`` is True; ``may_overlap(a[:, :2], a[:, 2:])`` is False.
    """
    if not x.numel() or not y.numel():
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    rows = [_rows(t) for t in (x, y)]
    if None in rows or x.element_size() != y.element_size():
        return True
    (pitch, width_x), (pitch_y, width_y) = rows  # type: ignore[misc]
    bytes_apart = y0 - x0
    if pitch != pitch_y or max(width_x, width_y) > pitch or bytes_apart % x.element_size():
        return True
    apart = bytes_apart // x.element_size() % pitch
    return apart < width_x or apart + width_y > pitch


def _span(t: Any) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last."""
    last = sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _rows(t: Any) -> tuple[int, int] | None:
    """Return (pitch, width) in elements of a 2-D view whose rows or columns are dense; else None."""
    if t.dim() != 2:
        return None
    (outer, rows), (inner, width) = sorted(zip(t.stride(), t.shape, strict=True), reverse=True)
    return (outer, width) if inner == 1 and rows >= 1 else None
