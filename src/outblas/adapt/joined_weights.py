"""Weights of several linear layers in one tensor; the layers' parameters become views of it.

The parameters stay the same objects, with the same values. So state dicts, optimisers and adapters see what they saw.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from outblas.dispatch import device_registry
from outblas.dispatch.fusion.joined_operators import matrix_keepers

#: Address of a storage -> weak reference, for those in which weights were laid by turns. Weights may lie there still
#: when nobody keeps their joined weights any more. A weak reference to a parameter would keep torch from swapping it.
_laid_by_turns: dict[int, Any] = {}


def separate_before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give an optimiser's parameters that lie by turns memory of their own; a hook of torch before each step.

    Fused optimisers walk through a parameter's memory and ignore its strides. So they would change other layers.
    Parameters that were loaded may lie by turns, too. Of these, only torch's fused optimisers are known to need it.
    """
    found = False
    for group in optimizer.param_groups:
        ignores_strides = bool(group.get("fused"))
        for parameter in group["params"]:
            if has_gaps(parameter) and (ignores_strides or _lies_by_turns(parameter)):
                separate_parameter(parameter)
                found = True
    if found:
        for one in list(matrix_keepers):
            if not one.intact():
                one.separate()


def has_gaps(parameter: Any) -> bool:
    """Return whether a plain parameter has strides that leave memory between its elements, or repeat it."""
    if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided or parameter.is_contiguous():
        return False
    return not torch.ops.aten.is_non_overlapping_and_dense(parameter)


def _lies_by_turns(parameter: Any) -> bool:
    """Return True if a parameter is in a storage in which this module has laid weights by turns."""
    found = _laid_by_turns.get(parameter.untyped_storage()._cdata)
    return found is not None and not found.expired()


def separate_parameter(parameter: Any) -> None:
    """Give a parameter contiguous memory of its own, with its values. Graphs keep the former memory."""
    keep_for_graphs([parameter])
    with torch.inference_mode(False), torch.no_grad():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def separate_gaps(module: Any) -> None:
    """Give each parameter of a module that has gaps memory of its own."""
    for parameter in filter(has_gaps, module.parameters()):
        separate_parameter(parameter)


@functools.cache
def _watch_optimizers() -> None:
    """Register the hook, once in a process."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(separate_before_step)


class JoinedWeights:
    """The weights and biases of some layers, one below the other or row by row by turns.

    Args:
        linears: plain layers that fit (:func:`outblas.adapt.parts.why_not_joined`).
        by_turns: row j of each layer follows row j of the layer before; they must have equal shapes.

    Attributes:
        weight: (sum of N, K); None after the parameters have moved elsewhere.
        bias: (sum of N), or None.
    """

    def __init__(self, linears: Sequence[Any], by_turns: bool = False) -> None:
        self.linears, self._by_turns = tuple(linears), by_turns
        self.sizes = [one.out_features for one in linears]
        with torch.inference_mode(False), torch.no_grad():  # a parameter of inference mode could never be trained
            self.weight = self._join([one.weight for one in linears])
            self.bias = None if linears[0].bias is None else self._join([one.bias for one in linears])
        self._views = [_view(one, name) for one in linears for name in ("weight", "bias")]
        matrix_keepers.add(self)
        if by_turns:
            _watch_optimizers()

    def intact(self) -> bool:
        """Return True if every parameter is still the one that is a view of the joined tensors; if not, let go of them.

        Moving a model to another device or dtype gives its parameters new memory. Pruning may keep the address.
        """
        if self.weight is None:
            return False
        for linear, name, parameter, address_of, address, count_of, count in self._views:
            if linear._parameters.get(name) is not parameter or address_of() != address or count_of() != count:
                self.weight = self.bias = None
                return False
        return True

    def separate(self) -> None:
        """Give each parameter that is still a view memory of its own again, and let go of the joined tensors.

        Those that lie by turns may have moved together, as by ``share_memory``, or into a parametrisation. They say so
        by their strides.
        """
        for linear, name, parameter, _, address, *_ in self._views:
            present = linear._parameters.get(name, parameter)
            if address and type(present) is torch.nn.Parameter and present.data_ptr() == address:
                separate_parameter(present)
        for linear in self.linears if self._by_turns else ():
            separate_gaps(linear)
        self.weight = self.bias = None

    def _join(self, parameters: Sequence[Any]) -> Any:
        first, rows = parameters[0], sum(self.sizes)
        joined = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
        views = [joined[i :: len(self.sizes)] for i in range(len(self.sizes))]
        if not self._by_turns:
            views = list(joined.split(self.sizes))
        keep_for_graphs(parameters)
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter)
            parameter.data = view
        if self._by_turns:
            for address in [address for address, storage in list(_laid_by_turns.items()) if storage.expired()]:
                _laid_by_turns.pop(address, None)
            _laid_by_turns[joined.untyped_storage()._cdata] = StorageWeakRef(joined.untyped_storage())
        return joined


def _view(linear: Any, name: str) -> tuple[Any, ...]:
    """Return (layer, name, parameter, two functions of its place with their present answers: address and elements).

    Without a parameter both answers are 0. Functions are kept bound, because each forward of a module calls them.
    """
    parameter = linear._parameters.get(name)
    if parameter is None:
        return linear, name, None, int, 0, int, 0
    return linear, name, parameter, parameter.data_ptr, parameter.data_ptr(), parameter.numel, parameter.numel()


#: Tensors that hold such memory.
_kept: list[Any] = []


def keep_for_graphs(parameters: Iterable[Any]) -> None:
    """Keep the present memory of parameters while a CUDA graph may read it; call it before they move.

    Without graphs nothing is kept, and what was kept before is let go.

    Args:
        parameters: the parameters. Those on other devices than GPUs do not count.
    """
    if _graphs_may_live():
        _kept.extend(one.data for one in parameters if one.device.type == device_registry.DEVICE_TYPE)
    else:
        _kept.clear()


def _graphs_may_live() -> bool:
    """Return False if torch's allocator has no memory pool beside its default one."""
    if not torch.cuda.is_initialized():
        return False
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # an allocator that does not know, such as cudaMallocAsync
        return True
    return any(segment.get("segment_pool_id") != (0, 0) for segment in segments)
