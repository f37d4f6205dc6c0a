"""The report of :func:`outblas.optimize`: merged layers, fused operations, and layers left alone with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class OptimizeReport:
    """The changes of :func:`outblas.optimize` to a model. The text has one line for equal entries of all layers.

    Attributes:
        merged: groups of layers that became one product, e.g. ``"layers.0.attn: q_proj, k_proj, v_proj"``.
        fused: operations that run in a product's kernel if there is one, e.g. ``"layers.0.mlp: silu(gate_proj) *
            up_proj"``.
        norms: RMS norms that torch's fused kernel computes, e.g. ``"layers.0.input_norm: RMS norm"``.
        left_alone: name of a layer or module -> the reason.
    """

    merged: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for title, entries in (("merged", self.merged), ("fused", self.fused), ("in torch's kernel", self.norms)):
            lines += [f"{title}:", *(_collapsed(entries) or ["  nothing"])]
        left = _collapsed(f"{name}: {reason}" for name, reason in self.left_alone.items())
        return "\n".join([*lines, "left alone:", *(left or ["  nothing"])])


def _collapsed(entries: Iterable[str]) -> list[str]:
    """Return a line for entries that differ in the numbers of layers alone, with their count."""
    counts: dict[str, int] = {}
    for entry in entries:
        name, _, rest = entry.partition(":")
        key = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) + ":" + rest
        counts[key] = counts.get(key, 0) + 1
    return [f"  {key} ({count} times)" if count > 1 else f"  {key}" for key, count in counts.items()]
