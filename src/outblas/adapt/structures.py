"""Find what can be computed together in a module: by what its ``forward`` does, not by the names of classes.

Each finding says which child layers it concerns and how the source changes (:mod:`outblas.adapt.rewritten_forward`).
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outblas.adapt.dataflow import Dataflow, Step, place_of
from outblas.adapt.parts import is_inactive_dropout, is_untouched, why_not_joined, why_not_plain
from outblas.adapt.strided_parts import has_reader_of_layout
from outblas.core.errors import UsageError
from outblas.dispatch.fused_layer import ActivationName, apply_activation


@dataclass(frozen=True)
class Merge:
    """Layers of one input.

    Attributes:
        steps: name of each layer -> its call, in the order of evaluation.
        argument: name of the input in the source.
    """

    steps: dict[str, Step]
    argument: str


@dataclass(frozen=True)
class Gate:
    """``act(gate(x)) * up(x)``.

    Attributes:
        dropped: calls that the multiplication replaces; nothing else reads them.
    """

    names: tuple[str, str]
    activation: ActivationName
    argument: str
    call: Step
    product: Step
    dropped: tuple[Step, ...]


@dataclass(frozen=True)
class Activated:
    """``act(layer(x))``.

    Attributes:
        call: the call of the activation, with one argument.
    """

    name: str
    activation: ActivationName
    argument: str
    call: Step
    product: Step


@dataclass(frozen=True)
class Sum:
    """``residual + child(...)``.

    Attributes:
        takes_first: the sum is of the first entry of the child's tuple.
        kept: ``left`` or ``right``, the operand that is not the residual.
    """

    child: str
    takes_first: bool
    residual: str
    call: Step
    addition: Step
    kept: str
    dropouts: tuple[str, ...]


def product_steps(module: Any, flow: Dataflow) -> dict[str, Step]:
    """Return the calls of plain linear children that stand once in the source and take one argument."""
    found = {}
    for step in flow.steps:
        name = flow.called(step)
        child = None if name is None else module._modules.get(name)
        if name is None or child is None or why_not_plain(child) or flow.mentions(name) != 1:
            continue
        if len(flow.arguments(step)) == 1 and not flow.has_keywords(step):
            found[name] = step
    return found


def find_gates(module: Any, flow: Dataflow, products: dict[str, Step]) -> list[Gate]:
    """Return every ``act(gate(x)) * up(x)`` of two layers of equal shapes and a known activation."""
    found = []
    for product in flow.steps:
        key = flow.keys[product.value]
        if key[0] != "binary" or key[2] != "Mult":
            continue
        for first, second in ((key[3], key[4]), (key[4], key[3])):
            gate = _gate(module, flow, products, product, (first, second))
            if gate is not None:
                found.append(gate)
                break
    return found


def _gate(
    module: Any, flow: Dataflow, products: dict[str, Step], product: Step, values: tuple[int, int]
) -> Gate | None:
    names = {step.value: name for name, step in products.items()}
    act = flow.step_of(values[0])
    inner = flow.arguments(act)[:1] if act is not None and flow.keys[act.value][0] == "call" else ()
    if act is None or not inner or inner[0] not in names or values[1] not in names:
        return None
    gate, up = names[inner[0]], names[values[1]]
    argument = _argument(flow, products[gate], product)
    same = flow.arguments(products[gate]) == flow.arguments(products[up])
    alone = _only_user(flow, inner[0], act.value) and _only_user(flow, act.value, product.value)
    if gate == up or argument is None or not same or not alone or not _only_user(flow, values[1], product.value):
        return None
    layers = (module._modules[gate], module._modules[up])
    activation = activation_of_call(module, flow, act)
    if activation is None or why_not_joined(layers) or layers[0].out_features != layers[1].out_features:
        return None
    dropped = (products[gate], act, products[up])
    if _what_may_change(module, flow, dropped, product, flow.arguments(products[gate])[0]):
        return None
    return Gate((gate, up), activation, argument, act, product, dropped)


def find_activated(module: Any, flow: Dataflow, products: dict[str, Step]) -> list[Activated]:
    """Return every ``act(layer(x))`` with a known activation."""
    names = {step.value: name for name, step in products.items()}
    found = []
    for call in flow.steps:
        if flow.keys[call.value][0] != "call" or len(flow.arguments(call)) != 1:
            continue
        inner = flow.arguments(call)[0]
        if inner not in names or not _only_user(flow, inner, call.value):
            continue
        product = products[names[inner]]
        argument, activation = _argument(flow, product, product), activation_of_call(module, flow, call)
        if argument is not None and activation is not None:
            found.append(Activated(names[inner], activation, argument, call, product))
    return found


def find_merges(module: Any, flow: Dataflow, products: dict[str, Step]) -> tuple[list[Merge], dict[str, str]]:
    """Return the groups of layers of one input, and the reasons for those that cannot be merged, by layer.

    A layer's output must go to ``.view(*x.shape[:-1], -1, size)`` alone, which can read a part of a wider matrix.
    """
    groups: dict[int, dict[str, Step]] = {}
    for name, step in products.items():
        groups.setdefault(flow.arguments(step)[0], {})[name] = step
    found, refused = [], {}
    for value, steps in groups.items():
        if len(steps) < 2:
            continue
        reason = why_not_joined([module._modules[name] for name in steps]) or _why_apart(module, flow, value, steps)
        if reason:
            others = "others" if len(steps) > 2 else "another"
            refused.update(dict.fromkeys(steps, f"shares its input with {others}, but {reason}"))
        else:
            first = next(iter(steps.values()))
            found.append(Merge(steps, first.node.args[0].id))
    return found, refused


def _why_apart(module: Any, flow: Dataflow, value: int, steps: dict[str, Step]) -> str:
    """Return in words why calls of one input cannot become one product; empty if they can."""
    first, *_, last = steps.values()
    name = first.node.args[0]
    if not isinstance(name, ast.Name) or first.names.get(name.id) != value:
        return "the input has no name in the source"
    if any(step.nested for step in steps.values()):
        return "they are in a branch or loop"
    changing = _what_may_change(module, flow, steps.values(), last, value)
    if changing:
        return f"{changing} may change the input between them"
    if not all(_splits_heads(flow, step.value) for step in steps.values()):
        return "the next operation may not accept a slice of a wider matrix"
    replaced = {one.value for step in steps.values() for one in views_of(flow, step.value)}
    if has_reader_of_layout(module, flow, [step.value for step in steps.values()], replaced):
        return "the next operation may need contiguous memory"
    return ""


def _what_may_change(module: Any, flow: Dataflow, moved: Collection[Step], last: Step, value: int) -> str:
    """Return the first function between moved calls and ``last`` that may change a value in place; empty if none may.

    Args:
        moved: calls that change their place; they themselves do not count.
    """
    new = [step.value for step in moved]
    places = [flow.steps.index(step) for step in moved]
    for step in flow.steps[min(places) : flow.steps.index(last)]:
        if step not in moved and flow.keys[step.value][0] == "call" and not _keeps(module, flow, step, value, new):
            return ast.unparse(step.node.func)
    return ""


def _keeps(module: Any, flow: Dataflow, call: Step, value: int, new: Collection[int]) -> bool:
    """The call is of a child or of a computed value's method, and the value is not given to code that may change it.

    Methods that end in ``_`` were refused before.
    """
    name, shared = flow.called(call), any(flow.may_share(one, value, new) for one in flow.given(call))
    if name is not None:
        child = module._modules.get(name)
        if child is None or any(getattr(one, "inplace", False) for one in child.modules()):
            return False
        return not shared or keeps_its_inputs(child)
    if shared:
        return False
    key = flow.keys[flow.keys[call.value][2]]
    while key[0] == "attribute":
        key = flow.keys[key[1]]
        if key[0] in ("call", "item", "part", "binary"):
            return True
    return False


def _splits_heads(flow: Dataflow, value: int) -> bool:
    """The one user is ``.view(shape)``, whose shape keeps all extents but the last one, and splits that."""
    users = flow.users.get(value, [])
    key = flow.keys[users[0]] if len(users) == 1 and users[0] >= 0 else ("",)
    calls = flow.users.get(users[0], []) if key[0] == "attribute" and key[2] == "view" else []
    if len(calls) != 1 or calls[0] < 0 or flow.keys[calls[0]][0] != "call":
        return False
    parts = flow.keys[calls[0]][3]
    if len(parts) == 1 and flow.keys[parts[0]][0] == "tuple":
        parts = flow.keys[parts[0]][1:]
    # ``(*x.shape[:-1], a, b)``, or ``(x.shape[0], x.shape[1], a, b)`` in any spelling.
    keys = [flow.keys[part] for part in parts]
    if len(keys) == 3 and keys[0][0] == "starred":
        cut = flow.keys[keys[0][1]]
        return cut[0] == "part" and _is_shape(flow, cut[1]) and flow.keys[cut[2]] == _but_the_last(flow)
    if len(keys) == 4 and keys[0][0] == keys[1][0] == "item":
        same = keys[0][1] == keys[1][1] and _is_shape(flow, keys[0][1])
        return same and (keys[0][2], keys[1][2]) == (0, 1)
    return False


def views_of(flow: Dataflow, value: int) -> list[Step]:
    """Return the calls of ``.view(shape)`` on a value, and on what other methods, indices and slices make of it.

    ``reshape`` in their place gives the same numbers, and needs no contiguous memory. Left out is ``.view`` with one
    argument that may be a dtype.
    """
    found, waiting, seen = [], [value], {value}
    while waiting:
        for user in flow.users.get(waiting.pop(), []):
            key = flow.keys[user] if user >= 0 else ("",)
            if user in seen or key[0] not in ("attribute", "call", "item", "part"):
                continue
            seen.add(user)
            waiting.append(user)
            step = flow.step_of(user) if key[0] == "call" else None
            if step is not None and flow.keys[key[2]][::2] == ("attribute", "view") and _is_shape_given(flow, step):
                found.append(step)
    return found


def _is_shape_given(flow: Dataflow, view: Step) -> bool:
    """The arguments of a ``.view`` are sizes."""
    given = flow.arguments(view)
    return not flow.has_keywords(view) and (
        len(given) > 1 or (len(given) == 1 and flow.keys[given[0]][0] in ("tuple", "constant", "starred"))
    )


def _but_the_last(flow: Dataflow) -> tuple[Any, ...]:
    minus_one = flow.keys.index(("constant", "int", "-1")) if ("constant", "int", "-1") in flow.keys else None
    return ("slice", None, minus_one, None)


def _is_shape(flow: Dataflow, value: int) -> bool:
    key = flow.keys[value]
    if key[0] == "call":
        owner = flow.keys[key[2]]
        return owner[0] == "attribute" and owner[2] == "size" and not key[3] and not key[4]
    return bool(key[0] == "attribute" and key[2] == "shape")


def find_last(flow: Dataflow, products: dict[str, Step]) -> tuple[str, Step] | None:
    """Return the layer whose output the function returns, alone or as the first of a tuple, and its call."""
    if not flow.returned:
        return None
    for name, step in products.items():
        if step.value == flow.returned[0] and _only_user(flow, step.value, -1) and not step.nested:
            return name, step
    return None


def find_sums(module: Any, flow: Dataflow) -> Iterator[Sum]:
    """Yield every ``residual + child(...)`` whose residual exists before the child is called."""
    for addition in flow.steps:
        key = flow.keys[addition.value]
        if key[0] != "binary" or key[2] != "Add" or addition.nested:
            continue
        for value, residual, kept in ((key[4], key[3], "right"), (key[3], key[4], "left")):
            name = addition.node.left if kept == "right" else addition.node.right
            call, takes_first, dropouts = _child_call(module, flow, value, addition.value)
            if call is None or not isinstance(name, ast.Name) or call.names.get(name.id) != residual:
                continue
            child = flow.called(call)
            if child is None or call.nested or flow.mentions(child) != 1:
                continue
            if not _what_may_change(module, flow, [call], addition, residual):
                yield Sum(child, takes_first, name.id, call, addition, kept, dropouts)
                break


def _child_call(module: Any, flow: Dataflow, value: int, user: int) -> tuple[Step | None, bool, tuple[str, ...]]:
    """Follow a summand back through dropouts to the call of a child: the call, and if its first entry is taken."""
    dropouts: list[str] = []
    while True:
        key = flow.keys[value]
        if not _only_user(flow, value, user):
            return None, False, ()
        if key[0] == "item" and key[2] == 0:
            call = flow.step_of(key[1])
            named = call is not None and flow.called(call) in module._modules
            return (call if named else None), True, tuple(dropouts)
        step = flow.step_of(value)
        name = None if step is None else flow.called(step)
        if step is None or name not in module._modules:
            return None, False, ()
        if not is_inactive_dropout(module._modules[name]) or len(flow.arguments(step)) != 1:
            return step, False, tuple(dropouts)
        dropouts.append(str(name))
        value, user = flow.arguments(step)[0], value


def _only_user(flow: Dataflow, value: int, user: int) -> bool:
    return flow.users.get(value, []) == [user]


def _argument(flow: Dataflow, product: Step, place: Step) -> str | None:
    """Return the name of a product's input if it means the same at another place; else None."""
    node = product.node.args[0]
    value = flow.arguments(product)[0]
    known = isinstance(node, ast.Name) and place.names.get(node.id) == value == product.names.get(node.id)
    return node.id if known else None


def place(step: Step) -> tuple[int, int, int, int]:
    return place_of(step.node)


def keeps_its_inputs(module: Any) -> bool:
    """Return True if no code of a module and its children changes a tensor in place, as far as the code shows.

    Modules of ``torch.nn`` say it by their attribute ``inplace``. The ``forward`` of others must be readable, and may
    call children, methods, and functions of torch and Python.
    """
    return all(_is_harmless(one) for one in module.modules())


def _is_harmless(module: Any) -> bool:
    if getattr(module, "inplace", False):
        return False
    kind = type(module)
    if kind.__module__.startswith("torch.nn."):
        return True
    return "forward" not in module.__dict__ and _has_harmless_code(inspect.unwrap(kind.forward))


@functools.lru_cache(maxsize=256)
def _has_harmless_code(forward: Callable[..., Any]) -> bool:
    try:
        flow = Dataflow(forward)  # which refuses methods and statements that change something in place
    except UsageError:
        return False
    return all(_is_harmless_call(flow, step) for step in flow.steps if flow.keys[step.value][0] == "call")


def _is_harmless_call(flow: Dataflow, call: Step) -> bool:
    if any(word.arg in (None, "inplace", "out") for word in call.node.keywords):
        return False
    function = flow.keys[call.value][2]
    if not flow.is_global(function):
        return isinstance(call.node.func, ast.Attribute)
    found = flow.global_object(function)
    if found is None:
        return isinstance(call.node.func, ast.Name) and hasattr(builtins, call.node.func.id)
    name = str(getattr(found, "__name__", "_"))
    return str(getattr(found, "__module__", "")).partition(".")[0] == "torch" and not name.endswith("_")


#: Largest difference in fp64, relative to the larger of 1 and the value: other spellings of one formula differ less.
_TOLERANCE = 1e-12
_NAMES: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")


def activation_of_call(module: Any, flow: Dataflow, call: Step) -> ActivationName | None:
    """Return the activation that a call computes: of a child, another attribute, or a function; None if it is none."""
    if len(flow.arguments(call)) != 1:
        return None
    name = flow.called(call)
    if name is not None:
        function = getattr(module, name, None)
        return activation_of(function) if callable(function) and not flow.has_keywords(call) else None
    function = flow.global_object(flow.keys[call.value][2])
    if not callable(function) or isinstance(function, (torch.nn.Module, types.MethodType)):
        return None  # no part would see hooks of a module that is not in the model
    keywords = {word.arg: getattr(word.value, "value", None) for word in call.node.keywords}
    constant = all(isinstance(word.value, ast.Constant) and word.arg for word in call.node.keywords)
    return activation_of(lambda x: function(x, **keywords)) if constant else None


def activation_of(function: Callable[[Any], Any]) -> ActivationName | None:
    """Return the activation that a function computes, to 1e-12 in fp64 from -40 to 40; None if it is another one.

    A module must have neither children nor tensors, and no hook is called. A child could change later, unseen. A method
    of a module must not read the module, for the same reason.

    Example: transformers' ``NewGELUActivation`` gives ``"gelu_tanh"``, and its ``QuickGELUActivation`` None.

    Args:
        function: takes and returns a tensor; called with 4001 numbers on the CPU.
    """
    x = torch.linspace(-40, 40, 4001, dtype=torch.float64, device="cpu")
    try:
        formula = _formula(function)
        with torch.no_grad():
            y = None if formula is None else formula(x.clone())
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return None  # a function of something else is no activation
    if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        return None
    for name in _NAMES:
        wanted = apply_activation(x, name)
        if bool(((y - wanted).abs() <= _TOLERANCE * wanted.abs().clamp(min=1)).all()):
            return name
    return None


def _formula(function: Any) -> Callable[[Any], Any] | None:
    """Return what a function computes without hooks; None if what it computes may depend on other modules."""
    if isinstance(function, torch.nn.Module):
        alone = not (function._modules or function._parameters or function._buffers)
        plain = type(function).__call__ is torch.nn.Module.__call__ and is_untouched(function)
        return functools.partial(_outside_of_training, function) if alone and plain else None
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        method = getattr(function, "__func__", None)
        return None if method is None else lambda x: method(_Nothing(), x)
    return function  # type: ignore[no-any-return]


def _outside_of_training(module: Any, x: Any) -> Any:
    """Return a module's result in the mode in which rewritten code runs, whatever its mode is now."""
    was, module.training = module.training, False
    try:
        return module.forward(x)
    finally:
        module.training = was


class _Nothing:
    """Stands for a module: a method that reads one raises AttributeError or TypeError."""
