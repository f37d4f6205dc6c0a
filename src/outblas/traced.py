"""A product that torch.compile traces: which are kept in the graph as our operator."""

from __future__ import annotations

from typing import Any

from outblas.fold import fold, unfold


def in_graph(torch: Any, a: Any, b: Any, device_type: str) -> Any:
    """The product as an operator that torch.compile keeps; None where it is no single one, or torch's to trace.

    ``device_type``: where our kernels run.
    """
    if not _is_kept(torch, a, b, device_type):
        return None
    from outblas.torch_op import mm

    folded = fold(a, b)
    return None if folded is None else unfold(mm(folded.a, folded.b), folded.shape)


def is_half(torch: Any, a: Any, b: Any) -> bool:
    """Whether both are of one type that our kernels take."""
    return a.dtype in (torch.float16, torch.bfloat16) and a.dtype == b.dtype


def _is_kept(torch: Any, a: Any, b: Any, device_type: str) -> bool:
    """Whether dynamo, tracing the call, is to keep our operator; an exported program must not need this package."""
    # Not is_exporting(): of that, dynamo before torch 2.13 makes True, whether a program is exported or not.
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)  # from torch 2.7 on
    if not torch.compiler.is_dynamo_compiling() or exporting or torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided for t in (a, b)):
        return False
    if a.device.type != device_type or b.device != a.device or torch.is_autocast_enabled(device_type):
        return False
    return is_half(torch, a, b)
