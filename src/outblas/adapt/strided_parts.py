"""Readers of a part of a merged product: its rows lie apart, where a layer's own output would be contiguous.

A part that a ``.transpose`` has permuted is not contiguous without merging either. So code that takes it copes with
that, as far as anybody can tell. Only readable code that asks for a layout is refused then.
"""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from outblas.adapt.dataflow import Dataflow

#: Methods and functions that permute extents.
_PERMUTING = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "H", "mH")
#: Functions of torch that may return their input or a view of it.
_VIEWING = (
    "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "split", "chunk", "tensor_split", "unbind", "narrow",
    "select", "real", "detach", "dropout",
)  # fmt: skip
#: Attributes and methods that give no part of the memory.
_NO_PARTS = ("contiguous", "clone", "shape", "size", "dim", "ndim", "numel", "dtype", "device", "requires_grad")


def has_reader_of_layout(module: Any, flow: Dataflow, parts: Sequence[int], replaced: Collection[int]) -> bool:
    """Return True if something that gets a part of a merged product may fail for it, or compute something else.

    Args:
        replaced: values of ``.view(...)`` calls that will be ``.reshape(...)``.
    """
    return _Search(module, flow, replaced).fails(parts)


class _Search:
    """Follows the values that may hold memory of a part: contiguous ones without merging, and permuted ones."""

    def __init__(self, module: Any, flow: Dataflow, replaced: Collection[int]) -> None:
        self._module, self._flow, self._replaced = module, flow, replaced
        self._waiting: list[tuple[int, bool]] = []
        self._judged, self._loses_track = set(replaced), False

    def fails(self, parts: Sequence[int]) -> bool:
        """Return True if a reader of the parts may fail."""
        self._waiting, seen = [(part, False) for part in parts], set()
        while self._waiting:
            value, permuted = self._waiting.pop()
            if (value, permuted) in seen:
                continue
            seen.add((value, permuted))
            if any(self._fails_at(user, value, permuted) for user in self._users(value)):
                return True
        return self._loses_track and self._has_other_readers()

    def _users(self, value: int) -> list[int]:
        """Values that are made of one, or unpacked from it; a name that a block sets may hold what it held before."""
        kept = (
            place
            for place, key in enumerate(self._flow.keys)
            if (key[0] == "item" and key[1] == value) or (key[0] == "unknown" and key[2:] == (value,))
        )
        return [*self._flow.users.get(value, []), *kept]

    def _fails_at(self, user: int, value: int, permuted: bool) -> bool:
        """Return True if one reader of a value may fail; else let its result wait if that may hold the memory."""
        if user < 0:  # returned, in a condition, or in an expression that is not understood
            self._loses_track |= not permuted
            return False
        key = self._flow.keys[user]
        if key[0] == "call":
            if key[2] == value:
                method = self._flow.keys[value]
                if method[0] != "attribute":
                    return not permuted
                self._waiting.append((user, permuted ^ (method[2] in _PERMUTING)))
                self._judged.add(user)
                return method[2] in LAYOUT_NAMES and user not in self._replaced and not self._may_have_dtype(user)
            return self._fails_in_call(user, permuted)
        if key[0] == "attribute" and key[2] not in _NO_PARTS:
            calls = [one for one in self._flow.users.get(user, []) if one >= 0 and self._flow.keys[one][0] == "call"]
            self._waiting.append((user, permuted ^ (key[2] in _PERMUTING and not calls)))
        elif key[0] in ("item", "part", "tuple", "starred", "unknown"):
            self._waiting.append((user, permuted))
        return False

    def _has_other_readers(self) -> bool:
        """Return True if a name of a layout stands in the code beside the calls that were judged."""
        flow = self._flow
        calls = (step.node for step in flow.steps if step.value in self._judged)
        known = {id(call.func) for call in calls if isinstance(call, ast.Call)}
        names = (one for one in ast.walk(flow.tree) if isinstance(one, ast.Attribute) and one.attr in LAYOUT_NAMES)
        return any(id(one) not in known for one in names)

    def _may_have_dtype(self, call: int) -> bool:
        """Return True for ``.view(dtype)``, which a part can do, and for an expression that may give a dtype."""
        flow = self._flow
        function, given = flow.keys[call][2:4]
        key = flow.keys[given[0]] if len(given) == 1 else ("",)
        is_dtype = key == ("unknown", *key[1:2]) or key[::2] == ("attribute", "dtype")
        return flow.keys[function][2] == "view" and (is_dtype or (len(given) == 1 and flow.is_global(given[0])))

    def _fails_in_call(self, call: int, permuted: bool) -> bool:
        """The value is an argument."""
        flow = self._flow
        function = flow.keys[call][2]
        key = flow.keys[function]
        if key[0] == "attribute" and key[1] == flow.module:
            code = getattr(self._module, key[2], None)  # None: the call is in a branch that this module never takes
            return code is not None and self._fails_in_code(code, call, permuted)
        if key[0] == "global" and key[1] not in flow.globals:
            return self._fails_in_code(getattr(builtins, key[1], None), call, permuted)
        if flow.is_global(function):
            return self._fails_in_code(flow.global_object(function), call, permuted)
        is_of_tensor = key[0] == "attribute" and hasattr(torch.Tensor, key[2])
        return not (is_of_tensor or permuted)

    def _fails_in_code(self, code: Any, call: int, permuted: bool) -> bool:
        name = str(getattr(code, "__name__", ""))
        if isinstance(code, _FUNCTIONS) and _package(code) == "torch":
            if name in _VIEWING or name in _PERMUTING:
                self._waiting.append((call, permuted ^ (name in _PERMUTING)))
            return name in LAYOUT_NAMES
        reads = None if code is None else reads_layout(code)
        if not isinstance(code, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):  # whose results are new
            self._waiting.append((call, permuted))
        return bool(reads) or (reads is None and not permuted)


#: Names whose use may fail for, or tell of, memory with gaps.
LAYOUT_NAMES = frozenset(
    ("view", "view_as", "as_strided", "is_contiguous", "stride", "data_ptr", "storage", "untyped_storage")
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
#: Packages whose code copes with every layout, or never sees a tensor.
_TRUSTED = ("torch", "builtins", "math", "typing", "functools", "collections", "warnings", "logging")


def reads_layout(code: Any) -> bool | None:
    """Return True if a module, function or method may need contiguous memory, False if not; None if it is unreadable.

    What the code calls by a global name counts, and so do methods of its module, children and hooks.
    """
    found = _Reading()
    found.read(code)
    return True if found.reads else None if found.is_unreadable else False


class _Reading:
    """Reads code once, and keeps the findings.

    Attributes:
        reads: a name of :data:`LAYOUT_NAMES` stands in the code.
        is_unreadable: a part of the code is not of Python.
    """

    def __init__(self) -> None:
        self.reads, self.is_unreadable = False, False
        self._seen: set[int] = set()

    def read(self, code: Any, owner: type | None = None) -> None:
        """Read an object that has a name in some code; ignore one that cannot be called.

        Args:
            owner: class of the module whose method it is; None: none is known.
        """
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        if isinstance(code, torch.nn.Module):
            for one in code.modules():
                kind = type(one)
                for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values()):
                    self.read(hook)
                self.read(one.__dict__.get("forward"))
                self.is_unreadable |= isinstance(one, torch.jit.ScriptModule)
                self.read(kind.forward, kind)
                self.read(kind.__call__, kind)
        elif isinstance(code, types.MethodType):
            self.read(code.__func__, type(code.__self__))
        elif isinstance(code, functools.partial):
            self.read(code.func)
        elif isinstance(code, type):
            if issubclass(code, torch.autograd.Function):
                self.read(getattr(code, "forward", None))
        elif isinstance(code, types.FunctionType) and _package(code) not in _TRUSTED:
            self._read_function(code, owner)
        elif hasattr(code, "__wrapped__"):
            self.read(code.__wrapped__, owner)
        elif callable(code) and not (isinstance(code, _FUNCTIONS) and _package(code) in _TRUSTED):
            self.is_unreadable = True

    def _read_function(self, function: Any, owner: type | None) -> None:
        names = set(_names(function.__code__))
        self.reads |= bool(names & LAYOUT_NAMES)
        self.is_unreadable |= "ops" in names  # of torch: they may be anybody's
        for cell in function.__closure__ or ():
            try:
                self.read(cell.cell_contents, owner)
            except ValueError:  # the cell is empty
                continue
        for name in names:
            found = function.__globals__.get(name)
            if isinstance(found, types.ModuleType):
                if found.__name__.partition(".")[0] not in _TRUSTED:
                    for attribute in names:
                        self.read(getattr(found, attribute, None))
            else:
                self.read(found)
            for kind in () if owner is None else owner.__mro__:
                method = kind.__dict__.get(name)
                if isinstance(method, (types.FunctionType, staticmethod)):
                    self.read(getattr(method, "__func__", method), owner)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _package(code: Any) -> str:
    if isinstance(code, types.BuiltinFunctionType) and code.__module__ is None:
        return "torch" if getattr(torch._C._VariableFunctions, code.__name__, None) is code else ""
    if getattr(builtins, getattr(code, "__name__", ""), None) is code:
        return "builtins"
    return str(getattr(code, "__module__", "")).partition(".")[0]
