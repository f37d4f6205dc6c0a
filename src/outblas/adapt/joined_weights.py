"""Weights of several linear layers in one tensor; the layers' parameters become views of it.

The parameters stay the same objects, with the same values. So state dicts, optimisers and adapters see what they saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class JoinedWeights:
    """The weights and biases of some layers, one below the other or row by row by turns.

    Args:
        linears: plain layers that fit (:func:`outblas.adapt.plain_linears.why_not_joined`).
        by_turns: row j of each layer follows row j of the layer before; they must have equal shapes.

    Attributes:
        weight: (sum of N, K); None after the parameters have moved elsewhere.
        bias: (sum of N), or None.
    """

    def __init__(self, linears: Sequence[Any], by_turns: bool = False) -> None:
        self.linears, self._by_turns = tuple(linears), by_turns
        self.sizes = [one.out_features for one in linears]
        with torch.no_grad():
            self.weight = self._join([one.weight for one in linears])
            self.bias = None if linears[0].bias is None else self._join([one.bias for one in linears])
        self._pointers = self._addresses()

    def intact(self) -> bool:
        """Return True if every parameter is still a view of the joined tensors; if not, let go of them.

        Moving a model to another device or dtype gives its parameters new memory.
        """
        if self.weight is None:
            return False
        if self._addresses() == self._pointers:
            return True
        self.weight = self.bias = None
        return False

    def separate(self) -> None:
        """Give each parameter that is still a view memory of its own again, and let go of the joined tensors."""
        with torch.no_grad():
            for parameter, pointer in zip(self._parameters(), self._pointers, strict=True):
                if pointer and _address(parameter) == pointer:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self.weight = self.bias = None

    def _join(self, parameters: Sequence[Any]) -> Any:
        first, rows = parameters[0], sum(self.sizes)
        joined = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
        views = [joined[i :: len(self.sizes)] for i in range(len(self.sizes))]
        if not self._by_turns:
            views = list(joined.split(self.sizes))
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter)
            parameter.data = view
        return joined

    def _parameters(self) -> list[Any]:
        return [one._parameters.get(name) for one in self.linears for name in ("weight", "bias")]

    def _addresses(self) -> list[int]:
        return [_address(one) for one in self._parameters()]


def _address(parameter: Any) -> int:
    """Return the address of an ordinary parameter; 0 for any other, such as a quantised one."""
    return parameter.data_ptr() if type(parameter) is torch.nn.Parameter else 0
