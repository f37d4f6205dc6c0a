"""A product that torch.compile traces: which are kept in the graph as our operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.dispatch import device_registry
from outblas.dispatch.fold import fold, unfold
from outblas.dispatch.guarantees.guarantee import Guarantee
from outblas.dispatch.tensors import is_half

if TYPE_CHECKING:
    import torch


def in_graph(a: torch.Tensor, b: torch.Tensor, guarantee: Guarantee = "none") -> torch.Tensor | None:
    """Return the product as an operator that torch.compile keeps.

    A batch (..., M, K) times one matrix (K, N) counts as a single product; a batch times a batch does not. Return None
    if torch must trace it: outside of compilation, in an export, under autocast, or unless both are half precision on
    one GPU.

    Args:
        a: first operand.
        b: second operand.
        guarantee: the guarantee that the graph keeps for this product.
    """
    if not _is_kept(a, b):
        return None
    from outblas.dispatch.torch_op import MM

    folded = fold(a, b)
    return None if folded is None else unfold(MM[guarantee](folded.a, folded.b), folded.shape)


def _is_kept(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if dynamo, tracing the call, should keep the operator.

    An exported program must not need this package.
    """
    import torch

    # Not is_exporting(): of that, dynamo before torch 2.13 makes True, whether a program is exported or not.
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)  # from torch 2.7 on
    if not torch.compiler.is_dynamo_compiling() or exporting or torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided for t in (a, b)):
        return False
    place = device_registry.DEVICE_TYPE
    if a.device.type != place or b.device != a.device or torch.is_autocast_enabled(place):
        return False
    return is_half(a, b)
