"""Variants of a whole layer of experts: OutBLAS, transformers with and without it, and vLLM.

Every variant gets hidden states, the experts that a router chose and their weights, and returns the layer's output. The
permutation, both products, the activation and the weighted sum are timed. The router is not.

- *outblas*: :func:`outblas.moe_mlp`.
- *transformers*: transformers' ``grouped_mm`` for experts, on ``torch._grouped_mm``. *transformers_outblas*: the same
  with torch's matmuls by OutBLAS. The module is transformers' own class for the experts of Qwen3, with the extents of
  each model.
- *transformers_batched*: its ``batched_mm``, which gathers the weights of each token's experts. transformers uses it to
  decode. It is left out where the gathered weights take more than :data:`MOST_GATHERED` bytes.
- *vllm*: vLLM's ``fused_experts`` in Triton, its choice for bf16 on Hopper, with the config of its own tables or rules.
  Its router gives int32 and fp32, so it gets the same experts and weights in these types.

The calls were written against vLLM 0.26.0 and transformers 5.17 to 5.24.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rivals.grouped_rivals import triton_config
from shapes.moe_suite import MODELS, MoeLayer

import outblas
from outblas.core.errors import DeviceError
from outblas.core.problem import ELEMENT_BYTES

#: Most bytes of gathered weights for ``batched_mm``.
MOST_GATHERED = 8 << 30


class LayerOperands(Protocol):
    """Operands of a layer on one device.

    Attributes:
        x: (tokens, hidden) bf16.
        gate_up: (experts, 2 * width, hidden) bf16: the rows of gate, then those of up.
        down: (experts, hidden, width) bf16.
        experts: int64 (tokens, top), the experts of each token.
        scores: (tokens, top) bf16, their weights.
    """

    x: Any
    gate_up: Any
    down: Any
    experts: Any
    scores: Any


@dataclass(frozen=True)
class LayerCall:
    """A variant of a layer for one set of operands.

    Attributes:
        run: enqueues the layer on torch's current stream and returns (tokens, hidden) bf16. This is the timed part.
        note: settings of the kernels that a reader of the result needs; empty if it has none.
    """

    run: Callable[[], Any]
    note: str = ""


@contextlib.contextmanager
def by_outblas() -> Iterator[None]:
    """Run torch's matmuls by OutBLAS meanwhile.

    Raises:
        DeviceError: OutBLAS cannot be on.
    """
    with outblas.use() as on:
        if not on:
            raise DeviceError("OutBLAS is not on", "a GPU that a library serves", "see the warning above")
        yield


def outblas_call(_: MoeLayer, operands: LayerOperands) -> LayerCall:
    """Return the call of :func:`outblas.moe_mlp`."""
    one = operands
    return LayerCall(lambda: outblas.moe_mlp(one.x, one.gate_up, one.down, one.experts, one.scores))


def transformers_module(operands: LayerOperands, implementation: str) -> Any:
    """Return transformers' module of the experts, which shares the operands' weights.

    Args:
        implementation: a name of transformers, e.g. ``grouped_mm``.

    Raises:
        ImportError: transformers is missing, or has no experts of Qwen3.
    """
    qwen = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    experts, _, hidden = operands.gate_up.shape
    width = operands.down.shape[-1]
    config = qwen.Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=width, num_experts=experts)
    config._experts_implementation = implementation
    with torch.device("meta"):  # the class would allocate weights of its own
        module = qwen.Qwen3MoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(operands.gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(operands.down, requires_grad=False)
    return module


def grouped_mm_call(_: MoeLayer, operands: LayerOperands) -> LayerCall:
    """Return the call of transformers' ``grouped_mm``; the errors are those of :func:`transformers_module`."""
    module = transformers_module(operands, "grouped_mm")
    return LayerCall(lambda: module(operands.x, operands.experts, operands.scores))


def gathered_bytes(layer: MoeLayer) -> int:
    """Return the bytes of the weights of all tokens' experts, one copy for each choice."""
    model = MODELS[layer.model]
    return layer.tokens * model.top * 3 * model.width * model.hidden * ELEMENT_BYTES


def batched_mm_call(layer: MoeLayer, operands: LayerOperands) -> LayerCall:
    """Return the call of transformers' ``batched_mm``.

    Raises:
        MemoryError: the gathered weights would take more than :data:`MOST_GATHERED` bytes.
        ImportError: see :func:`transformers_module`.
    """
    if gathered_bytes(layer) > MOST_GATHERED:
        raise MemoryError(f"gathered weights of {gathered_bytes(layer) / 2**30:.0f} GiB")
    module = transformers_module(operands, "batched_mm")
    return LayerCall(lambda: module(operands.x, operands.experts, operands.scores))


def vllm_call(layer: MoeLayer, operands: LayerOperands) -> LayerCall:
    """Return the call of vLLM's ``fused_experts``.

    Raises:
        ImportError: vLLM or Triton is missing.
        AttributeError: vLLM's operators of C++ are missing.
    """
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    _, note = triton_config(fused_moe, MODELS[layer.model], layer.tokens)
    experts, scores = operands.experts.to(torch.int32), operands.scores.float()
    return LayerCall(
        lambda: fused_moe.fused_experts(operands.x, operands.gate_up, operands.down, scores, experts), note
    )


@dataclass(frozen=True)
class LayerVariant:
    """A way to compute a layer.

    Attributes:
        prepare: returns the call for a set of operands. Its errors make the variant absent.
        around: the context in which the call runs and is captured.
    """

    prepare: Callable[[MoeLayer, LayerOperands], LayerCall]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


VARIANTS = {
    "outblas": LayerVariant(outblas_call),
    "transformers_outblas": LayerVariant(grouped_mm_call, by_outblas),
    "transformers": LayerVariant(grouped_mm_call),
    "transformers_batched": LayerVariant(batched_mm_call),
    "vllm": LayerVariant(vllm_call),
}
#: Variants without any part of OutBLAS.
RIVALS = ("transformers", "transformers_batched", "vllm")
