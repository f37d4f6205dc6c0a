"""``outblas::mm_joined``, ``addmm_joined`` and ``gated_joined``: for graphs whose weights lie in one matrix.

:func:`outblas.optimize` lays the weights of layers with one input into one matrix, one below the other or row by row by
turns. torch.compile sees the layers apart (:mod:`outblas.dispatch.fusion.joined_products`).

The operators get the weights apart, too, and look in each call whether they still lie together. A model may be moved
after its compilation, and no guard of dynamo sees that. Then each product is computed by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from outblas.dispatch.autograd import compute_mm
from outblas.dispatch.fused_layer import ActivationName, apply_activation, epilogue_of, run_biased, run_fused
from outblas.dispatch.torch_op import register_behind_autograd

#: Objects whose ``weight`` is a matrix in which an optimised model has laid weights; None after they have left it.
matrix_keepers: WeakSet[Any] = WeakSet()


def joined_shapes() -> list[tuple[int, ...]]:
    """Return the shapes (N, K) of all matrices in which weights lie now, each once, in order.

    Inductor's cache does not see where weights lie. So its key has these.
    """
    kept = [keeper.weight for keeper in list(matrix_keepers)]
    return sorted({tuple(weight.shape) for weight in kept if weight is not None})


def joined_shape(weight: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape (N, K) of the matrix among :func:`joined_shapes` in which a weight lies as a part, or None.

    The storage decides, of which a fake tensor has the size. That of a part is the whole matrix's.

    Args:
        weight: (N_i, K) with N_i < N. One with symbolic extents lies in none.
    """
    if not all(isinstance(extent, int) for extent in weight.shape):
        return None
    elements = weight.untyped_storage().nbytes() // weight.element_size()
    rows, columns = weight.shape
    alike = (shape for shape in joined_shapes() if shape[1] == columns and rows < shape[0])
    return next((shape for shape in alike if shape[0] * columns == elements), None)


def joined_matrix(weights: Sequence[torch.Tensor], by_turns: bool) -> torch.Tensor | None:
    """Return the matrix (sum of N_i, K) in which some weights lie, a view; None if they do not fill one.

    Fake tensors have an answer, too.

    Args:
        weights: two or more matrices (N_i, K), in the order of their rows.
        by_turns: row j of each follows row j of the one before; else one lies below the other.
    """
    first = weights[0]
    if any(w.dim() != 2 or w.dtype != first.dtype or w.shape[1] != first.shape[1] for w in weights):
        return None
    storage, columns, begin = first.untyped_storage()._cdata, first.shape[1], first.storage_offset()
    between = columns * (len(weights) if by_turns else 1)
    place = begin
    for w in weights:
        if w.untyped_storage()._cdata != storage or w.stride() != (between, 1) or w.storage_offset() != place:
            return None
        if by_turns and w.shape != first.shape:
            return None
        place += columns if by_turns else w.numel()
    rows = sum(w.shape[0] for w in weights)
    return torch.as_strided(first, (rows, columns), (columns, 1), begin)


def joined_vector(biases: Sequence[torch.Tensor], by_turns: bool) -> torch.Tensor | None:
    """Return the vector in which some biases (N_i) lie, as :func:`joined_matrix` of their weights; or None."""
    if any(bias.dim() != 1 for bias in biases):
        return None
    column = joined_matrix([bias.unsqueeze(1) for bias in biases], by_turns)
    return None if column is None else column.squeeze(1)


def _mm_joined(a: torch.Tensor, weights: Sequence[torch.Tensor], by_turns: bool) -> torch.Tensor:
    """Return ``a @ w.t()`` for the joined matrix ``w`` of the weights, (M, sum of N_i) for ``a`` (M, K)."""
    joined = joined_matrix(weights, by_turns)
    if joined is not None:
        return compute_mm(a, joined.t())
    return _side_by_side([compute_mm(a, w.t()) for w in weights], by_turns)


def _addmm_joined(
    biases: Sequence[torch.Tensor], a: torch.Tensor, weights: Sequence[torch.Tensor], by_turns: bool
) -> torch.Tensor:
    """Return the product of :func:`_mm_joined` plus the joined bias (sum of N_i), rounded once."""
    bias, joined = joined_vector(biases, by_turns), joined_matrix(weights, by_turns)
    if bias is None or joined is None:
        parts = [torch.addmm(bias, a, w.t()) for bias, w in zip(biases, weights, strict=True)]
        return _side_by_side(parts, by_turns)
    result = run_biased(a, joined, bias, None)
    return torch.addmm(bias, a, joined.t()) if result is None else result


def _side_by_side(parts: Sequence[torch.Tensor], by_turns: bool) -> torch.Tensor:
    return torch.stack(list(parts), dim=2).flatten(1) if by_turns else torch.cat(list(parts), dim=1)


def _gated_joined(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: ActivationName) -> torch.Tensor:
    """Return ``act(a @ gate.t()) * (a @ up.t())``, (M, H) for ``a`` (M, K); in one kernel where that is loaded."""
    joined = joined_matrix((gate, up), by_turns=True)
    if joined is not None:
        extra, epilogue = epilogue_of(a, joined, None, activation, None, gated=True)
        result = run_fused(a, joined, extra, epilogue, None)
        if result is not None:
            return result
    return apply_activation(compute_mm(a, gate.t()), activation) * compute_mm(a, up.t())


def _fake_joined(a: torch.Tensor, weights: Sequence[torch.Tensor], by_turns: bool) -> torch.Tensor:
    return a.new_empty((a.shape[0], sum(w.shape[0] for w in weights)))


#: (M, K), weights (N_i, K) and whether they lie by turns -> (M, sum of N_i).
mm_joined = register_behind_autograd(
    "mm_joined(Tensor a, Tensor[] weights, bool by_turns) -> Tensor", _mm_joined, _fake_joined
)
#: Biases (N_i), and the arguments of ``mm_joined`` -> (M, sum of N_i).
addmm_joined = register_behind_autograd(
    "addmm_joined(Tensor[] biases, Tensor a, Tensor[] weights, bool by_turns) -> Tensor",
    _addmm_joined,
    lambda biases, a, weights, by_turns: _fake_joined(a, weights, by_turns),
)
#: (M, K), gate and up (H, K) and the name of the activation -> (M, H).
gated_joined = register_behind_autograd(
    "gated_joined(Tensor a, Tensor gate, Tensor up, str activation) -> Tensor",
    _gated_joined,
    lambda a, gate, up, activation: a.new_empty((a.shape[0], gate.shape[0])),
)
