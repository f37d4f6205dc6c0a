"""Nodes that passes over Inductor's graphs look for: weights, and pointwise code behind a product.

Extents of nodes may be symbols. No symbol is compared with a number, so the graph gets no guard.
"""

from __future__ import annotations

from typing import Any

import torch

from outblas.dispatch.fused_layer import ActivationName

_ATEN = torch.ops.aten
RESHAPE = _ATEN.reshape.default
RESHAPES = (RESHAPE, _ATEN.view.default)
_TRANSPOSES = (_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int)
_CAST = torch.ops.prims.convert_element_type.default
#: Operators of which an activation may be made.
_POINTWISE = (
    {getattr(_ATEN, name).default for name in ("neg", "exp", "sigmoid", "tanh", "erf", "reciprocal", "silu")}
    | {getattr(_ATEN, name).Tensor for name in ("add", "sub", "mul", "div")}
    | {_ATEN.pow.Tensor_Scalar}
)
#: Dtypes at which a cast before an activation changes no more than rounding does.
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Points at which activations differ by far more than rounding in fp64.
_POINTS = torch.linspace(-6, 6, 49, dtype=torch.float64, device="cpu")
_SAME = 1e-9


def weight_input(node: Any) -> Any:
    """Return the graph's input (N, K) whose transpose a node is; None: it is something else."""
    if not isinstance(node, torch.fx.Node) or node.target not in _TRANSPOSES:
        return None
    weight = node.args[0]
    if not is_static(node) or not is_input(weight):
        return None
    value, turned = weight.meta["val"], node.meta["val"]
    is_turned = (turned.shape, turned.stride()) == (value.shape[::-1], value.stride()[::-1])
    return weight if value.dim() == 2 and is_turned else None


def is_static(node: Any) -> bool:
    """Return whether a node is a dense tensor of known extents. To compare symbols would give the graph a guard."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset()))


def is_input(node: Any) -> bool:
    """Return whether a node is an input of the graph, or a constant of it, of known extents."""
    return is_static(node) and node.op in ("placeholder", "get_attr")


def new_call(graph: Any, like: Any, target: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    """Return a new node with the origin of another one and a value of its own."""
    made = graph.call_function(target, arguments)
    made.meta.update({name: each for name, each in like.meta.items() if name != "tensor_meta"})
    made.meta["val"] = value
    return made


def have_as_many(one: Any, other: Any) -> bool:
    """Return whether two nodes are known to have as many elements: by numbers, or by equal shapes with symbols."""
    if is_static(one) and is_static(other):
        return bool(one.meta["val"].numel() == other.meta["val"].numel())
    values = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in (one, other)]
    shapes = [[str(extent) for extent in value.shape] for value in values if isinstance(value, torch.Tensor)]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def users_behind_reshapes(node: Any) -> list[Any]:
    found: list[Any] = []
    for user in node.users:
        found += users_behind_reshapes(user) if user.target in RESHAPES else [user]
    return found


def before_reshapes(node: Any) -> Any:
    """Return the node whose reshapes end in a node."""
    while isinstance(node, torch.fx.Node) and node.target in RESHAPES:
        node = node.args[0]
    return node


def chain_between(node: Any, source: Any) -> set[Any] | None:
    """Return the nodes that lead from a source to a node, both included; None if there are other leaves, or none.

    Each has as many elements as the source: a broadcast would mix them. Each is of a floating dtype of 16 bits or more.
    """
    found: set[Any] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        if not have_as_many(one, source) or one.meta["val"].dtype not in _WIDE:
            return None
        found.add(one)
        if one is source:
            continue
        if one.target not in (*RESHAPES, _CAST, *_POINTWISE) or not one.all_input_nodes:
            return None
        waiting += one.all_input_nodes
    return found if source in found else None


def is_used_there_only(up: Any, product: Any, chain: set[Any]) -> bool:
    """Return whether nothing but the product reads the two results, or what lies between."""
    return users_behind_reshapes(up) == [product] and all(
        user in chain or user is product for node in chain for user in node.users
    )


def activation_between(node: Any, source: Any) -> ActivationName | None:
    """Return the name of the activation that leads from a source to a node, by its values in fp64; None: another."""
    known = {source: _POINTS}

    def value(each: Any) -> Any:
        if not isinstance(each, torch.fx.Node):
            return each
        if each not in known:
            passes_on = each.target in (*RESHAPES, _CAST)
            known[each] = value(each.args[0]) if passes_on else each.target(*map(value, each.args), **each.kwargs)
        return known[each]

    found = value(node)
    functional = torch.nn.functional
    expected: dict[ActivationName, Any] = {
        "silu": functional.silu(_POINTS),
        "gelu": functional.gelu(_POINTS),
        "gelu_tanh": functional.gelu(_POINTS, approximate="tanh"),
    }
    return next((name for name, each in expected.items() if torch.allclose(found, each, rtol=0, atol=_SAME)), None)


def erase_unused(graph: Any, node: Any) -> None:
    """Erase a node without users, and those before it that have none then, up to the graph's inputs."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if not one.users and one.op == "call_function":
            waiting += [each for each in one.all_input_nodes if each not in waiting]
            graph.erase_node(one)
