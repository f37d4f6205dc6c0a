"""A model with a mixture of experts, and the ways to run a step of it: for moe_model.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from whole_model_errors import logit_errors
from whole_model_runs import ReadyVariant, Variant, WholeStep, get_ready
from whole_model_weights import ModelShape

from outblas.core.problem import ELEMENT_BYTES
from outblas.dispatch.grouped.grouped_state import grouped_state
from outblas.judge.faults import first_line

#: Most bytes of a layer's gathered weights for ``batched_mm``.
MOST_GATHERED = 8 << 30
#: Qwen3 30B-A3B.
SHAPE = ModelShape(
    "Qwen3MoeConfig",
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
)


@dataclass(frozen=True)
class Way:
    """A way to run the model.

    Attributes:
        experts: transformers' name of the implementation of experts.
        ours: True runs torch's matmuls by OutBLAS.
        graph: False if torch cannot capture it.
    """

    experts: str
    ours: bool = False
    graph: bool = True


WAYS = {
    "eager": Way("eager", graph=False),
    "batched_mm": Way("batched_mm"),
    "grouped_mm": Way("grouped_mm"),
    "outblas": Way("grouped_mm", ours=True),
}


@contextlib.contextmanager
def experts_by(model: Any, implementation: str) -> Iterator[None]:
    """Let a model compute its experts by another implementation of transformers meanwhile."""
    before = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


@contextlib.contextmanager
def running(model: Any, way: Way) -> Iterator[None]:
    """Run a model in a way meanwhile.

    Raises:
        DeviceError: OutBLAS cannot be on.
    """
    with experts_by(model, way.experts), Variant("", ours=way.ours).active():
        yield


def gathered_bytes(config: Any, tokens: int) -> int:
    """Return the bytes of the weights that a layer's ``batched_mm`` gathers for some tokens."""
    weights = 3 * config.moe_intermediate_size * config.hidden_size
    return tokens * config.num_experts_per_tok * weights * ELEMENT_BYTES


@dataclass
class ReadyWays:
    """The ways of a step, ready to be timed.

    Attributes:
        ready: name -> the way.
        errors: name -> errors of its logits.
        no_graph: name -> the reason why it runs without a graph.
        left_out: name -> the reason why it is not there.
    """

    ready: dict[str, ReadyVariant] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    no_graph: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, work: WholeStep, model: Any, reference: Any) -> None:
        """Prepare a way, captured if torch can, and compare its logits with fp32 ones; or leave it out.

        Args:
            reference: fp32 logits of the step's sequences.
        """
        size = gathered_bytes(model.config, work.step.tokens)
        if WAYS[name].experts == "batched_mm" and size > MOST_GATHERED:
            self.left_out[name] = f"a layer would gather {size / 2**30:.0f} GiB of weights"
            return
        try:
            made = self._captured_if_possible(name, work, model)
            self.errors[name] = logit_errors(work.logits(made), reference)
            self.ready[name] = made
        except Exception as error:  # the other ways are worth more than this one
            self.left_out[name] = first_line(error)
            _after_failure(work)

    def _captured_if_possible(self, name: str, work: WholeStep, model: Any) -> ReadyVariant:
        if not WAYS[name].graph:
            self.no_graph[name] = "it waits for the GPU"
            return ready_way(work, model, name, graph=False)
        try:
            return ready_way(work, model, name, graph=True)
        except Exception as error:
            self.no_graph[name] = first_line(error)
            _after_failure(work)
            return ready_way(work, model, name, graph=False)


def _after_failure(work: WholeStep) -> None:
    if work.graphs.pool is not None:
        torch.cuda.synchronize()  # raises if the GPU is lost: then nothing more can run
        work.graphs.renew_pool()  # a capture may have failed in it


def ready_way(work: WholeStep, model: Any, name: str, graph: bool) -> ReadyVariant:
    """Prepare a way of a step.

    Args:
        graph: capture the step, if there is a GPU.

    Raises:
        DeviceError: OutBLAS cannot be on.
        Exception: torch cannot run or capture the step.
    """
    way = WAYS[name]
    if way.ours:
        with torch.no_grad(), running(model, way):
            compile_grouped(work, model)
    with experts_by(model, way.experts):
        made = get_ready(work, model, Variant(name, ours=way.ours, graph=graph))
    if not graph:
        made.entry.around = functools.partial(running, model, way)
    return made


def compile_grouped(work: WholeStep, model: Any) -> None:
    """Run a step, and wait for the kernels of its grouped products. They are compiled in the background."""
    work.reset()
    work.run(model)
    state = grouped_state(work.ids.device.index) if work.ids.is_cuda else None
    if state is not None:
        state.wait()
