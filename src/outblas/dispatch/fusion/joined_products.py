"""Changes of an FX graph of Inductor: products of weights that lie in one matrix become one operator.

Such weights are those of an optimised model (:func:`outblas.optimize`). torch.compile traces its layers one by one, and
the fake tensors of their weights share a storage.

- ``act(gate) * up`` of weights by turns becomes ``outblas::gated_joined`` where a fused kernel serves.
- Other products of one input become ``outblas::mm_joined`` and slices of its result, where the library has a kernel for
  the whole matrix. With biases, which lie in one vector, they become ``outblas::addmm_joined``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from outblas.dispatch.fusion.joined_operators import (
    addmm_joined,
    gated_joined,
    joined_matrix,
    joined_vector,
    mm_joined,
)
from outblas.dispatch.linear_operands import ActivationName

_ATEN = torch.ops.aten
_MM, _ADDMM = _ATEN.mm.default, _ATEN.addmm.default
_SLICE, _RESHAPE = _ATEN.slice.Tensor, _ATEN.reshape.default
_RESHAPES = (_RESHAPE, _ATEN.view.default)
_TRANSPOSES = (_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int)
_CAST = torch.ops.prims.convert_element_type.default
#: Namespaces of operators that Inductor knows.
_OF_TORCH = ("aten", "prims")
#: Operators of which an activation may be made.
_POINTWISE = (
    {getattr(_ATEN, name).default for name in ("neg", "exp", "sigmoid", "tanh", "erf", "reciprocal", "silu")}
    | {getattr(_ATEN, name).Tensor for name in ("add", "sub", "mul", "div")}
    | {_ATEN.pow.Tensor_Scalar}
)
#: Operators that read memory by its place, whatever the strides are.
_BY_PLACE = (_ATEN.as_strided.default, _ATEN.view.dtype)
#: Dtypes at which a cast before an activation changes no more than rounding does.
_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Points at which activations differ by far more than rounding in fp64.
_POINTS = torch.linspace(-6, 6, 49, dtype=torch.float64, device="cpu")
_SAME = 1e-9
_END = 2**63 - 1

#: Returns whether to join, from the values of the input (M, K) and of the joined matrix (N, K).
ServesProduct = Callable[[Any, Any], bool]
#: The same for a gate; the last argument is the name of its activation.
ServesGate = Callable[[Any, Any, ActivationName], bool]


class _Group(NamedTuple):
    """Products of one input with the weights of one matrix, in the order of its rows.

    Attributes:
        products: the nodes.
        weights: the nodes of their weights (N_i, K).
        biases: the nodes of their biases (N_i); empty: they have none.
        by_turns: row j of each weight follows row j of the one before.
        joined: value of the matrix.
    """

    products: tuple[Any, ...]
    weights: tuple[Any, ...]
    biases: tuple[Any, ...]
    by_turns: bool
    joined: Any

    @property
    def left(self) -> Any:
        """The node of the input (M, K)."""
        return self.products[0].args[-2]


def join_products(graph: Any, serves_product: ServesProduct, serves_gate: ServesGate) -> int:
    """Replace products of weights that lie in one matrix, in place; return the number of operators put in.

    Args:
        graph: a ``torch.fx.Graph``, which is changed. Each node has its value as ``meta["val"]``.
        serves_product: says whether to join products.
        serves_gate: says whether to fuse a gate.
    """
    found = 0
    for group in list(_groups(graph)):
        a = group.left.meta["val"]
        if len(group.products) == 2 and group.by_turns and not group.biases and _fuse_gate(graph, group, serves_gate):
            found += 1
        elif serves_product(a, group.joined):
            _join(graph, group)
            found += 1
    return found


def _groups(graph: Any) -> Iterator[_Group]:
    """Yield the groups of products. Each is of static shape, and nothing needs their own strides."""
    alike: dict[Any, list[tuple[Any, Any]]] = {}
    for node in (node for target in (_MM, _ADDMM) for node in graph.find_nodes(op="call_function", target=target)):
        if node.kwargs:
            continue
        a, weight = node.args[-2], _weight(node.args[-1])
        if weight is None or not _is_static(a) or _needs_its_strides(node):
            continue
        storage = weight.meta["val"].untyped_storage()._cdata
        alike.setdefault((node.target, _source(a), storage), []).append((node, weight))
    for pairs in alike.values():
        order = sorted(pairs, key=lambda pair: pair[1].meta["val"].storage_offset())
        products, weights = zip(*order, strict=True)
        if not 1 < len({*weights}) == len(weights):
            continue
        biases = tuple(node.args[0] for node in products if node.target is _ADDMM)
        for by_turns in (False, True):
            joined = joined_matrix([weight.meta["val"] for weight in weights], by_turns)
            if joined is not None and (not biases or _lie_in_one(biases, weights, by_turns)):
                yield _Group(products, weights, biases, by_turns, joined)
                break


def _needs_its_strides(node: Any) -> bool:
    """Return whether a slice of a wider matrix cannot stand for a node: Inductor does not make all that reads it.

    Results of the graph keep their strides. Operators of others may rely on them.
    """
    for user in node.users:
        target = user.target
        if user.op != "call_function" or target in _BY_PLACE or getattr(target, "namespace", "") not in _OF_TORCH:
            return True
        returns = target._schema.returns
        if any(each.alias_info is not None for each in returns) and _needs_its_strides(user):
            return True
    return False


def _lie_in_one(biases: tuple[Any, ...], weights: tuple[Any, ...], by_turns: bool) -> bool:
    """Return whether biases are inputs of the graph that lie in one vector, an element for each row of the weights."""
    if not all(map(_is_input, biases)):
        return False
    values = [node.meta["val"] for node in biases]
    rows = [weight.meta["val"].shape[:1] for weight in weights]
    return [value.shape for value in values] == rows and joined_vector(values, by_turns) is not None


def _weight(node: Any) -> Any:
    """Return the graph's input (N, K) whose transpose a node is; None: it is something else."""
    if not isinstance(node, torch.fx.Node) or node.target not in _TRANSPOSES:
        return None
    weight = node.args[0]
    if not _is_static(node) or not _is_input(weight):
        return None
    value, turned = weight.meta["val"], node.meta["val"]
    is_turned = (turned.shape, turned.stride()) == (value.shape[::-1], value.stride()[::-1])
    return weight if value.dim() == 2 and is_turned else None


def _is_static(node: Any) -> bool:
    """Return whether a node is a dense tensor of known extents. To compare symbols would give the graph a guard."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset()))


def _is_input(node: Any) -> bool:
    return _is_static(node) and node.op in ("placeholder", "get_attr")


def _source(node: Any) -> Any:
    """Return what is equal for equal inputs: reshapes of one node to one shape are the same matrix."""
    if node.target in _RESHAPES:
        return node.args[0], tuple(node.meta["val"].shape)
    return node


def _join(graph: Any, group: _Group) -> None:
    """Put one product in place of those of a group, and slices of it in place of their results."""
    first = next(node for node in graph.nodes if node in group.products)
    a, count = first.args[-2], len(group.products)
    with graph.inserting_before(first):
        value = a.meta["val"].new_empty((a.meta["val"].shape[0], group.joined.shape[0]))
        target, biases = (addmm_joined, [list(group.biases)]) if group.biases else (mm_joined, [])
        whole = _call(graph, first, target, (*biases, a, list(group.weights), group.by_turns), value)
        begin = 0
        for i, (node, weight) in enumerate(zip(group.products, group.weights, strict=True)):
            end = begin + weight.meta["val"].shape[0]
            part = (1, i, _END, count) if group.by_turns else (1, begin, end)
            node.replace_all_uses_with(_call(graph, node, _SLICE, (whole, *part), _SLICE(value, *part)))
            begin = end
    for node in group.products:
        graph.erase_node(node)


def _call(graph: Any, like: Any, target: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    """Return a new node with the origin of another one and a value of its own."""
    made = graph.call_function(target, arguments)
    made.meta.update({name: each for name, each in like.meta.items() if name != "tensor_meta"})
    made.meta["val"] = value
    return made


def _fuse_gate(graph: Any, group: _Group, serves_gate: ServesGate) -> bool:
    """Replace ``act(gate) * up`` of a group of two by one operator; return False if nothing was replaced."""
    gate, up = group.products
    for product in [user for user in _ends(up) if user.target is _ATEN.mul.Tensor]:
        others = [arg for arg in product.args if _before_reshapes(arg) is not up]
        chain = _chain(others[0], gate) if len(others) == 1 and isinstance(others[0], torch.fx.Node) else None
        if chain is None or not _is_used_there_only(up, product, chain) or not _are_alike(product, up):
            continue
        activation = _activation(others[0], gate)
        if activation is None or not serves_gate(group.left.meta["val"], group.joined, activation):
            continue
        with graph.inserting_before(product):
            value, result = up.meta["val"], product.meta["val"]
            made = _call(graph, product, gated_joined, (up.args[0], *group.weights, activation), value)
            if result.shape != value.shape:
                made = _call(graph, product, _RESHAPE, (made, list(result.shape)), result)
        product.replace_all_uses_with(made)
        _erase(graph, product)
        return True
    return False


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two nodes have as many elements, of the same dtype."""
    return _have_as_many(one, other) and one.meta["val"].dtype == other.meta["val"].dtype


def _have_as_many(one: Any, other: Any) -> bool:
    return _is_static(one) and _is_static(other) and one.meta["val"].numel() == other.meta["val"].numel()


def _ends(node: Any) -> list[Any]:
    """Return the users of a node behind reshapes."""
    found: list[Any] = []
    for user in node.users:
        found += _ends(user) if user.target in _RESHAPES else [user]
    return found


def _before_reshapes(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.target in _RESHAPES:
        node = node.args[0]
    return node


def _chain(node: Any, source: Any) -> set[Any] | None:
    """Return the nodes that lead from a source to a node, both included; None if there are other leaves, or none.

    Each has as many elements as the source: a broadcast would mix them. Each is of a floating dtype of 16 bits or more.
    """
    found: set[Any] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        if not _have_as_many(one, source) or one.meta["val"].dtype not in _WIDE:
            return None
        found.add(one)
        if one is source:
            continue
        if one.target not in (*_RESHAPES, _CAST, *_POINTWISE) or not one.all_input_nodes:
            return None
        waiting += one.all_input_nodes
    return found if source in found else None


def _is_used_there_only(up: Any, product: Any, chain: set[Any]) -> bool:
    """Return whether nothing but the product reads the two results, or what lies between."""
    return _ends(up) == [product] and all(user in chain or user is product for node in chain for user in node.users)


def _activation(node: Any, source: Any) -> ActivationName | None:
    """Return the name of the activation that leads from a source to a node, by its values in fp64; None: another."""
    known = {source: _POINTS}

    def value(each: Any) -> Any:
        if not isinstance(each, torch.fx.Node):
            return each
        if each not in known:
            passes_on = each.target in (*_RESHAPES, _CAST)
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


def _erase(graph: Any, node: Any) -> None:
    """Erase a node without users, and those before it that have none then, up to the graph's inputs."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if not one.users and one.op == "call_function":
            waiting += [each for each in one.all_input_nodes if each not in waiting]
            graph.erase_node(one)
