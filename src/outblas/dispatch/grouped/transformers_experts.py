"""The experts of transformers as a whole layer: its implementation ``grouped_mm`` sorts, gathers and combines here.

``transformers.integrations.moe.ExpertsInterface`` has the implementations of transformers' experts. While torch's
products are replaced, its entry ``grouped_mm`` computes as :func:`outblas.moe_mlp`. Transformers' own runs where a
gradient is needed, under torch.compile, and for another gate than SiLU(gate) * up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from outblas.dispatch.grouped.grouped_product import is_recorded
from outblas.dispatch.grouped.moe_layer import our_moe_mlp
from outblas.dispatch.product_operands import as_plain

#: Module of transformers, which is never imported here, and its implementation.
_HOME, _NAME = "transformers.integrations.moe", "grouped_mm"


class TransformersExperts:
    """The replacement of transformers' implementation, active from :meth:`install` to :meth:`remove`.

    Args:
        count: called for each layer with the number of products that kernels of this package computed.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._theirs: Any = None
        self._forward: Any = None
        self._lock = threading.RLock()

    def install(self) -> None:
        """Replace the implementation, if transformers' experts are imported; a second call changes nothing."""
        if self._theirs is not None:  # each grouped product asks
            return
        home = sys.modules.get(_HOME)
        interface = getattr(home, "ExpertsInterface", None)
        theirs = getattr(interface, "_global_mapping", {}).get(_NAME)
        with self._lock:
            if self._theirs is None and theirs is not None and theirs.__module__ == _HOME:
                self._theirs, self._forward = theirs, self._made(theirs, getattr(home, "_default_apply_gate", None))
                interface.register(_NAME, self._forward)  # type: ignore[union-attr]

    def remove(self) -> None:
        """Restore transformers' own, unless another package has replaced the implementation meanwhile."""
        interface = getattr(sys.modules.get(_HOME), "ExpertsInterface", None)
        if self._theirs is not None and interface is not None:
            if interface._global_mapping.get(_NAME) is self._forward:
                interface.register(_NAME, self._theirs)
            self._theirs = self._forward = None

    def _made(self, theirs: Callable[..., torch.Tensor], usual_gate: Any) -> Callable[..., torch.Tensor]:
        def grouped_mm_experts_forward(layer: Any, *operands: Any, **more: Any) -> torch.Tensor:
            known = len(operands) == 3 and not more and _is_swiglu(layer, usual_gate)
            result = self._layer(layer, *operands) if known else None
            return theirs(layer, *operands, **more) if result is None else result

        return grouped_mm_experts_forward

    def _layer(self, layer: Any, x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | None:
        weights = (layer.gate_up_proj, layer.down_proj)
        biases = (layer.gate_up_proj_bias, layer.down_proj_bias) if getattr(layer, "has_bias", False) else (None, None)
        if is_recorded(x, *weights, scores):  # as_plain below drops that a weight wants a gradient
            return None
        transposed = getattr(layer, "is_transposed", False)
        gate_up, down = (as_plain(w).transpose(-2, -1) if transposed else as_plain(w) for w in weights)
        return our_moe_mlp(x, gate_up, down, experts, scores, biases, count=self._count)


def _is_swiglu(layer: Any, usual_gate: Any) -> bool:
    """Return whether a layer computes SiLU(gate) * up of gates that lie before ups, and nothing after its products."""
    gate = getattr(getattr(layer, "_apply_gate", None), "__func__", None)
    usual = getattr(layer, "has_gate", True) and usual_gate is not None and gate is usual_gate
    usual = usual and getattr(layer, "is_concatenated", True) and not getattr(layer, "has_post_expert_norm", False)
    return usual and type(layer.act_fn).__name__ in ("SiLU", "SiLUActivation")
