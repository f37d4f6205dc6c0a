"""The changes of one module: collected first, then installed as the ``forward`` of this instance alone."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outblas.adapt.dataflow import Dataflow, Step
from outblas.adapt.joined_weights import separate_gaps
from outblas.adapt.parts import (
    ActivatedProduct,
    GatedProducts,
    LastProduct,
    MergedProducts,
    ResidualSum,
    module_code_must_run,
)
from outblas.adapt.rewritten_forward import PARTS, RESIDUAL, Changes, redecorated, rewritten
from outblas.adapt.structures import Activated, Gate, Merge, Sum, place, product_steps, views_of

#: Attribute of a module that holds its :class:`ModulePlan`, and the mark of an installed ``forward``.
PLAN, INSTALLED = "outblas_plan", "outblas_installed"
#: Method of torch's modules that makes a replica for another device.
REPLICATE = "_replicate_for_data_parallel"


class ModulePlan:
    """The parts that are installed in a module, which alone holds them: copies of it get None, also by pickle.

    Args:
        parts: the objects that its rewritten code calls.
        rewritten: that code, a function of the module and the arguments.
    """

    def __init__(self, module: Any, parts: Sequence[Any], rewritten: Callable[..., Any]) -> None:
        self.module, self.parts, self.rewritten = module, tuple(parts), rewritten

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def runs(self, module: Any) -> bool:
        """Return True if the rewritten code may run now; False for copies of the module, and for training."""
        if module is not self.module or module.training or module_code_must_run():
            return False
        return all(part.intact(module) for part in self.parts)

    def release(self) -> None:
        """Give all parameters memory of their own."""
        for part in self.parts:
            part.release()


class ModuleDraft:
    """The changes of a module that are not installed yet.

    Attributes:
        products: the plain layers of the module that no change has taken yet, with their calls.
        taken: names of the layers that a change has taken.

    Raises:
        UsageError: its ``forward`` cannot be read or rewritten.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._outer = type(module).forward
        self._inner = inspect.unwrap(self._outer)
        self.flow = _flow(self._inner)
        redecorated(self._outer, self._inner, takes_residual=True)  # raises before anything has changed
        self.products = product_steps(module, self.flow)
        self.taken: set[str] = set()
        self._changes = Changes()
        self._makers: list[Callable[[], Any]] = []

    @property
    def is_empty(self) -> bool:
        return not self._makers

    def merge(self, found: Merge) -> None:
        """Add one product for several layers, in front of the first statement that calls one."""
        part = self._add(functools.partial(MergedProducts, self.module, tuple(found.steps)))
        names = [f"outblas_{name}" for name in found.steps]
        first = next(iter(found.steps.values()))
        line = f"{', '.join(names)} = {part}({found.argument})"
        self._changes.before.setdefault(first.statement, []).append(line)
        for name, text in zip(found.steps, names, strict=True):
            self._changes.replaced[place(found.steps[name])] = text
            for step in views_of(self.flow, found.steps[name].value):  # a part of a wider matrix is not contiguous
                self._changes.methods[place(step)] = "reshape"
            self._take(name)

    def gate(self, found: Gate) -> None:
        """Add a gated product in the place of the multiplication."""
        activator = self.flow.called(found.call)
        part = self._add(functools.partial(GatedProducts, self.module, found.names, found.activation, activator))
        for step in found.dropped:
            self._changes.replaced[place(step)] = "None"
        self._changes.replaced[place(found.product)] = f"{part}({found.argument})"
        for name in found.names:
            self._take(name)

    def activate(self, found: Activated) -> None:
        """Add a product with its activation in the place of the layer's call, and leave out the activation's."""
        activator = self.flow.called(found.call)
        part = self._add(functools.partial(ActivatedProduct, self.module, found.name, found.activation, activator))
        self._changes.replaced[place(found.product)] = f"{part}({found.argument})"
        self._changes.kept[place(found.call)] = "argument"
        self._take(found.name)

    def take_residual(self, name: str) -> None:
        """Let the layer whose output is returned add a residual that the caller passes."""
        call = place(self._take(name))
        self._changes.functions[call] = self._add(functools.partial(LastProduct, self.module, name))
        self._changes.takes_residual = True

    def sum(self, found: Sum) -> None:
        """Pass a residual to a child and leave out the sum. The child is installed before this module."""
        part = self._add(functools.partial(ResidualSum, self.module, found.child, found.dropouts))
        self._changes.keywords[place(found.call)] = f"{part}.forward", found.residual
        self._changes.kept[place(found.addition)] = found.kept

    def install(self) -> None:
        """Make the parts, which joins weights, and set ``forward`` of the module."""
        parts = [make() for make in self._makers]
        copy = rewritten(self._inner, self.flow.source, self._changes, parts)
        ours = redecorated(self._outer, copy, self._changes.takes_residual)
        install(ModulePlan(self.module, parts, ours), self._changes.takes_residual)

    def _take(self, name: str) -> Step:
        self.taken.add(name)
        return self.products.pop(name)

    def _add(self, make: Callable[[], Any]) -> str:
        self._makers.append(make)
        return f"{PARTS}[{len(self._makers) - 1}]"


def install(plan: ModulePlan, takes_residual: bool = False) -> None:
    """Set ``forward`` of a plan's module, on this instance alone.

    Args:
        takes_residual: a caller may pass a residual by the keyword of :mod:`outblas.adapt.rewritten_forward`.
    """
    forward = _forward(type(plan.module).forward, takes_residual)
    setattr(forward, INSTALLED, True)
    setattr(plan.module, PLAN, plan)
    plan.module.forward = types.MethodType(forward, plan.module)
    setattr(plan.module, REPLICATE, types.MethodType(_replicate, plan.module))


def plan_of(module: Any) -> ModulePlan | None:
    """Return what is installed in a module; None if nothing is, or if it is a copy of an optimised module."""
    found = module.__dict__.get(PLAN)
    return found if isinstance(found, ModulePlan) and found.module is module else None


def uninstall(module: Any) -> bool:
    """Give a module, or a copy of one, the ``forward`` of its class again; return False if it has that.

    A ``forward`` that somebody has set since stays. If it calls ours, that runs the class's code from now on.
    """
    plan = plan_of(module)
    if plan is not None:
        plan.release()
    elif PLAN in module.__dict__:  # a copy: one that was unpickled shares the memory of its layers as the original
        separate_gaps(module)
    was_planned = module.__dict__.pop(PLAN, None) is not None
    module.__dict__.pop(REPLICATE, None)
    is_ours = hasattr(getattr(module.__dict__.get("forward"), "__func__", None), INSTALLED)
    if is_ours:
        del module.forward
    return was_planned or is_ours


@functools.wraps(torch.nn.Module._replicate_for_data_parallel)  # its name, by which pickle finds it
def _replicate(self: Any) -> Any:
    """Return a replica for ``torch.nn.DataParallel`` that runs the code of its class on its own weights."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name in ("forward", PLAN, REPLICATE):
        replica.__dict__.pop(name, None)
    return replica


def _forward(original: Any, takes_residual: bool) -> Callable[..., Any]:
    """Return a ``forward`` that chooses between the module's rewritten code and its own.

    Its own is that of its class now. Somebody may replace it there, as packages of fused layers do.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan, present = self.__dict__.get(PLAN), type(self).forward
        if plan is not None and present is original and plan.runs(self):
            return plan.rewritten(self, *args, **kwargs)
        residual = kwargs.pop(RESIDUAL, None) if takes_residual else None
        result = present(self, *args, **kwargs)
        if residual is None:
            return result
        return (residual + result[0], *result[1:]) if isinstance(result, tuple) else residual + result

    return forward


@functools.lru_cache(maxsize=256)
def _flow(function: Callable[..., Any]) -> Dataflow:
    return Dataflow(function)
