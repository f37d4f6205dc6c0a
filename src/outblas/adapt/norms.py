"""RMS norms of a model, found by what their ``forward`` does; torch's own fused kernel can compute them.

A norm that is written in Python runs about six kernels: to fp32, square, mean, scale, back, and times the weight.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from outblas.adapt.dataflow import Dataflow
from outblas.core.errors import UsageError
from outblas.dispatch.aten_products import HALF_DTYPES

#: The body of a norm's ``forward``: ``x`` is its argument, ``eps`` its attribute, ``v0`` and on its variables.
_BODY = """\
v0 = x.dtype
x = x.to(torch.float32)
v1 = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(v1 + self.eps)
return self.weight * x.to(v0)"""


def epsilon_of_norm(module: Any) -> str | None:
    """Return the name of the attribute that holds a norm's epsilon; None if the module is no RMS norm.

    An RMS norm has one parameter, a half-precision vector ``weight``, and no child. Its ``forward`` is the one of
    transformers' Llama, whatever its names.
    """
    if module._modules or list(module._parameters) != ["weight"] or module._buffers:
        return None
    weight = module.weight
    if weight is None or weight.dim() != 1 or weight.dtype not in HALF_DTYPES:
        return None
    name = _epsilon_name(type(module).forward)
    return name if name is not None and isinstance(getattr(module, name, None), float) else None


@functools.lru_cache(maxsize=256)
def _epsilon_name(forward: Callable[..., Any]) -> str | None:
    """Return the name of the attribute in the place of ``eps`` if a function is that of a norm, else None."""
    try:
        flow = Dataflow(inspect.unwrap(forward))
    except UsageError:
        return None
    if flow.globals.get("torch") is not torch:
        return None
    tree = flow.tree
    arguments = tree.args
    if len(arguments.args) != 2 or arguments.vararg or arguments.kwonlyargs or arguments.kwarg or arguments.defaults:
        return None
    names = _Names(*(one.arg for one in arguments.args))
    body = [names.visit(statement) for statement in tree.body if not _is_text(statement)]
    found = "\n".join(map(ast.unparse, body)) == _BODY
    return names.epsilon if found else None


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Names(ast.NodeTransformer):
    """Gives the names of a ``forward`` those of :data:`_BODY`.

    Attributes:
        epsilon: the attribute of the module that became ``eps``; None before.
    """

    def __init__(self, module: str, argument: str) -> None:
        self._known = {module: "self", argument: "x"}
        self.epsilon: str | None = None

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Store):
            self._known.setdefault(node.id, f"v{len(self._known) - 2}")
        return ast.Name(self._known.get(node.id, node.id), node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = self.visit(node.value)
        node.targets = [self.visit(target) for target in node.targets]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.value = self.visit(node.value)
        of_module = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_module and node.attr != "weight" and self.epsilon in (None, node.attr):
            self.epsilon = node.attr
            node.attr = "eps"
        return node
