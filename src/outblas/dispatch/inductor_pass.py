"""A pass over Inductor's graph that puts ``outblas::mm`` in place of products; it runs after torch's own passes.

A product is replaced if the library has a kernel for it: two fp16 or bf16 matrices on CUDA, with extents that are
numbers. M may be symbolic. Then one kernel for some M is enough, and the operator looks each M up when it runs.
A gate with SiLU whose weight has the rows of gate above those of up, as engines merge them, becomes
``outblas::silu_gated`` (:mod:`outblas.dispatch.fusion.stacked_gate`).
Inductor keeps everything else, because it may fuse its own templates with later operations. Inductor has already split
off biases that are better added later. A layer with another bias becomes ``outblas::addmm``
(:mod:`outblas.dispatch.fusion.biased_product`) if M is symbolic, or one that engines capture.

With some settings torch takes products of one row apart before any pass runs. Its kernels are faster where weights are
not merged, as they compute products of one input together. So such products stay whole
(:func:`outblas.dispatch.inductor_settings.keep_products`) while a model of the process is optimised, and if they may be
merged gates. The pass takes them apart in a graph in which it finds no merged weights.

While the process's guarantee is ``batch_invariant``, every half-precision product on CUDA is replaced, also with
symbolic extents, a bias or a true batch (:data:`outblas.dispatch.torch_op.INVARIANT`).
"""

from __future__ import annotations

import contextvars
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from outblas.core.switches import is_off
from outblas.dispatch import device_registry, fused, inductor_settings, torch_op
from outblas.dispatch.fused_layer import FUSED_VARIABLE, ActivationName
from outblas.dispatch.fusion import (
    biased_product,
    graph_nodes,
    joined_operators,
    joined_products,
    stacked_gate,
)
from outblas.dispatch.fusion.biased_product import addmm, is_biased_layer
from outblas.dispatch.fusion.joined_products import join_products
from outblas.dispatch.fusion.stacked_gate import fuse_stacked_gates, gate_for_some_m
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.inductor_settings import keep_products, setting_of_threads, take_apart
from outblas.dispatch.product import has_kernel, has_kernel_for_some_m
from outblas.dispatch.product_operands import is_half
from outblas.dispatch.torch_op import INVARIANT, mm
from outblas.kernels.epilogue import STACKED_GATE, Epilogue

#: Files that make the pass.
_FILES = tuple(
    str(module.__file__)
    for module in (
        inductor_settings,
        torch_op,
        joined_products,
        joined_operators,
        biased_product,
        stacked_gate,
        graph_nodes,
    )
)
#: torch's class of passes that take ``is_inference``; None: this torch has none.
_TOLD_OF_INFERENCE = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
#: torch's operator -> this package's, for graphs whose products are replaced where that is faster.
PRODUCTS_ALONE = {torch.ops.aten.mm.default: mm}


def has_kernel_for_graph(a: Any, b: Any) -> bool:
    """Return True if the library has a kernel for the product of two graph nodes, or for some value of a symbolic M.

    No symbolic extent is compared with a number, so the graph gets no guard.

    Args:
        a: fake tensor of the first node (``node.meta["val"]``), (M, K).
        b: fake tensor of the second node, (K, N).

    Returns:
        False also for another symbolic extent or stride, and for anything that is no tensor.
    """
    if not _are_on_gpu(a, b):
        return False
    if not all(isinstance(number, int) for number in (*a.shape[1:], *a.stride(), *b.shape, *b.stride())):
        return False
    device = device_registry.device_state(a.device.index)
    return (has_kernel if isinstance(a.shape[0], int) else has_kernel_for_some_m)(device, a, b)


def is_half_for_graph(a: Any, b: Any) -> bool:
    """Return True if two graph nodes are half-precision tensors on one GPU, of any extents.

    Args:
        a: fake tensor of the first node.
        b: fake tensor of the second node.
    """
    return _are_on_gpu(a, b) and is_half(a, b)


def _are_on_gpu(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    on_gpu = a.device.type == device_registry.DEVICE_TYPE and a.device == b.device
    return on_gpu and a.layout == b.layout == torch.strided


class ProductPass(_TOLD_OF_INFERENCE or CustomGraphPass):  # type: ignore[misc]
    """A pass of Inductor that replaces ``aten.mm`` by ``outblas::mm`` where it pays. It runs after earlier passes.

    Args:
        before: the user's passes: None, one, or a sequence.
        predicate: function of the values of two graph nodes that says whether to replace their product.

    Attributes:
        active: False switches it off.
        replaced: number of products that it has replaced.
        restore: undoes what :func:`install` changed beside the setting of passes; None if it is not installed.
    """

    def __init__(self, before: Any = None, predicate: Callable[[Any, Any], bool] = has_kernel_for_graph) -> None:
        self.before, self._predicate = before, predicate
        self.active, self.replaced = True, 0
        self.restore: Callable[[], None] | None = None
        self._counts: ProductPass = self

    def after(self, before: Any) -> ProductPass:
        """Return this pass run after other ones. The result counts here, and has no effect while this pass is switched
        off.
        """
        made = ProductPass(before, self._predicate)
        made._counts = self._counts
        return made

    def is_same_pass(self, other: ProductPass) -> bool:
        """Return True if ``other`` is this pass or one that :meth:`after` made of it."""
        return self._counts is other._counts

    def __deepcopy__(self, memo: Any) -> ProductPass:
        """Itself: a copy of Inductor's settings must not outlive :func:`remove`."""
        return self

    def __call__(self, graph: Any, is_inference: bool = True) -> None:
        for each in _passes(self.before):
            is_told = _TOLD_OF_INFERENCE is not None and isinstance(each, _TOLD_OF_INFERENCE)
            each(graph, is_inference) if is_told else each(graph)
        if self._acts():
            self._counts.replaced += self._replace(graph)

    def keeps(self, operator: Any, a: Any, b: Any) -> bool:
        """Return True if torch must not take a product apart, because this pass may replace it.

        False if the pass is not among those that this thread compiles with: nothing else would replace the product.

        Args:
            operator: torch's, e.g. ``torch.ops.aten.mm.default``.
            a: fake tensor of the first operand.
            b: fake tensor of the second operand.
        """
        if not self._acts() or not self._is_set():
            return False
        predicate, operators = self._products()
        if operator not in operators:
            return False
        if process_guarantee() == "batch_invariant":
            return predicate(a, b)
        if joined_operators.joined_shapes() and (predicate(a, b) or self._serves_joined(a, b)):
            return True
        return self._serves_stacked(a, b.t())

    def _serves_joined(self, a: Any, b: Any) -> bool:
        """Return whether to compute a product together with others whose weights lie in one matrix of a model."""
        if not is_half_for_graph(a, b) or not isinstance(a.shape[0], int):  # products are joined where M is fixed
            return False
        weight = b.t()
        shape = joined_operators.joined_shape(weight)
        if shape is None:
            return False
        joined = weight.new_empty(shape)
        if weight.is_contiguous():
            return self._predicate(a, joined.t())
        return any(self._serves_gate(a, joined, activation) for activation in get_args(ActivationName))

    def _is_set(self) -> bool:
        passes = _passes(config.post_grad_custom_post_pass)
        return any(isinstance(each, ProductPass) and each.is_same_pass(self) for each in passes)

    def _products(self) -> tuple[Callable[[Any, Any], bool], Mapping[Any, Any]]:
        if process_guarantee() == "batch_invariant":
            return is_half_for_graph, INVARIANT
        return self._predicate, PRODUCTS_ALONE

    def _replace(self, graph: Any) -> int:
        """Replace the products that the process's guarantee names; return their number."""
        predicate, operators = self._products()
        return self._replace_groups(graph) + replace_products(graph, predicate, operators)

    def _replace_groups(self, graph: Any) -> int:
        """Replace products together with others or with what follows them; none under a guarantee."""
        if process_guarantee() == "batch_invariant":
            return 0
        joined = join_products(graph, lambda a, w: self._predicate(a, w.t()), self._serves_gate)
        gates = fuse_stacked_gates(graph, self._serves_stacked)
        if not joined + gates:
            take_apart(graph, PRODUCTS_ALONE)
        return joined + gates + _replace_biased(graph, self._predicate)

    def _serves_gate(self, a: Any, w: Any, activation: ActivationName) -> bool:
        """Return whether to compute a gate by a fused kernel: w (2H, K) has the rows of gate and up by turns."""
        epilogue = Epilogue(activation=activation, gated=True)
        return is_half_for_graph(a, w) and fused.serves(a, w.t(), epilogue)

    def _serves_stacked(self, a: Any, w: Any) -> bool:
        """Return whether to compute a gate whose weight (2H, K) has the rows of gate above those of up by one operator.

        With a symbolic M one kernel for some M is enough: the operator decides for each M.
        """
        if is_off(FUSED_VARIABLE) or not is_half_for_graph(a, w) or not w.is_contiguous():
            return False
        if isinstance(a.shape[0], int):
            return fused.serves(a, w.t(), STACKED_GATE)
        return gate_for_some_m(a, w)

    def uuid(self) -> Any:
        """Return the key for Inductor's cache; None, which means "do not cache", if an earlier pass has no key.

        It is ``("outblas", hash of the pass, libraries, matrices, acts, earlier keys)``. ``libraries`` tells those of
        all visible GPUs. ``matrices`` are the shapes of those in which optimised models lay weights. ``acts`` tells
        whether the pass acts, and the last part is a tuple of the earlier passes' keys.
        """
        before = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in _passes(self.before)]
        if any(each is None for each in before):
            return None
        if torch.cuda.is_available():  # their libraries decide, also before the first product
            for index in range(torch.cuda.device_count()):
                device_registry.device_state(index)
        files = b"".join(Path(file).read_bytes() for file in (__file__, *_FILES))
        text = hashlib.sha256(files + str(is_off(FUSED_VARIABLE)).encode()).hexdigest()
        matrices = tuple(joined_operators.joined_shapes())
        return "outblas", text, device_registry.libraries_id(), matrices, self._acts(), tuple(before)

    def _acts(self) -> bool:
        """Return False in ahead-of-time compilation: the compiled package would need this one when loaded."""
        return self._counts.active and getattr(V, "aot_compilation", False) is not True


def replace_products(
    graph: Any, predicate: Callable[[Any, Any], bool], operators: Mapping[Any, Any] = PRODUCTS_ALONE
) -> int:
    """Replace the products of an FX graph that ``predicate`` accepts, in place; return their number.

    Args:
        graph: a ``torch.fx.Graph``, which is changed.
        predicate: function of the values (``node.meta["val"]``, or None) of the two operands, which are the last two
            arguments.
        operators: torch's operator, such as ``torch.ops.aten.mm.default`` -> one with the same arguments.
    """
    nodes = [
        node
        for operator in operators
        for node in graph.find_nodes(op="call_function", target=operator)
        if len(node.args) > 1 and predicate(*(getattr(each, "meta", {}).get("val") for each in node.args[-2:]))
    ]
    for node in nodes:
        _put(graph, node, operators[node.target])
    return len(nodes)


def _replace_biased(graph: Any, predicate: Callable[[Any, Any], bool]) -> int:
    """Replace layers with a bias whose product ``predicate`` accepts, in place; return their number."""
    nodes = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
        if not node.kwargs and is_biased_layer(*(getattr(each, "meta", {}).get("val") for each in node.args))
        if predicate(*(each.meta["val"] for each in node.args[1:]))
    ]
    for node in nodes:
        _put(graph, node, addmm)
    return len(nodes)


def _put(graph: Any, node: Any, operator: Any) -> None:
    with graph.inserting_before(node):
        ours = graph.call_function(operator, tuple(node.args), dict(node.kwargs))
    ours.meta.update(node.meta)
    node.replace_all_uses_with(ours)
    graph.erase_node(node)


def install() -> ProductPass:
    """Install the pass as Inductor's last one, for all threads, and return it.

    Products that it would replace stay whole in torch's decompositions until :func:`remove`.
    """
    made = ProductPass(config.post_grad_custom_post_pass)
    made.restore = keep_products(INVARIANT, made.keeps)  # aten.mm is among them
    try:
        entry = _entry()
        if entry is None:
            config.post_grad_custom_post_pass = made
        else:
            entry.user_override = _InAllThreads(entry.user_override, entry.default, made)
    except BaseException:
        made.restore()
        raise
    return made


def remove(made: ProductPass) -> None:
    """Switch a pass of :func:`install` off. Remove it from Inductor's settings unless another pass was set since."""
    made.active = False
    if made.restore is not None:
        made.restore()
        made.restore = None
    entry = _entry()
    if entry is None:
        if config.post_grad_custom_post_pass is made:
            config.post_grad_custom_post_pass = made.before
    elif isinstance(entry.user_override, _InAllThreads) and entry.user_override.made is made:
        entry.user_override = entry.user_override.own


#: Packages of engines that this package enters by their own configuration alone (:mod:`outblas.adapt.engine_plugins`).
_ENGINES = ("vllm",)


class _InAllThreads:
    """A stand-in for torch's thread-local setting of the pass, which appends this package's pass in every thread.

    It appends nothing to the passes of an engine that keeps compiled code by a hash of its own (:data:`_ENGINES`). The
    engine's hash would not tell code with this package from code without.

    Args:
        own: the setting that it replaces.
        default: the setting of a thread that has set nothing.
        made: this package's pass, as the installing thread sees it.
    """

    def __init__(self, own: Any, default: Any, made: ProductPass) -> None:
        self.own, self.made, self._last = own, made, made
        self._default, self._unset = default, contextvars.Context().run(own.get)

    def get(self) -> Any:
        value = self.own.get()
        if not self.made.active:
            return value
        before = self._default if value is self._unset else value
        if type(before).__module__.partition(".")[0] in _ENGINES:
            return value
        if before is self.made.before:
            return self.made
        last = self._last  # read twice in a row it is the same object
        if before is not last.before:
            self._last = last = self.made.after(before)
        return last

    def set(self, value: Any) -> Any:
        """Set the thread's own value; a later read in this thread adds this package's pass to it."""
        ours = isinstance(value, ProductPass) and value.is_same_pass(self.made)
        return self.own.set(value.before if ours else value)

    def reset(self, token: Any) -> None:
        self.own.reset(token)


def _entry() -> Any:
    """Return the place of torch's per-thread setting of the pass; None: the setting is the whole process's."""
    return setting_of_threads("post_grad_custom_post_pass")


def _passes(before: Any) -> Iterable[Any]:
    return () if before is None else before if isinstance(before, (list, tuple)) else (before,)
