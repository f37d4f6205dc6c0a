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

from outblas.dispatch.fused_layer import ActivationName
from outblas.dispatch.fusion.graph_nodes import (
    RESHAPE,
    RESHAPES,
    activation_between,
    before_reshapes,
    chain_between,
    erase_unused,
    have_as_many,
    is_input,
    is_static,
    is_used_there_only,
    new_call,
    users_behind_reshapes,
    weight_input,
)
from outblas.dispatch.fusion.joined_operators import (
    addmm_joined,
    gated_joined,
    joined_matrix,
    joined_vector,
    mm_joined,
)

_ATEN = torch.ops.aten
_MM, _ADDMM, _SLICE = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.slice.Tensor
#: Namespaces of operators that Inductor knows.
_OF_TORCH = ("aten", "prims")
#: Operators that read memory by its place, whatever the strides are.
_BY_PLACE = (_ATEN.as_strided.default, _ATEN.view.dtype)
_END = 2**63 - 1

#: Returns whether to join, from the values of the input (M, K) and of the joined matrix (N, K).
ServesProduct = Callable[[Any, Any], bool]
#: The same for a gate; the last argument is the name of its activation.
ServesGate = Callable[[Any, Any, ActivationName], bool]


class _Group(NamedTuple):
    """Products of one input with the weights of one matrix, in the order of its rows.

    Attributes:
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
        a, weight = node.args[-2], weight_input(node.args[-1])
        if weight is None or not is_static(a) or _needs_its_strides(node):
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
    if not all(map(is_input, biases)):
        return False
    values = [node.meta["val"] for node in biases]
    rows = [weight.meta["val"].shape[:1] for weight in weights]
    return [value.shape for value in values] == rows and joined_vector(values, by_turns) is not None


def _source(node: Any) -> Any:
    """Return what is equal for equal inputs: reshapes of one node to one shape are the same matrix."""
    if node.target in RESHAPES:
        return node.args[0], tuple(node.meta["val"].shape)
    return node


def _join(graph: Any, group: _Group) -> None:
    first = next(node for node in graph.nodes if node in group.products)
    a, count = first.args[-2], len(group.products)
    with graph.inserting_before(first):
        value = a.meta["val"].new_empty((a.meta["val"].shape[0], group.joined.shape[0]))
        target, biases = (addmm_joined, [list(group.biases)]) if group.biases else (mm_joined, [])
        whole = new_call(graph, first, target, (*biases, a, list(group.weights), group.by_turns), value)
        begin = 0
        for i, (node, weight) in enumerate(zip(group.products, group.weights, strict=True)):
            end = begin + weight.meta["val"].shape[0]
            part = (1, i, _END, count) if group.by_turns else (1, begin, end)
            node.replace_all_uses_with(new_call(graph, node, _SLICE, (whole, *part), _SLICE(value, *part)))
            begin = end
    for node in group.products:
        graph.erase_node(node)


def _fuse_gate(graph: Any, group: _Group, serves_gate: ServesGate) -> bool:
    """Replace ``act(gate) * up`` of a group of two by one operator; return False if nothing was replaced."""
    gate, up = group.products
    for product in [user for user in users_behind_reshapes(up) if user.target is _ATEN.mul.Tensor]:
        others = [arg for arg in product.args if before_reshapes(arg) is not up]
        chain = chain_between(others[0], gate) if len(others) == 1 and isinstance(others[0], torch.fx.Node) else None
        if chain is None or not is_used_there_only(up, product, chain) or not _are_alike(product, up):
            continue
        activation = activation_between(others[0], gate)
        if activation is None or not serves_gate(group.left.meta["val"], group.joined, activation):
            continue
        with graph.inserting_before(product):
            value, result = up.meta["val"], product.meta["val"]
            made = new_call(graph, product, gated_joined, (up.args[0], *group.weights, activation), value)
            if result.shape != value.shape:
                made = new_call(graph, product, RESHAPE, (made, list(result.shape)), result)
        product.replace_all_uses_with(made)
        erase_unused(graph, product)
        return True
    return False


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two nodes have as many elements, of the same dtype."""
    return have_as_many(one, other) and one.meta["val"].dtype == other.meta["val"].dtype
