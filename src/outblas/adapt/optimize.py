"""``outblas.optimize``: merge and fuse the linear layers of a model in place; ``outblas.restore`` undoes it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outblas.adapt.dataflow import Dataflow
from outblas.adapt.model_weights import check_module
from outblas.adapt.module_draft import ModuleDraft, ModulePlan, install, uninstall
from outblas.adapt.parts import FusedNorm, why_not_plain
from outblas.adapt.structures import find_activated, find_gates, find_last, find_merges, find_sums
from outblas.core.errors import TensorError, UsageError
from outblas.dispatch.aten_products import HALF_DTYPES

if TYPE_CHECKING:
    import torch

_TAKEN = "shares a weight with a layer of another group"


@dataclass
class OptimizeReport:
    """The changes of :func:`outblas.optimize` to a model. The text has one line for equal entries of all layers.

    Attributes:
        merged: groups of layers that became one product, e.g. ``"layers.0.attn: q_proj, k_proj, v_proj"``.
        fused: operations that run in a product's kernel if there is one, e.g. ``"layers.0.mlp: silu(gate_proj) *
            up_proj"``.
        norms: RMS norms that torch's fused kernel computes, e.g. ``"layers.0.input_norm: RMS norm"``.
        left_alone: name of a layer or module -> the reason.
    """

    merged: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("merged", self.merged), ("fused", self.fused), ("in torch's kernel", self.norms)):
            lines += [f"{title}:", *(_collapsed(entries) or ["  nothing"])]
        left = _collapsed(f"{name}: {reason}" for name, reason in self.left_alone.items())
        return "\n".join([*lines, "left alone:", *(left or ["  nothing"])])


def _collapsed(entries: Iterable[str]) -> list[str]:
    """Return a line for entries that differ in the numbers of layers alone, with their count."""
    counts: dict[str, int] = {}
    for entry in entries:
        name, _, rest = entry.partition(":")
        key = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) + ":" + rest
        counts[key] = counts.get(key, 0) + 1
    return [f"  {key} ({count} times)" if count > 1 else f"  {key}" for key, count in counts.items()]


def optimize(model: torch.nn.Module) -> OptimizeReport:
    """Merge and fuse linear layers of a model in place, where its code shows that the result is equivalent.

    The analysis reads the code of each module's ``forward``, not class names. It finds:

    - layers with a shared input whose outputs are split into heads (q, k, v): one matmul with their joined weights;
    - ``act(gate(x)) * up(x)`` and ``act(layer(x))``, with SiLU or GELU: :func:`outblas.gated_linear` and
      :func:`outblas.linear`;
    - ``residual + module(...)``, where the module returns a layer's output: :func:`outblas.linear` with a residual;
    - RMS norms in half precision: torch's fused ``rms_norm``.

    Each output sums the same terms. Kernels may sum in another order and round once instead of twice, so the last bits
    may differ from the original model.

    Parameters remain the same objects and become views of the joined weights, so no weight is stored twice. State
    dicts, optimizers and adapters keep working, as does ``save_pretrained`` of transformers. Gate and up weights are
    interleaved, so they are not contiguous. The first step of an optimizer that holds them separates them again.

    A module runs its original code during training, while gradients are recorded and under torch.compile. So does a
    module with hooks, or with a layer or an activation that was replaced or moved. Move a model to its device and dtype
    before the call, and call again after a later move. With :func:`outblas.enable`, torch.compile merges matmuls and
    fuses gates in its own graph.

    Args:
        model: any module. An already optimized module is restored first.

    Returns:
        A report of merged and fused layers, norms, and unchanged layers with reasons. ``print`` groups equal layers in
        one line.

    Raises:
        TensorError: a parameter was created in inference mode, so torch does not allow replacing it.
        UsageError: ``model`` is not a module.
        ToolchainMissing: torch is not installed.
    """
    check_module(model)
    _check_writable(model)
    restore(model)
    report = OptimizeReport()
    drafts, errors = _drafts(model)
    taken: set[int] = set()
    for name, draft in drafts.items():
        _join(name, draft, taken, report)
    for name, draft in drafts.items():
        _sum(name, draft, drafts, report)
    for draft in reversed(drafts.values()):  # children come before the modules that pass them residuals
        if not draft.is_empty:
            draft.install()
    if report.merged or report.fused:
        save_contiguously(model)
    _fuse_norms(model, report)
    _name_the_rest(model, drafts, errors, report)
    return report


def restore(model: torch.nn.Module) -> int:
    """Undo :func:`optimize`: outputs are bit-identical to those before it, and parameters own their memory.

    Parameters remain the same objects. Values loaded or trained in the meantime are kept. CUDA graphs captured earlier
    remain valid: the memory that they read lives as long as any graph. They do not see later changes of parameters.

    Returns:
        The number of restored modules; 0 if the model was not optimized.

    Raises:
        UsageError: ``model`` is not a module.
    """
    check_module(model)
    restored = sum(uninstall(module) for module in model.modules())
    for module in model.modules():
        if hasattr(module.__dict__.get(_SAVE_METHOD), _SAVES_CONTIGUOUSLY):
            delattr(module, _SAVE_METHOD)
    return restored


def _check_writable(model: Any) -> None:
    """Raise TensorError if torch does not let an ordinary parameter be replaced; no others are."""
    from torch.nn import Parameter

    for name, parameter in model.named_parameters():
        if type(parameter) is Parameter and parameter.is_inference():
            do = "create the model outside torch.inference_mode()"
            raise TensorError(f"parameter {name} was created in inference mode", "parameters that can be replaced", do)


def _drafts(model: Any) -> tuple[dict[str, ModuleDraft], dict[str, str]]:
    """Return a draft for each module whose ``forward`` is understood, and the reasons for others, by name."""
    drafts, errors = {}, {}
    for name, module in _owners(model):
        if reason := _why_not_read(module):
            errors[name] = reason
            continue
        try:
            drafts[name] = ModuleDraft(module)
        except UsageError as error:
            errors[name] = error.wrong
    return drafts, errors


def _why_not_read(module: Any) -> str:
    """Return in words why a module does not run the ``forward`` of its class; empty if it does.

    Unpickled modules may have that of the class as their own.
    """
    from torch.jit import ScriptModule

    if isinstance(module, ScriptModule):
        return "it is compiled by torch.jit"
    own = module.__dict__.get("forward")
    is_its_own = own is None or getattr(own, "__func__", None) is type(module).forward
    return "" if is_its_own else "forward was replaced on this instance"


def _owners(model: Any) -> list[tuple[str, Any]]:
    """Modules that have children; the insides of layers and their wrappers are left out."""
    found: list[tuple[str, Any]] = []
    closed: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in closed):
            continue
        if _is_layer(module):
            closed.append(f"{name}.")
        elif module._modules:
            found.append((name, module))
    return found


def _is_layer(module: Any) -> bool:
    """A linear layer, or something that stands for one, such as an adapter or a quantised layer."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _join(name: str, draft: ModuleDraft, taken: set[int], report: OptimizeReport) -> None:
    module = draft.module
    for gate in find_gates(module, draft.flow, draft.products):
        reason = _why_no_kernel(module._modules[gate.names[0]])
        reason = reason or ("" if _take(module, gate.names, taken) else _TAKEN)
        if reason:
            report.left_alone.update({_path(name, layer): reason for layer in gate.names})
            continue
        draft.gate(gate)
        report.fused.append(f"{_shown(name)}: {gate.activation}({gate.names[0]}) * {gate.names[1]}")
    for one in find_activated(module, draft.flow, draft.products):
        if not _why_no_kernel(module._modules[one.name]):
            draft.activate(one)
            report.fused.append(f"{_shown(name)}: {one.activation}({one.name})")
    merges, refused = find_merges(module, draft.flow, draft.products)
    for merge in merges:
        names = tuple(merge.steps)
        if _take(module, names, taken):
            draft.merge(merge)
            report.merged.append(f"{_shown(name)}: {', '.join(names)}")
        else:
            refused.update(dict.fromkeys(names, _TAKEN))
    for layer, reason in refused.items():
        report.left_alone.setdefault(_path(name, layer), reason)


def _why_no_kernel(layer: Any) -> str:
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    ours = layer.weight.dtype in HALF_DTYPES
    return "" if ours else f"has weights of {dtype}; kernels take float16 and bfloat16"


def _take(module: Any, names: tuple[str, ...], taken: set[int]) -> bool:
    """Claim the weights of some layers; False if another group has one of them."""
    weights = {id(module._modules[name].weight) for name in names}
    free = not weights & taken
    if free:
        taken |= weights
    return free


def _sum(name: str, draft: ModuleDraft, drafts: dict[str, ModuleDraft], report: OptimizeReport) -> None:
    for found in find_sums(draft.module, draft.flow):
        path = _path(name, found.child)
        child = drafts.get(path)
        last = None if child is None else find_last(child.flow, child.products)
        if child is None or last is None or child.flow.returns_tuple != found.takes_first:
            continue
        if not returns_what_forward_returns(child.module):
            continue
        child.take_residual(last[0])
        draft.sum(found)
        report.fused.append(f"{path}: {last[0]} + residual")


def _fuse_norms(model: Any, report: OptimizeReport) -> None:
    for name, module in model.named_modules():
        epsilon = None if _why_not_read(module) else epsilon_of_norm(module)
        if epsilon is not None:
            part = FusedNorm(module, epsilon)
            install(ModulePlan(module, [part], part))
            report.norms.append(f"{_shown(name)}: RMS norm")


def _name_the_rest(model: Any, drafts: dict[str, ModuleDraft], errors: dict[str, str], report: OptimizeReport) -> None:
    for name, module in _owners(model):
        draft = drafts.get(name)
        for child, layer in module._modules.items():
            if layer is None or not _is_layer(layer) or (draft is not None and child in draft.taken):
                continue
            reason = why_not_plain(layer) or errors.get(name) or _why_alone(draft, child)
            report.left_alone.setdefault(_path(name, child), reason)


def _why_alone(draft: ModuleDraft | None, child: str) -> str:
    last = None if draft is None else find_last(draft.flow, draft.products)
    if draft is not None and last is not None and last[0] == child:
        if not returns_what_forward_returns(draft.module):
            return "a decorator or __call__ of its module may change its output"
        return "its output is not added to a residual at once"
    return "no layer shares its input, and no known operation follows it"


def _shown(name: str) -> str:
    return name or "the model"


def _path(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


#: The method, and its argument with the tensors to save.
_SAVE_METHOD, _STATE_ARGUMENT = "save_pretrained", "state_dict"
#: Attribute of the method that :func:`save_contiguously` sets.
_SAVES_CONTIGUOUSLY = "outblas_saves"


def save_contiguously(model: Any) -> None:
    """Replace ``save_pretrained`` of a module and of those inside, if it takes a state dict; return None.

    Args:
        model: any module. A method that was replaced on the instance is left alone.
    """
    for module in model.modules():
        original = getattr(type(module), _SAVE_METHOD, None)
        own = module.__dict__.get(_SAVE_METHOD)  # an unpickled module may have that of its class
        if not inspect.isfunction(original) or (own is not None and getattr(own, "__func__", None) is not original):
            continue
        signature = inspect.signature(original)
        if _STATE_ARGUMENT in signature.parameters:
            setattr(module, _SAVE_METHOD, types.MethodType(_saver(original, signature), module))


def contiguous_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose strided tensors are contiguous. Names of one tensor have one copy.

    Args:
        state: name -> tensor, or any other value, which is kept.
    """
    copies: dict[tuple[Any, ...], Any] = {}

    def contiguous(value: Any) -> Any:
        if not _needs_copy(value):
            return value
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if place not in copies:
            copies[place] = value.contiguous()
        return copies[place]

    return {name: contiguous(value) for name, value in state.items()}


def _needs_copy(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_contiguous()


def _saver(original: Any, signature: inspect.Signature) -> Any:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        state = given.arguments.get(_STATE_ARGUMENT)
        state = self.state_dict() if state is None else state
        if any(map(_needs_copy, state.values())):
            given.arguments[_STATE_ARGUMENT] = contiguous_tensors(state)
        return original(*given.args, **given.kwargs)

    setattr(save_pretrained, _SAVES_CONTIGUOUSLY, True)
    return save_pretrained


#: Decorators that return what they wrap returns, by the module and the name of their inner function.
_DECORATORS = (
    ("transformers.modeling_layers", "forward_with_checkpointing"),  # what GradientCheckpointingLayer wraps around it
    ("transformers.utils.deprecation", "wrapped_func"),  # deprecate_kwarg
)


def returns_what_forward_returns(module: Any) -> bool:
    """Return True if a call of a module gives what the innermost function of its ``forward`` returns.

    Hooks do not count here. A class with a ``__call__`` of its own may do anything, and so may an unknown decorator.

    Args:
        module: a module whose ``forward`` is that of its class.
    """
    if type(module).__call__ not in _calls():
        return False
    function = type(module).forward
    while hasattr(function, "__wrapped__"):
        # functools.wraps replaces the names of the function itself, but neither its globals nor its code
        if (function.__globals__.get("__name__"), function.__code__.co_name) not in _DECORATORS:
            return False
        function = function.__wrapped__
    return True


def _calls() -> list[Any]:
    """Return the ``__call__`` of torch and of transformers' decoder layers; older versions have their own."""
    layers = sys.modules.get("transformers.modeling_layers")
    kinds = (nn.Module, getattr(layers, "GradientCheckpointingLayer", nn.Module))
    return [kind.__call__ for kind in kinds]


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
