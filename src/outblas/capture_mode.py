"""Sees every matrix product that torch runs on this thread: a dispatch mode, below autograd and autocast.

It sees what reaches ATen: eager code, backward passes, outblas.matmul (which leaves products to torch while a dispatch
mode is on), and programs under torch.compile, which torch runs uncompiled meanwhile. It does not see the replay of a
CUDA graph (its capture is seen, once), products inside a fused operator such as attention, and kernels of other
libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outblas.captured import Product, layout_of

_ATEN = torch.ops.aten
#: Operator -> where its A stands among the arguments; B is the next.
_PLACES: dict[Any, int] = {
    **{_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.addmm_: 1},
    **{_ATEN._addmm_activation: 1, _ATEN.baddbmm: 1, _ATEN.baddbmm_: 1},
}
_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class ProductMode(TorchDispatchMode):
    """Calls ``note`` with every half-precision product, after it was enqueued. One instance per thread."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Product], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a tensor of another kind: its own handler runs first, and its products come here
        place = _PLACES.get(getattr(func, "overloadpacket", None))
        if place is None:
            if isinstance(func, torch._ops.OpOverload):
                # In inference mode torch.matmul and linear arrive whole: what they are made of is what is to be seen.
                with ProductMode(self._note):
                    made = func.decompose(*args, **kwargs)
                if made is not NotImplemented:
                    return made
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        product = _product(func.overloadpacket.__name__, args[place], args[place + 1], result)
        if product is not None:
            self._note(product)
        return result


def _product(op: str, a: Any, b: Any, c: Any) -> Product | None:
    """None for what is no dense half-precision product, or an empty one."""
    dtype = _HALF.get(a.dtype)
    if dtype is None or b.dtype != a.dtype or a.device.type == "meta" or 0 in (*a.shape, *b.shape):
        return None
    if a.layout != torch.strided or b.layout != torch.strided:
        return None
    if c.dtype != a.dtype:
        op = f"{op}->{str(c.dtype).removeprefix('torch.')}"
    layout = layout_of(a.shape[-2:], a.stride()[-2:], b.shape[-2:], b.stride()[-2:])
    batch = a.shape[0] if a.dim() == 3 else 1
    return Product(a.shape[-2], b.shape[-1], a.shape[-1], layout, dtype, str(a.device), op, batch)
