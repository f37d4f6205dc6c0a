"""A layer of routed experts: rows sorted by expert, two grouped products, and the weighted sum of each token's rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outblas.dispatch import device_registry
from outblas.dispatch.aten_products import HALF_DTYPES
from outblas.dispatch.grouped import grouped_product
from outblas.dispatch.grouped.grouped_product import is_recorded, problem_of_weights, ready_kernel, torch_must_see
from outblas.dispatch.grouped.grouped_state import grouped_state
from outblas.dispatch.product_operands import dtype_name
from outblas.kernels.grouped.grouped_problem import MOST_GROUPS
from outblas.kernels.grouped.rows_source import EXPERTS, SCORES
from outblas.runtime.moe_rows import VECTOR

#: Tokens at most, and experts at least, of a layer whose launches overlap. At one token it saves about 4 us.
#: Layers of thousands of tokens, or of 8 experts, took up to 17% longer (journal 0129).
_OVERLAP_TOKENS, _OVERLAP_EXPERTS = 8, 32


def our_moe_mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), whole: bool = False,
    count: Callable[[int], None] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Compute :func:`outblas.moe_mlp` by kernels of this package; return None if torch must.

    Args:
        biases: those of gate and up, and of down.
        whole: return None, too, if torch would have to compute one of the products; choose kernels for both.
        count: called with the number of products that kernels computed, unless the result is None.

    Raises:
        DeviceError: the driver refused a launch.
    """
    index = x.device.index
    if x.device.type != device_registry.DEVICE_TYPE or is_recorded(x, gate_up, down, scores, *biases):
        return None
    if torch_must_see(x, gate_up, down, experts, scores, *biases):
        return None
    if not _fits(x, gate_up, down, experts, scores, biases):
        return None
    state = grouped_state(index)
    if state is None:
        return None
    first, second = gate_up.transpose(-2, -1), down.transpose(-2, -1)
    problems = problem_of_weights(first, biases[0], gated=True), problem_of_weights(second, biases[1], gated=False)
    names = (dtype_name(x.dtype), _name(experts.dtype), _name(scores.dtype))
    with device_registry.device_state(index).make_current(index):
        row_kernels = state.rows(*names, may_load=not torch.cuda.is_current_stream_capturing())
        kernels = [
            None if each is None else ready_kernel(state, each, experts.numel(), must=whole or each.gated, wait=True)
            for each in problems
        ]
        if row_kernels is None or (whole and None in kernels):
            return None
        overlap = len(x) <= _OVERLAP_TOKENS and len(gate_up) >= _OVERLAP_EXPERTS
        stream = torch._C._cuda_getCurrentRawStream(index)
        integers = torch.empty((2, experts.numel()), dtype=torch.int32, device=x.device)
        ends = torch.empty(gate_up.shape[0], dtype=torch.int32, device=x.device)
        row_kernels.route(experts, ends, integers[0], integers[1], stream)
        rows = torch.empty((experts.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
        row_kernels.gather(x, integers[0], rows, stream, overlap)
        for kernel, w, bias, gated in zip(kernels, (first, second), biases, (True, False), strict=True):
            if kernel is None:
                rows = grouped_product.by_torch(rows, w, ends, bias, gated)
            else:
                rows = grouped_product.launch(state, kernel, rows, w, ends, bias, dependent=overlap)
        out = torch.empty_like(x)
        row_kernels.combine(rows, integers[1], scores, out, stream, overlap)
    if count is not None:
        count(sum(kernel is not None for kernel in kernels))
    return out


def by_torch(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:  # fmt: skip
    """Compute :func:`outblas.moe_mlp` by torch's operations, with gradients."""
    if not experts.numel():
        return x.new_zeros(x.shape[0], down.shape[1])
    tokens, top = experts.shape
    chosen, order = torch.sort(experts.flatten(), stable=True)
    numbers = torch.arange(gate_up.shape[0], device=x.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
    first, second = gate_up.transpose(-2, -1), down.transpose(-2, -1)
    inner = grouped_product.by_torch(x[order // top], first, ends, biases[0], gated=True)
    outer = grouped_product.by_torch(inner, second, ends, biases[1])
    back = torch.empty_like(order).scatter_(0, order, torch.arange(tokens * top, device=x.device))
    each = outer[back].view(tokens, top, -1).float() * scores.float().unsqueeze(-1)
    return each.sum(dim=1).to(x.dtype)


def _fits(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor,
    biases: tuple[torch.Tensor | None, ...],
) -> bool:  # fmt: skip
    """Return whether the kernels take these operands: shapes of one layer, one dtype, rows of whole vectors."""
    shapes = x.dim() == 2 == experts.dim() and gate_up.dim() == 3 == down.dim()
    shapes = shapes and scores.shape == experts.shape and len(experts) == len(x) and experts.numel() > 0
    groups, width = (len(gate_up), gate_up.shape[1] // 2) if shapes else (0, 0)
    shapes = shapes and gate_up.shape == (groups, 2 * width, x.shape[1]) and down.shape == (groups, x.shape[1], width)
    plain = shapes and all(t.is_contiguous() and t.device == x.device for t in (x, experts, scores))
    plain = plain and x.shape[1] > 0 == x.shape[1] % VECTOR and 0 < groups <= MOST_GROUPS and x.data_ptr() % 16 == 0
    alike = all(t is None or t.dtype == x.dtype for t in (gate_up, down, *biases)) and x.dtype in HALF_DTYPES
    return plain and alike and _name(experts.dtype) in EXPERTS and _name(scores.dtype) in SCORES


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
