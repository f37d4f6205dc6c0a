"""``outblas::silu_gated``: SiLU(gate) * up of a product whose weight has the rows of gate above those of up.

Inference engines merge gate and up so. A fused kernel takes the rows by turns, so that each thread has both
(:class:`outblas.kernels.epilogue.Epilogue`). It runs at an M at which it was measured to be faster
(:attr:`outblas.records.library.Library.gates`). At another M the product is computed, and one pass over it follows, as
Inductor would make it.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.core.switches import is_off
from outblas.dispatch import device_registry
from outblas.dispatch.autograd import compute_mm
from outblas.dispatch.fused import fused_product
from outblas.dispatch.fused_layer import FUSED_VARIABLE, is_captured
from outblas.dispatch.fusion.graph_nodes import (
    activation_between,
    chain_between,
    erase_unused,
    is_used_there_only,
    new_call,
    weight_input,
)
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product_operands import as_plain, dtype_name, why_left_to_torch
from outblas.dispatch.torch_op import register_behind_autograd
from outblas.kernels.epilogue import STACKED_GATE
from outblas.runtime.fused_launch import Extra

_ATEN = torch.ops.aten
_MM, _SLICE, _MUL = _ATEN.mm.default, _ATEN.slice.Tensor, _ATEN.mul.Tensor


def _silu_gated(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``silu(a @ w[:H].t()) * (a @ w[H:].t())``, (M, H) for ``a`` (M, K) and ``w`` (2H, K)."""
    a, w = as_plain(a), as_plain(w)
    if _may_fuse(a, w) and not is_off(FUSED_VARIABLE) and process_guarantee() != "batch_invariant":
        result = fused_product(a, w.t(), Extra(), STACKED_GATE, wait=not is_captured(a))
        if result is not None:
            return result
    return silu_times(compute_mm(a, w.t()))


def gate_for_some_m(a: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether a fused kernel serves ``a`` (M, K) and ``w`` (2H, K) at some M; M may be a symbol."""
    return _last_m(a, w) > 0


def _may_fuse(a: torch.Tensor, w: torch.Tensor) -> bool:
    on_gpu = a.device.type == device_registry.DEVICE_TYPE and a.device == w.device
    return on_gpu and a.shape[0] <= _last_m(a, w) and not why_left_to_torch(a, w, None)


def _last_m(a: torch.Tensor, w: torch.Tensor) -> int:
    """Return the largest M at which a fused kernel serves ``w`` (2H, K) on the device of ``a``; 0: none does.

    A long prefill runs without CUDA graphs and may wait for the host. This is the cheapest question of all.
    """
    index = device_registry.device_state(a.device.index).library.gate_index
    return index.last_m(w.shape[0], w.shape[1], dtype_name(w.dtype))


def silu_times(y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(y[:, :H]) * y[:, H:]`` of ``y`` (M, 2H): on a GPU by one kernel of Triton, which rounds once."""
    if y.device.type == device_registry.DEVICE_TYPE and y.shape[0]:
        from outblas.dispatch.fusion.silu_kernel import launch

        return launch(y)
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate.float()).mul(up).to(y.dtype)


#: (M, K) and (2H, K) -> (M, H).
silu_gated = register_behind_autograd(
    "silu_gated(Tensor a, Tensor w) -> Tensor", _silu_gated, lambda a, w: a.new_empty((a.shape[0], w.shape[0] // 2))
)


def fuse_stacked_gates(graph: Any, serves: Any) -> int:
    """Replace ``silu(gate) * up`` of products of one weight, in place; return the number of operators put in.

    Args:
        graph: a ``torch.fx.Graph``, which is changed. Each node has its value as ``meta["val"]``.
        serves: says whether to replace, by the values of the input (M, K) and of the weight (2H, K). M may be a symbol.
    """
    found = 0
    for product in list(graph.find_nodes(op="call_function", target=_MM)):
        weight = weight_input(product.args[1])
        end = None if weight is None else _gated_end(product, weight.meta["val"].shape[0])
        if end is None or not serves(product.args[0].meta.get("val"), weight.meta["val"]):
            continue
        with graph.inserting_before(product):  # where the product reads its operands: they may be written later
            made = new_call(graph, end, silu_gated, (product.args[0], weight), end.meta["val"])
        end.replace_all_uses_with(made)
        erase_unused(graph, end)
        found += 1
    return found


def _gated_end(product: Any, rows: int) -> Any:
    """Return the node of ``silu(gate) * up`` if nothing else reads a product; None if it is something else."""
    halves = {_columns(user): user for user in product.users}
    gate, up = halves.get((0, rows // 2)), halves.get((rows // 2, rows))
    if rows % 2 or gate is None or up is None or len(product.users) != 2 or len(up.users) != 1:
        return None
    end = next(iter(up.users))
    if end.target is not _MUL or end.meta["val"].dtype != up.meta["val"].dtype:
        return None
    others = [argument for argument in end.args if argument is not up]
    if any(not _have_one_shape(each, up) for each in (end, *others)):
        return None
    chain = chain_between(others[0], gate) if len(others) == 1 and isinstance(others[0], torch.fx.Node) else None
    if chain is None or not is_used_there_only(up, end, chain):
        return None
    return end if activation_between(others[0], gate) == "silu" else None


def _have_one_shape(node: Any, other: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    return [*map(str, value.shape)] == [*map(str, other.meta["val"].shape)]


def _columns(node: Any) -> tuple[int, int] | None:
    """Return the first column of a slice of columns, and the one after its last; None: it is something else."""
    if node.target is not _SLICE or node.kwargs or len(node.args) < 4 or node.args[1] not in (1, -1):
        return None
    begin, end, *step = node.args[2:]
    width = node.args[0].meta["val"].shape[1]
    if not all(isinstance(number, int) for number in (begin, end, width)) or step not in ([], [1]):
        return None
    return begin, min(end, width)
