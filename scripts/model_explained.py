"""Which kernels serve the linear layers of a model's step, and why: for scripts/model_steps.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llama import add
from model_runs import VARIANTS, Step, Work, added

import outblas
from outblas import affine


def linear_shapes(model: Any, step: Step) -> dict[str, tuple[Any, Any, Any]]:
    """``M_N_K`` -> (an input, the weight, what is added or None) of every distinct linear layer of a step."""
    found: dict[str, tuple[Any, Any, Any]] = {}

    def keep(x: Any, w: Any, residual: Any) -> None:
        found.setdefault(f"{x.numel() // x.shape[-1]}_{w.shape[0]}_{w.shape[1]}", (x, w, residual))

    def hook(layer: Any, inputs: tuple[Any, ...]) -> None:
        keep(inputs[0], layer.weight, None)

    def noting(x: Any, projection: Any, y: Any) -> Any:
        keep(y, projection.weight, x)  # before the hook
        return add(x, projection, y)

    hooks = [each.register_forward_pre_hook(hook) for each in model.modules() if type(each) is torch.nn.Linear]
    try:
        with added(model, noting):
            Work(model, step, context=1).run()
    finally:
        for each in hooks:
            each.remove()
    return found


def explained(model: Any, step: Step, variants: Sequence[str]) -> list[dict[str, str]]:
    """What :func:`outblas.explain` says of every distinct linear layer of a step, of each variant that is ours; and
    whether what is added to it is fused, or why not."""
    rows = []
    with torch.no_grad():
        for mnk, (x, w, residual) in linear_shapes(model, step).items():
            row = {"step": step.name, "mnk": mnk}
            for name in variants:
                variant = VARIANTS[name]
                if variant.ours:
                    promise = True if variant.weights else None
                    row[name] = outblas.explain(x, w.t(), pdl=variant.pdl, weights=promise)
                    if variant.fused and residual is not None:
                        reason = affine.why_not(x, w, residual=residual)
                        row[name] += f"; the sum is apart: {reason}" if reason else "; the sum is fused"
            rows.append(row)
    return rows
