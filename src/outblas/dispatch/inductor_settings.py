"""Changes of Inductor beside its passes: settings of a thread, the padding of products, the table of decompositions.

torch has settings of a thread from 2.13 on. The table takes operators apart while a function is traced, before any pass
sees the graph. For instance, with ``coordinate_descent_tuning``, which ``mode="max-autotune"`` sets, a product of one
row on CUDA becomes a multiplication and a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

#: Inductor's setting that pads the extents of products.
_PADDING = "shape_padding"


def setting_of_threads(name: str) -> Any:
    """Return the place of a setting that each thread has of its own; None: the setting is the whole process's.

    Its attribute ``user_override`` is a context variable, or a stand-in of this package with the same methods. The
    default beside it cannot hold an object: torch copies it into each thread that reads it, and the copy would stay.

    Args:
        name: of the setting, e.g. ``shape_padding``.
    """
    from torch._inductor import config

    entry = getattr(config, "_config", {}).get(name)
    own = getattr(entry, "user_override", None)
    return entry if hasattr(own, "get") and hasattr(own, "reset") else None


class _Off:
    """A stand-in for torch's thread-local setting that is off in every thread. A value that a program sets is lost."""

    def get(self) -> bool:
        return False

    def set(self, value: Any) -> None:
        pass

    def reset(self, token: Any) -> None:
        pass


def switch_padding_off() -> Callable[[], None]:
    """Switch the padding of compiled products off, in all threads; return a function that restores it.

    Inductor times a product against one with padded extents, and takes the faster. A padded K may be summed in another
    order, and what it takes depends on M. So rows of a batch-invariant product would change with the batch.
    """
    from torch._inductor import config

    entry = setting_of_threads(_PADDING)
    if entry is not None:
        own, entry.user_override = entry.user_override, _Off()
        return lambda: setattr(entry, "user_override", own)
    before = getattr(config, _PADDING)
    setattr(config, _PADDING, False)
    return lambda: setattr(config, _PADDING, before)


def keep_products(operators: Collection[Any], keeps: Callable[[Any, Any, Any], bool]) -> Callable[[], None]:
    """Keep some products whole where Inductor takes them apart; return a function that undoes it.

    The tables are the whole process's. An operator that a table lacks, or a table of another kind, stays as it is.

    Args:
        operators: torch's, such as ``torch.ops.aten.mm.default``. Their last two positional arguments are the operands.
        keeps: function of an operator and the two operands, which are fake tensors, that says whether a product stays.
    """
    changed = []
    from torch._inductor import decomposition

    copied: Callable[[], Any] = getattr(decomposition, "fast_random_decomps", dict)
    tables = [getattr(decomposition, "decompositions", None), copied()]
    for table in [table for table in tables if isinstance(table, dict)]:
        for operator in operators:
            theirs = table.get(operator)
            if callable(theirs):
                table[operator] = ours = _unless_kept(operator, keeps, theirs)
                changed.append((table, operator, theirs, ours))

    def restore() -> None:
        for table, operator, theirs, ours in changed:
            if table.get(operator) is ours:  # it may have been changed since
                table[operator] = theirs

    return restore


def _unless_kept(operator: Any, keeps: Callable[[Any, Any, Any], bool], theirs: Callable[..., Any]) -> Any:
    """Return torch's decomposition of an operator, which leaves alone what is kept; its ``torchs`` is the original."""
    from torch.utils._python_dispatch import _disable_current_modes

    @functools.wraps(theirs)
    def decompose(*operands: Any, **options: Any) -> Any:
        if len(operands) > 1:
            with _disable_current_modes():  # the question must leave nothing in the graph that is traced
                if keeps(operator, *operands[-2:]):
                    return NotImplemented
        return theirs(*operands, **options)

    decompose.torchs = theirs  # type: ignore[attr-defined]
    return decompose


def take_apart(graph: Any, operators: Collection[Any]) -> None:
    """Take those products of a graph apart that :func:`keep_products` kept whole, in place.

    Args:
        graph: a ``torch.fx.Graph``. Each node has its value as ``meta["val"]``.
        operators: those of :func:`keep_products`. A product with options stays whole.
    """
    from torch._inductor import decomposition
    from torch.fx.experimental.proxy_tensor import make_fx

    decompositions = decomposition.select_decomp_table()
    for operator in operators:
        torchs = getattr(decompositions.get(operator), "torchs", None)
        if torchs is None:
            continue
        for node in graph.find_nodes(op="call_function", target=operator):
            values = [getattr(each, "meta", {}).get("val") for each in node.args]
            if node.kwargs or any(value is None for value in values) or torchs(*values) is NotImplemented:
                continue
            parts = make_fx(functools.partial(_called, torchs), decompositions)(*values).graph
            inputs = dict(zip(parts.find_nodes(op="placeholder"), node.args, strict=True))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph_copy(parts, inputs))
            graph.erase_node(node)


def _called(function: Callable[..., Any], *operands: Any) -> Any:
    """Call a function without the options that it may take: ``make_fx`` wants a value for each of them."""
    return function(*operands)
