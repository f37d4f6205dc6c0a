"""Our products in graphs that torch.compile makes: a pass over Inductor's graph, after torch's own.

A product is replaced where the library has a kernel for it as it stands: two matrices in fp16 or bf16, on CUDA, with
extents that are numbers. All else stays with Inductor: a template of its own may be fused with what follows, and ours
may not. Where a bias is better added by what follows, Inductor has split it off before; else ``aten.addmm`` stays
(see :mod:`outblas.affine`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from outblas import dispatch
from outblas.torch_op import mm


def is_chosen(a: Any, b: Any) -> bool:
    """Whether the library has a kernel for the product of two matrices that a graph has, by fake tensors."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if (
        a.device.type != dispatch.DEVICE_TYPE
        or a.device != b.device
        or a.layout != torch.strided
        or b.layout != torch.strided
    ):
        return False
    if not all(isinstance(number, int) for t in (a, b) for number in (*t.shape, *t.stride())):
        return False
    return dispatch.chosen(a, b)


class Pass(CustomGraphPass):  # type: ignore[misc]
    """Replaces ``aten.mm`` by ``outblas::mm`` where ``predicate`` says so of its operands, after the passes of before.

    Args:
        before: what the user has set: None, a pass, or several. predicate: of the values of two nodes.
    """

    def __init__(self, before: Any = None, predicate: Callable[[Any, Any], bool] = is_chosen) -> None:
        self.before, self._predicate = before, predicate
        self.active, self.replaced = True, 0

    def __call__(self, graph: Any) -> None:
        for each in _passes(self.before):
            each(graph)
        if self.active:
            self.replaced += replace(graph, self._predicate)

    def uuid(self) -> Any:
        """What Inductor's cache must tell apart: None, which is not cached, where a pass of before has none."""
        before = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in _passes(self.before)]
        if any(each is None for each in before):
            return None
        text = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return "outblas", text, dispatch.libraries_id(), self.active, tuple(before)


def replace(graph: Any, predicate: Callable[[Any, Any], bool]) -> int:
    """How many products of an FX graph were replaced."""
    nodes = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        if predicate(*(getattr(operand, "meta", {}).get("val") for operand in node.args[:2]))
    ]
    for node in nodes:
        with graph.inserting_before(node):
            ours = graph.call_function(mm, tuple(node.args[:2]))
        ours.meta.update(node.meta)
        node.replace_all_uses_with(ours)
        graph.erase_node(node)
    return len(nodes)


def install() -> Pass:
    """The pass, as Inductor's last one."""
    made = Pass(config.post_grad_custom_post_pass)
    config.post_grad_custom_post_pass = made
    return made


def remove(made: Pass) -> None:
    """Without effect from now on, and gone where nobody has set another one on top."""
    made.active = False
    if config.post_grad_custom_post_pass is made:
        config.post_grad_custom_post_pass = made.before


def _passes(before: Any) -> Iterable[Any]:
    return () if before is None else before if isinstance(before, (list, tuple)) else (before,)
