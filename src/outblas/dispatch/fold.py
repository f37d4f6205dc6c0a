"""Products of other shapes as one product of two matrices: by views, without a copy, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Folded(NamedTuple):
    """A product rewritten by :func:`fold`.

    Attributes:
        a: (M, K), a view.
        b: (K, N), a view.
        out: (M, N), a view of the given output; None: to be allocated.
        shape: shape that torch.matmul gives the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    shape: tuple[int, ...]


def fold(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> Folded | None:
    """Rewrite ``torch.matmul(a, b)`` as one product of matrices on views. Return None if that would need a copy.

    A vector ``a`` becomes a matrix of one row, a vector ``b`` one of one column. The rows of a batched ``a`` are
    stacked; ``b`` may then have a batch of at most 1. Return None for a matrix times a batch, too: torch computes it
    transposed, and results must have torch's strides. Return None if an operand of another rank than 2 has no element.

    Example: shapes (2, 3, 8) and (8, 5) give views (6, 8) and (8, 5), ``out`` None and ``shape`` (2, 3, 5).

    Args:
        a: first operand.
        b: second operand.
        out: contiguous output of the product's shape; None: none.
    """
    if a.dim() == 2 == b.dim():
        return Folded(a, b, out, (a.shape[0], b.shape[1]))
    found = _batch(a, b)
    if found is None or 0 in (*a.shape, *b.shape):
        return None
    batch, columns = found
    inner, vector = a.shape[-1], b.dim()
    if b.dim() == 1:
        b = b.unsqueeze(1)
    elif b.dim() > 2:
        b = b[(0,) * (b.dim() - 2)]
    if b.shape[0] != inner or (a.dim() > 2 and not leading_dims_collapse(a.shape, a.stride())):
        return None
    shape = (*batch, *columns)
    if out is not None:
        # torch resizes the output of a product with a vector, to what depends on its version.
        if 1 in (a.dim(), vector) or tuple(out.shape) != shape or not out.is_contiguous():
            return None
        out = out.view(-1, b.shape[1])
    return Folded(a.unsqueeze(0) if a.dim() == 1 else a.view(-1, inner) if a.dim() > 2 else a, b, out, shape)


def unfold(c: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the product of two matrices in the shape of a folded product.

    The result is no view in autograd's sense, because torch's is none. Example: ``unfold(c, (2, 3, 5))`` of a (6, 5)
    tensor has shape (2, 3, 5). A ``c`` of that shape is returned itself.
    """
    import torch

    return c if tuple(c.shape) == tuple(shape) else torch.ops.aten._unsafe_view.default(c, shape)


def leading_dims_collapse(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if all dimensions but the last can be viewed as one; strides of extents of 1 do not count.

    Example: ``leading_dims_collapse((2, 3, 8), (24, 8, 1))`` is True, with strides ``(48, 8, 1)`` it is False.
    """
    rows = [(extent, stride) for extent, stride in zip(shape[:-1], strides[:-1], strict=True) if extent != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in zip(rows[:-1], rows[1:], strict=True))


def _batch(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (result dimensions before the columns, column dimensions).

    None if it is not a single product of matrices.
    """
    rows = tuple(a.shape[:-1])
    if a.dim() == 0 or b.dim() == 0 or a.dim() == 1 == b.dim():
        return None
    if b.dim() <= 2:
        return rows, tuple(b.shape[1:])
    if a.dim() <= 2 or any(extent != 1 for extent in b.shape[:-2]):
        return None
    return (1,) * (b.dim() - a.dim()) + rows, (b.shape[-1],)
