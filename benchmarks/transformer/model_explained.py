"""Kernels that serve the linear layers of a model's step, with the reason: for model_steps.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from llama_example import llama
from model_runs import VARIANTS, Work, followed
from step_rounds import Step

import outblas
from outblas.dispatch import linear as affine


class Linear(NamedTuple):
    """An input, the weight, and what follows: a matrix that is added, or a gate."""

    x: Any
    w: Any
    residual: Any = None
    gated: bool = False

    def note(self) -> str:
        """Return how the following operations are fused, or the reason why not; empty if none follow."""
        if not self.gated and self.residual is None:
            return ""
        # A copy of the weights by turns has their shape and strides, of which alone this is asked.
        reason = affine.why_not(self.x, self.w, residual=self.residual, gated=self.gated)
        what = "gate" if self.gated else "sum"
        return f"; the {what} is apart: {reason}" if reason else f"; the {what} is fused"


def linear_shapes(model: Any, step: Step) -> dict[str, Linear]:
    """``M_N_K`` -> every distinct linear layer of a step."""
    found: dict[str, Linear] = {}

    def keep(linear: Linear) -> None:
        x, w = linear.x, linear.w
        found.setdefault(f"{x.numel() // x.shape[-1]}_{w.shape[0]}_{w.shape[1]}", linear)

    def hook(layer: Any, inputs: tuple[Any, ...]) -> None:
        keep(Linear(inputs[0], layer.weight))

    def noting(x: Any, projection: Any, y: Any) -> Any:
        keep(Linear(y, projection.weight, residual=x))  # before the hook
        return llama.add(x, projection, y)

    def noting_gate(layer: Any, x: Any) -> Any:
        keep(Linear(x, layer.gate_up_proj.weight, gated=True))
        return llama.gate(layer, x)

    hooks = [each.register_forward_pre_hook(hook) for each in model.modules() if type(each) is torch.nn.Linear]
    try:
        with followed(model, llama.Ways(noting, noting_gate)):
            Work(model, step, context=1).run()
    finally:
        for each in hooks:
            each.remove()
    return found


def explained(model: Any, step: Step, variants: Sequence[str]) -> list[dict[str, str]]:
    """Return :func:`outblas.explain` of every distinct linear layer of a step, for each variant with OutBLAS.

    Each entry also says whether the following operations are fused, or why not.
    """
    rows = []
    with torch.no_grad():
        for mnk, linear in linear_shapes(model, step).items():
            row = {"step": step.name, "mnk": mnk}
            for name in variants:
                variant = VARIANTS[name]
                if variant.ours:
                    promise = True if variant.weights else None
                    row[name] = outblas.explain(linear.x, linear.w.t(), pdl=variant.pdl, weights=promise)
                    row[name] += linear.note() if variant.fused else ""
            rows.append(row)
    return rows
