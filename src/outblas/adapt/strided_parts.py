"""Readers of a part of a merged product: its rows lie apart, where a layer's own output would be contiguous.

A part that a ``.transpose`` has permuted is not contiguous without merging either. So code that takes it copes with
that, as far as anybody can tell. Only readable code that asks for a layout is refused then.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from outblas.adapt.dataflow import Dataflow, Key
from outblas.adapt.layout_readers import LAYOUT_NAMES, is_of_torch, reads_layout

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
        flow: the values of its ``forward``.
        parts: the values that become parts.
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
                return self._fails_in_method(user, self._flow.keys[value], permuted)
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

    def _fails_in_method(self, call: int, method: Key, permuted: bool) -> bool:
        if method[0] != "attribute":
            return not permuted
        self._waiting.append((call, permuted ^ (method[2] in _PERMUTING)))
        self._judged.add(call)
        return method[2] in LAYOUT_NAMES and call not in self._replaced and not self._may_have_dtype(call)

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
        if is_of_torch(code):
            if name in _VIEWING or name in _PERMUTING:
                self._waiting.append((call, permuted ^ (name in _PERMUTING)))
            return name in LAYOUT_NAMES
        reads = None if code is None else reads_layout(code)
        if not isinstance(code, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):  # whose results are new
            self._waiting.append((call, permuted))
        return bool(reads) or (reads is None and not permuted)
