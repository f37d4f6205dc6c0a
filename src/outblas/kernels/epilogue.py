"""Epilogues: operations on the sums in fp32 before they are rounded to C.

C = act(A B + bias) + residual, or act(gate) * up if the columns of A B + bias alternate between gate and up.

Every kernel family has this option. Kernels that compute the transpose of C have a stacked gate only. It adds no knob,
and a kernel without an epilogue is unchanged. Library rows name kernels without an epilogue;
:mod:`outblas.dispatch.fused` runs the same kernels with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.kernels.families.registry import FAMILIES

Activation = Literal["none", "silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
#: Number of fragments whose bias and residual an epilogue loads at once (16 loads of a residual), and number whose
#: outputs it computes at once. Both are the largest without register spills in any kernel.
LOADS_AT_ONCE, OUTPUTS_AT_ONCE = 8, 2


@dataclass(frozen=True, order=True)
class Epilogue:
    """The operations after the sums, in this order. By default it does nothing.

    Each value is checked alone; :func:`why_not_fused` says which combinations a kernel can have.

    Attributes:
        bias: add a vector of N elements of the output's dtype to every row.
        activation: ``none``: no function. ``silu``: x / (1 + exp(-x)). ``gelu``: x (1 + erf(x / sqrt 2)) / 2.
            ``gelu_tanh``: its tanh approximation, as torch's ``approximate="tanh"``.
        residual: add a matrix (M, N) of the output's dtype.
        gated: C is (M, N/2). Its column j is act(gate) * up, with gate and up the columns 2j and 2j + 1 of A B + bias.
            With ``silu`` this is SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020).
        stacked: gated, of a B (2H, K) as stored that has the H rows of gate above those of up. The kernel takes them by
            turns.

    Raises:
        UsageError: the activation is unknown, or another value is neither True nor False.
    """

    bias: bool = False
    activation: Activation = "none"
    residual: bool = False
    gated: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"unknown activation {self.activation!r}", " or ".join(ACTIVATIONS), "pass one of them")
        for name in ("bias", "residual", "gated", "stacked"):
            value = getattr(self, name)
            if type(value) is not bool:  # a tensor or a number here is a mistake: it becomes text of a source
                raise UsageError(f"epilogue option {name}={value!r}", "True or False", "pass a bool")

    @property
    def on(self) -> bool:
        """Return whether the epilogue does anything."""
        return self.bias or self.residual or self.gated or self.activation != "none"

    @property
    def name(self) -> str:
        """Return the name, e.g. ``bias+gelu+residual`` or ``silu+gated``; ``plain`` if the epilogue does nothing."""
        parts = [
            "bias" if self.bias else "",
            self.activation.replace("none", ""),
            "residual" if self.residual else "",
            "gated" if self.gated else "",
            "stacked" if self.stacked else "",
        ]
        return "+".join(filter(None, parts)) or "plain"

    def columns(self, n: int) -> int:
        """Return the number of columns of C for a product with N columns: ``n // 2`` if gated, else ``n``."""
        return n // 2 if self.gated else n


#: The epilogue that does nothing.
NO_EPILOGUE = Epilogue()
#: SiLU(gate) * up of a weight that has the rows of gate above those of up, as inference engines merge them.
STACKED_GATE = Epilogue(activation="silu", gated=True, stacked=True)


def prelude(epilogue: Epilogue) -> list[str]:
    """Return the lines of a source that switch the epilogue on (``kernels/epilogue/fused.cuh``).

    The list is empty if the epilogue does nothing. Otherwise it has seven lines: ``#define FUSED 1``, then the
    constants ``FUSED_BIAS``, ``FUSED_RESIDUAL``, ``FUSED_ACTIVATION``, ``FUSED_GATED``, ``FUSED_STACKED``, and
    ``FUSED_BATCH`` with ``FUSED_AT_ONCE``. The second is, e.g., ``constexpr bool FUSED_BIAS = true;``.
    ``FUSED_ACTIVATION`` is an index into :data:`ACTIVATIONS`.
    """
    if not epilogue.on:
        return []
    return [
        "#define FUSED 1",
        f"constexpr bool FUSED_BIAS = {str(epilogue.bias).lower()};",
        f"constexpr bool FUSED_RESIDUAL = {str(epilogue.residual).lower()};",
        f"constexpr int FUSED_ACTIVATION = {ACTIVATIONS.index(epilogue.activation)};",
        f"constexpr bool FUSED_GATED = {str(epilogue.gated).lower()};",
        f"constexpr bool FUSED_STACKED = {str(epilogue.stacked).lower()};",
        f"constexpr int FUSED_BATCH = {LOADS_AT_ONCE}, FUSED_AT_ONCE = {OUTPUTS_AT_ONCE};",
    ]


def why_not_fused(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> str | None:
    """Return why a legal kernel cannot have this epilogue, in words; None if it can.

    An epilogue that does something needs accumulator ``fp32``. A gated one also needs an activation, no residual and an
    even N. Example: with N = 63, the text is ``63 columns are no pairs of a gate and an up``.

    Args:
        config: the kernel; its family may refuse (``swap`` of ``sm90_wgmma_gemm``, but for a stacked gate).
    """
    if epilogue.on and problem.acc != "fp32":
        return f"the epilogue needs fp32 sums, not {problem.acc}"
    if epilogue.on and not epilogue.stacked and (reason := FAMILIES[config.family].why_no_epilogue(config)):
        return reason
    if epilogue.stacked and (reason := _why_not_stacked(problem, config, epilogue)):
        return reason
    if not epilogue.gated:
        return None
    if epilogue.residual or epilogue.activation == "none":
        return "a gated epilogue needs an activation and no residual"
    if problem.n % 2:
        return f"{problem.n} columns cannot be paired into gate and up"
    return None


def _why_not_stacked(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> str | None:
    if not epilogue.gated or epilogue.bias:
        return "stacked gate and up rows need a gated epilogue without a bias"
    if problem.layout != "TN":
        return f"stacked gate and up rows need layout TN, not {problem.layout}"
    return FAMILIES[config.family].why_not_stacked(problem, config)


def alignment(config: KernelConfig) -> int:
    """Return the alignment, bytes, of the addresses of bias and residual and of the residual's rows.

    It is 4 for ``sm90_wgmma_gemm`` and ``sm80_direct_gemm``, whose epilogues handle two elements at a time. It is 2 for
    the other families.
    """
    return 2 * ELEMENT_BYTES if FAMILIES[config.family].paired_stores else ELEMENT_BYTES
