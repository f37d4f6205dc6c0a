"""Code that needs contiguous memory of a tensor, or asks about it: known by the names in its compiled code.

No source is needed, and names of every branch count. So harmless code may be taken for such, but hardly the reverse.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

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


def is_of_torch(code: Any) -> bool:
    """Return True for a function of torch itself."""
    return isinstance(code, _FUNCTIONS) and _package(code) == "torch"


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
            self._read_module(code)
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

    def _read_module(self, module: Any) -> None:
        for one in module.modules():
            kind = type(one)
            for hook in (*one._forward_pre_hooks.values(), *one._forward_hooks.values()):
                self.read(hook)
            self.read(one.__dict__.get("forward"))
            self.is_unreadable |= isinstance(one, torch.jit.ScriptModule)
            self.read(kind.forward, kind)
            self.read(kind.__call__, kind)

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
    """Return the name of the package that made a callable."""
    if isinstance(code, types.BuiltinFunctionType) and code.__module__ is None:
        return "torch" if getattr(torch._C._VariableFunctions, code.__name__, None) is code else ""
    if getattr(builtins, getattr(code, "__name__", ""), None) is code:
        return "builtins"
    return str(getattr(code, "__module__", "")).partition(".")[0]
