"""What a kernel does to its sums before it rounds them: C = act(A B + bias) + residual, or act(gate) * up where the
columns of A B + bias are gates and ups by turns; all of it in fp32.

An option of every kernel family, which changes neither its knobs nor what it does when it is off. Rows of a library
name kernels without it; :mod:`outblas.dispatch.fused` runs the same ones with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.kernels.families.registry import FAMILIES

Activation = Literal["none", "silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
#: Fragments of which an epilogue in registers asks for bias and residual at once (16 loads of a residual), and
#: which it makes outputs together: as many as no kernel spills with.
LOADS_AT_ONCE, OUTPUTS_AT_ONCE = 8, 2


@dataclass(frozen=True, order=True)
class Epilogue:
    """What follows the sums, in this order.

    Attributes:
        bias: N elements of the output's dtype are added to every row.
        activation: ``silu``: x / (1 + exp(-x)); ``gelu``: x (1 + erf(x / sqrt 2)) / 2; ``gelu_tanh``: its approximation
            by tanh, as torch's ``approximate="tanh"``.
        residual: an (M, N) matrix of the output's dtype is added.
        gated: C is (M, N/2): column j is act(gate) * up, the columns 2j and 2j + 1 of A B + bias (with ``silu``:
            SwiGLU, Shazeer, GLU Variants Improve Transformer, 2020).
    """

    bias: bool = False
    activation: Activation = "none"
    residual: bool = False
    gated: bool = False

    @property
    def on(self) -> bool:
        """Whether anything follows."""
        return self != NO_EPILOGUE

    @property
    def name(self) -> str:
        """In words: ``bias+gelu+residual``, ``silu+gated``; ``plain`` where nothing follows."""
        parts = [
            "bias" if self.bias else "",
            self.activation.replace("none", ""),
            "residual" if self.residual else "",
            "gated" if self.gated else "",
        ]
        return "+".join(filter(None, parts)) or "plain"

    def columns(self, n: int) -> int:
        """Columns of C, of a product of N."""
        return n // 2 if self.gated else n


#: Nothing follows the sums.
NO_EPILOGUE = Epilogue()


def prelude(epilogue: Epilogue) -> list[str]:
    """Lines of a source that switch the epilogue on (``kernels/epilogue/fused.cuh``); none where it is off."""
    if not epilogue.on:
        return []
    return [
        "#define FUSED 1",
        f"constexpr bool FUSED_BIAS = {str(epilogue.bias).lower()};",
        f"constexpr bool FUSED_RESIDUAL = {str(epilogue.residual).lower()};",
        f"constexpr int FUSED_ACTIVATION = {ACTIVATIONS.index(epilogue.activation)};",
        f"constexpr bool FUSED_GATED = {str(epilogue.gated).lower()};",
        f"constexpr int FUSED_BATCH = {LOADS_AT_ONCE}, FUSED_AT_ONCE = {OUTPUTS_AT_ONCE};",
    ]


def why_not_fused(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> str | None:
    """Why a legal kernel cannot have this epilogue; None: it can."""
    if epilogue.on and problem.acc != "fp32":
        return f"the epilogue is of sums in fp32, not {problem.acc}"
    if not epilogue.gated:
        return None
    if epilogue.residual or epilogue.activation == "none":
        return "a gated epilogue has an activation and no residual"
    if problem.n % 2:
        return f"{problem.n} columns are no pairs of a gate and an up"
    return None


def alignment(config: KernelConfig) -> int:
    """Bytes that the start of bias and residual, and the residual's rows, must be multiples of."""
    return 2 * ELEMENT_BYTES if FAMILIES[config.family].paired_stores else ELEMENT_BYTES
