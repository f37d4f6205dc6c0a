"""vLLM's unquantized experts, computed by :func:`outblas.moe_mlp`'s kernels.

vLLM makes a layer's ``UnquantizedFusedMoEMethod`` through its table of out-of-tree classes
(``CustomOp.register_oot``). The class here derives from vLLM's and overrides ``apply``, which vLLM calls for each step
whether its custom operators are on or off. That call is inside the operator ``vllm.moe_forward``, which is opaque to
compilers. So it runs in every uncompiled step, and once while a step is captured. vLLM runs a step of each size before
it captures it, which loads the kernels. In a capture without them, vLLM's layer runs.

vLLM's layers share a workspace, which grows with the number of tokens. vLLM locks it after start-up. A layer that needs
more then raises an error. So vLLM's layer runs, too, where OutBLAS serves more tokens than ever before. That happens in
vLLM's first step, which has the most tokens of all and counts the memory that both layers take.

The interface was read in vLLM 0.26.0: ``custom_op.py``, and of ``layers/fused_moe`` the files
``unquantized_fused_moe_method.py``, ``routed_experts.py``, ``modular_kernel.py`` and ``runner/``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from operator import attrgetter
from typing import Any

import torch

from outblas.dispatch import device_registry, enable
from outblas.dispatch.grouped.grouped_product import is_recorded
from outblas.dispatch.grouped.grouped_state import grouped_state
from outblas.dispatch.grouped.moe_layer import our_moe_mlp
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.product_operands import as_plain, dtype_name

#: vLLM's modules of custom operators and of the class, and the class.
_OPERATORS = "vllm.model_executor.custom_op"
_HOME = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_NAME = "UnquantizedFusedMoEMethod"
#: The parameters of its ``apply``.
_PARAMETERS = ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input")
#: Fewer tokens are vLLM's: its kernels find rows by index and copy none, so little could be gained there.
LEAST_TOKENS = 4
#: Attributes of a method, and of its layer -> their values in layers that are served.
METHOD: dict[str, Any] = {
    "unquantized_backend.name": "TRITON",  # others store weights differently
    "moe.has_bias": False,
    "moe.is_lora_enabled": False,
    "moe.moe_parallel_config.use_ep": False,  # experts elsewhere; tokens are exchanged around them
    "moe.moe_parallel_config.dp_size": 1,
    "moe.moe_parallel_config.pcp_size": 1,
    "moe.moe_parallel_config.sp_size": 1,
    "moe_quant_config.gemm1_clamp_limit": None,  # SiLU of clamped values
    "mk_can_overlap_shared_experts": False,  # shared experts within vLLM's kernels
}
LAYER: dict[str, Any] = {"activation.name": "SILU", "expert_map": None, "apply_router_weight_on_input": False}


def serve_experts() -> str:
    """Replace vLLM's class for layers that are made from now on; a second call changes nothing.

    While OutBLAS is off, they compute as vLLM's own.

    Returns:
        In one line, why vLLM's class stays; empty if it is replaced.
    """
    try:
        operators, base = importlib.import_module(_OPERATORS), getattr(importlib.import_module(_HOME), _NAME)
        known = operators.op_registry_oot.get(_NAME)
        parameters = tuple(inspect.signature(base.apply).parameters)
    except (ImportError, AttributeError) as error:
        return f"this vLLM has no {_NAME} that can be replaced ({' '.join(str(error).split())})"
    if parameters != _PARAMETERS:
        return f"{_NAME}.apply of this vLLM takes ({', '.join(parameters)})"
    made = _class_of_experts(base)
    if known is None:
        operators.CustomOp.register_oot(made, name=_NAME)
        made.name = base.name  # by which a user's custom_ops switch it; the registration gives another
    return "" if known in (None, made) else f"another package has replaced vLLM's {_NAME}"


@functools.cache
def _class_of_experts(base: Any) -> Any:
    """Return a class that computes as vLLM's ``base``, by kernels of this package where :func:`_result` has them."""

    class OutblasExperts(base):  # type: ignore[misc]
        #: The most tokens of a call that both layers computed.
        most_tokens = 0

        def apply(
            self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> torch.Tensor:  # fmt: skip
            operands = (layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
            result = _result(self, layer, x, topk_weights, topk_ids)
            if result is None:
                return super().apply(*operands)  # type: ignore[no-any-return]
            if len(x) > self.most_tokens:
                super().apply(*operands)  # reserves its workspace
                self.most_tokens = len(x)
            return result

    return OutblasExperts


def _result(
    method: Any, layer: Any, x: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor | None:
    """Return a layer's output (tokens, K); None if vLLM must compute it. It is noted who does."""
    gate_up, down = getattr(layer, "w13_weight", None), getattr(layer, "w2_weight", None)
    if gate_up is None or down is None or not enable.enabled() or is_recorded(x, gate_up, down, scores):
        return None
    result = None
    if len(x) >= LEAST_TOKENS and _is_served(method, layer):
        result = our_moe_mlp(x, as_plain(gate_up), as_plain(down), experts, scores, whole=True, count=enable.count)
    state = grouped_state(x.device.index) if x.device.type == device_registry.DEVICE_TYPE else None
    if state is not None:
        extents = " x ".join(map(str, gate_up.shape[1:]))  # of any rank: backends have layouts of their own
        name = f"{len(gate_up)} experts of {extents} {dtype_name(gate_up.dtype)}"
        state.note_layer(name, len(x), "engine" if result is None else "outblas")
    return result


def _is_served(method: Any, layer: Any) -> bool:
    """Return whether a layer is a sum of SwiGLU experts on one GPU, or a part of it that vLLM adds up, and no more."""
    if process_guarantee() == "batch_invariant":  # fewer tokens would have other bits
        return False
    try:
        found = (*attrgetter(*METHOD)(method), *attrgetter(*LAYER)(layer))
    except AttributeError:  # a vLLM whose layers say it otherwise
        return False
    return all(a is b or a == b for a, b in zip(found, (*METHOD.values(), *LAYER.values()), strict=True))
