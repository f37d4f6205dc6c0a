"""The description of one product of a model: a weight and the operations that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outblas.dispatch.linear_operands import ActivationName


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """A weight with the operations that its kernel may compute, too.

    Attributes:
        name: name of the layer or layers, e.g. ``layers.0.attn: q_proj, k_proj, v_proj``.
        weight: (N, K) tensor.
        bias: (N) tensor, or None.
        activation: activation that follows; None: none.
        gated: the rows are those of gate and up by turns.
    """

    name: str
    weight: Any
    bias: Any = None
    activation: ActivationName | None = None
    residual: bool = False
    gated: bool = False

    @property
    def is_followed(self) -> bool:
        """A kernel of OutBLAS may compute more than the product."""
        return self.activation is not None or self.residual or self.gated

    @property
    def words(self) -> str:
        """The operations after the product, e.g. ``gated silu``, or an empty text."""
        found = ["gated"] if self.gated else []
        found += [self.activation] if self.activation else []
        found += ["+ residual"] if self.residual else []
        return " ".join(found)
