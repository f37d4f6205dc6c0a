"""Launch kernels with an epilogue (:mod:`outblas.kernels.epilogue`).

They are launched as in :mod:`outblas.runtime.launch`, with three more parameters.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from outblas.core.config import KernelConfig
from outblas.core.errors import ConfigError, TensorError
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.kernels.epilogue import Epilogue, alignment, why_not_fused
from outblas.kernels.families.registry import FAMILIES
from outblas.runtime.cubin import Cubin
from outblas.runtime.launch import KernelCall, load, may_overlap

if TYPE_CHECKING:
    import torch


class Extra(NamedTuple):
    """Operands of an epilogue; None for an operand that the epilogue does not take.

    Attributes:
        bias: tensor of shape (N,).
        residual: tensor of shape (M, N) whose columns are adjacent in memory.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None

    def fits(self, epilogue: Epilogue) -> bool:
        """Return whether exactly the operands of the epilogue are present."""
        return epilogue.bias is (self.bias is not None) and epilogue.residual is (self.residual is not None)


def why_no_gated_output(problem: Problem, a: torch.Tensor, out: torch.Tensor) -> str:
    """Return why a gated output of a product with ``a`` cannot be written to ``out``; an empty string if it can.

    ``out`` must be contiguous, of shape (M, N // 2), and of the dtype and on the device of ``a``. Example of an answer:
    ``out is (4, 4) of torch.float16 on cpu, expected (4, 2) as the product's, contiguous``.
    """
    shape = (problem.m, problem.n // 2)
    if tuple(out.shape) != shape or out.dtype != a.dtype or out.device != a.device or not out.is_contiguous():
        return (
            f"out is {tuple(out.shape)} of {out.dtype} on {out.device}, expected a contiguous tensor of shape {shape}"
        )
    return f"out is not aligned to {ROW_ALIGN_BYTES} bytes" if out.data_ptr() % ROW_ALIGN_BYTES else ""


def why_unfit(
    problem: Problem, config: KernelConfig, extra: Extra, a: torch.Tensor, out: torch.Tensor | None = None
) -> str:
    """Return why a kernel cannot take these operands; an empty string if it can.

    It does not check that the epilogue takes them (see :meth:`Extra.fits`). Example of an answer:
    ``bias has shape (4,), expected (8,)``.

    Args:
        a: operand A, for dtype and device.
        out: output that must not overlap the operands; None: newly allocated memory.
    """
    need = alignment(config)
    shapes = {"bias": (problem.n,), "residual": (problem.m, problem.n)}
    for name, shape in shapes.items():
        t = getattr(extra, name)
        if t is None:
            continue
        if tuple(t.shape) != shape:
            return f"{name} has shape {tuple(t.shape)}, expected {shape}"
        if t.dtype != a.dtype or t.device != a.device:
            return f"{name} is {t.dtype} on {t.device}, expected {a.dtype} on {a.device}"
        if problem.n > 1 and t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}, expected a column stride of 1"
        pitch = row_stride(t) * ELEMENT_BYTES if t.dim() == 2 else 0
        if t.data_ptr() % need or pitch % need:
            return f"{name} or its rows are not aligned to {need} bytes"
        # With overlapping tiles (knob shift), a tile would read as residual the values that another tile has stored.
        if out is not None and may_overlap(t, out):
            return f"{name} shares memory with the output"
    return ""


def row_stride(residual: torch.Tensor) -> int:
    """Return the distance between rows of a residual, elements; N if it has one row, whatever its stride."""
    return int(residual.stride(0)) if residual.shape[0] > 1 else int(residual.shape[1])


class FusedKernel:
    """A kernel with an epilogue, loaded into the current context. :meth:`bind` gives a call: ``call(stream)`` enqueues
    it.

    Args:
        cubin: compiled from ``make_source(problem, config, epilogue)``.

    Attributes:
        name: ``<config name> with <epilogue name>``, e.g. ending in ``with bias+gelu``.

    Raises:
        DeviceError: the driver cannot load the cubin.
    """

    def __init__(self, cubin: Cubin, config: KernelConfig, epilogue: Epilogue) -> None:
        self._kernel = load(cubin, config)
        self.config, self.epilogue, self.packaged = config, epilogue, False
        self.name = f"{self._kernel.name} with {epilogue.name}"

    def bind(
        self, problem: Problem, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], extra: Extra,
        workspace: torch.Tensor | None = None,
    ) -> KernelCall:  # fmt: skip
        """Return a call that computes ``c = act(a @ b + bias) + residual``.

        The call keeps all tensors alive until it is released. Nothing runs before ``call(stream)``.

        Args:
            operands: (a, b, c) as in :meth:`outblas.runtime.launch.LoadedKernel.bind`. For a gated epilogue, c is (M,
                N/2).
            extra: bias and residual; ``Extra()`` if the epilogue takes neither.

        Raises:
            ConfigError: the config is not legal for the problem, or not with this epilogue.
            TensorError: as :meth:`outblas.runtime.launch.LoadedKernel.bind`. Also if bias or residual is missing, not
                taken, of a wrong shape, dtype or device, misaligned, or overlaps c.
        """
        reason = why_not_fused(problem, self.config, self.epilogue)
        if reason is not None:
            raise ConfigError(
                f"{self.name} on {problem.key}: {reason}", "a supported epilogue", "use the kernel without an epilogue"
            )
        wrong = why_unfit(problem, self.config, extra, operands[0], operands[2])
        if not extra.fits(self.epilogue):
            given = "+".join(name for name, t in extra._asdict().items() if t is not None) or "none"
            wrong = f"wrong operands for the epilogue: {given}"
        if wrong:
            raise TensorError(wrong, f"the operands of {self.name}", "pass exactly those, or use torch")
        addresses = [ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in extra]
        stride = ctypes.c_uint64(0 if extra.residual is None else row_stride(extra.residual))
        columns = self.epilogue.columns(problem.n)
        turn = FAMILIES[self.config.family].rows_of_a_turn(self.config) if self.epilogue.stacked else 0
        more = (*addresses, stride)
        return self._kernel.bind_with(problem, operands, more, workspace, extra, columns, turn)
