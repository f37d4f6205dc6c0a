"""A dispatch mode that sees every matrix product of this thread, below autograd and autocast.

It sees all that reaches ATen: eager code, backward passes, ``outblas::mm``, and outblas.matmul, which leaves products
to torch while a dispatch mode is on. Torch runs compiled programs uncompiled meanwhile, so it sees those, too. It does
not see fused operators such as attention, or kernels of other libraries. Of a CUDA graph it sees the capture, once,
but no replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outblas.dispatch.aten_products import HALF_DTYPES
from outblas.dispatch.product_operands import dtype_name, fold
from outblas.records.captured_products import CapturedProduct, layout_of

#: Operator -> where its A stands among the arguments; B is the next.
_OPERAND_POSITIONS: dict[str, int] = {
    **dict.fromkeys(("outblas::mm", "aten::mm", "aten::bmm", "aten::mv"), 0),
    **dict.fromkeys(("aten::addmm", "aten::addmm_", "aten::_addmm_activation"), 1),
    **dict.fromkeys(("aten::baddbmm", "aten::baddbmm_", "aten::addmv", "aten::addmv_"), 1),
}


class ProductMode(TorchDispatchMode):
    """A torch dispatch mode that reports every half-precision product of its thread. Use one instance per thread.

    Args:
        note: function that is called with each :class:`outblas.records.captured_products.CapturedProduct`, after the
            product was enqueued.
    """

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[CapturedProduct], None]) -> None:
        super().__init__()
        self._note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import dynamo at the first operator to keep its compiler out, for two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compiles = "torch._dynamo" in sys.modules  # else no compiler is there that must be kept out
        run = _dispatch_uncompiled if compiles else ProductMode._dispatch
        return run(self, func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and report it if it is a product; return its result."""
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a tensor of another kind: its own handler runs first, and its products come here
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        place = _OPERAND_POSITIONS.get(name)
        if place is None:
            if name:
                # In inference mode torch.matmul and linear arrive undivided; decompose them to see their products.
                with ProductMode(self._note):
                    made = func.decompose(*args, **kwargs)
                if made is not NotImplemented:
                    return made
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        product = _product(name.removeprefix("aten::"), args[place], args[place + 1], result)
        if product is not None:
            self._note(product)
        return result


_dispatch_uncompiled = torch._disable_dynamo(ProductMode._dispatch, recursive=True)


def _product(op: str, a: Any, b: Any, c: Any) -> CapturedProduct | None:
    """None for what is no dense half-precision product, or an empty one."""
    if a.dtype not in HALF_DTYPES or b.dtype != a.dtype or a.device.type == "meta" or 0 in (*a.shape, *b.shape):
        return None
    if a.layout != torch.strided or b.layout != torch.strided:
        return None
    if c.dtype != a.dtype:
        op = f"{op}->{str(c.dtype).removeprefix('torch.')}"
    b = b.unsqueeze(1) if b.dim() == 1 else b
    batch = a.shape[0] if a.dim() == 3 else 1
    if batch == 1 or (b.dim() == 3 and b.stride(0) == 0):  # as outblas.dispatch.aten_products.our_bmm: one b for all
        folded = fold(a, b[:1] if b.dim() == 3 else b)
        if folded is not None:
            a, b, batch = folded.a, folded.b, 1
    layout = layout_of(a.shape[-2:], a.stride()[-2:], b.shape[-2:], b.stride()[-2:])
    return CapturedProduct(a.shape[-2], b.shape[-1], a.shape[-1], layout, dtype_name(a.dtype), str(a.device), op, batch)
