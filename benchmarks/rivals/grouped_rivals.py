"""Rivals of the grouped kernels: torch, a loop of products, vLLM's fused experts in Triton, and DeepGEMM.

Every rival gets the operands of our kernels: rows sorted by expert, and weights (groups, N, K). It computes the product
alone. Preparation is not timed: the sort into blocks for Triton, and padded copies of the rows for DeepGEMM. This
favours the rivals, because a layer pays for it in every step.

- *torch*: ``torch._grouped_mm``.
- *loop*: ``torch.mm`` of each group that has rows, whose sizes the host knows beforehand.
- *triton*: vLLM's ``fused_moe_kernel`` through vLLM's host function. vLLM chooses the config by the number of tokens
  before routing. It takes it from its tuned table of the GPU, or from its rules if it has no table.
- *deep_gemm*: the contiguous form for bf16, from vLLM's wheel. Each group's rows are padded to the alignment that vLLM
  asks of DeepGEMM.
- *deep_gemm_masked*: its form for decoding, with a fixed number of rows for each group. It is tried up to
  :data:`MASKED_TOKENS` tokens.

vLLM 0.26.0 is the version that these calls were written against. DeepGEMM compiles each kernel on first use, with the
nvcc of CUDA_HOME.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from shapes.moe_suite import MODELS, MoeModel, MoeProblem

#: Most tokens at which DeepGEMM's masked form is tried. Its memory grows with groups times the rows of the largest one.
MASKED_TOKENS = 512
#: Rows of a group in the masked form are a multiple of this, the tallest tile of DeepGEMM. A tile is stored whole, and
#: must not reach the next group.
_MASKED_ROWS = 256


class Operands(Protocol):
    """Set of operands on the GPU.

    Attributes:
        rows: rows of each group, as the host knows them.
        a: (rows, K) bf16, sorted by group.
        w: (groups, N, K) bf16.
        ends: int32 (groups), where each group ends.
        c: (rows, N) bf16, the output.
    """

    rows: list[int]
    a: Any
    w: Any
    ends: Any
    c: Any


def same(output: Any) -> Any:
    """Return an output whose rows lie as those of A."""
    return output


@dataclass(frozen=True)
class RivalCall:
    """A rival's product of one set of operands.

    Attributes:
        enqueue: enqueues the product on torch's current stream and returns its output. This is the timed part.
        rows: returns the rows (rows, N) of an output, in the order of A.
        note: settings of the kernel that a reader of the result needs; empty if it has none.
    """

    enqueue: Callable[[], Any]
    rows: Callable[[Any], Any] = same
    note: str = ""


def torch_call(_: MoeProblem, operands: Operands) -> RivalCall:
    """Return the call of ``torch._grouped_mm``, which allocates its output."""
    return RivalCall(lambda: torch._grouped_mm(operands.a, operands.w.transpose(-2, -1), offs=operands.ends))


def loop_call(_: MoeProblem, operands: Operands) -> RivalCall:
    """Return the call of one ``torch.mm`` for each group that has rows."""

    def enqueue() -> Any:
        for group, (begin, end) in enumerate(itertools.pairwise(itertools.accumulate(operands.rows, initial=0))):
            if end > begin:
                torch.mm(operands.a[begin:end], operands.w[group].T, out=operands.c[begin:end])
        return operands.c

    return RivalCall(enqueue)


def triton_call(one: MoeProblem, operands: Operands) -> RivalCall:
    """Return the call of vLLM's Triton kernel for bf16 experts.

    Each row counts as a token with one expert. The config is that of the whole layer: vLLM looks it up by the layer's
    tokens, and uses it for both of its products.

    Raises:
        ImportError: vLLM or Triton is missing.
        RuntimeError: vLLM's operator that sorts rows into blocks is missing.
    """
    fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    model, (total, _) = MODELS[one.model], operands.a.shape
    config, note = triton_config(fused_moe, model, one.tokens)
    ids = group_of_rows(operands.rows).to(operands.a.device, torch.int32)[:, None]
    # vLLM's rule counts rows, tokens times experts of each. They are the same here as in the layer.
    blocks = fused_moe._prepare_expert_assignment(ids, config, total, 1, model.experts, None)
    c = operands.c.view(total, 1, -1)

    def enqueue() -> Any:
        fused_moe.invoke_fused_moe_triton_kernel(
            operands.a,
            operands.w,
            c,
            A_scale=None,
            B_scale=None,
            topk_weights=None,
            sorted_token_ids=blocks[0],
            expert_ids=blocks[1],
            num_tokens_post_padded=blocks[2],
            mul_routed_weight=False,
            top_k=1,
            config=config,
            compute_type=fused_moe.tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
        return operands.c

    return RivalCall(enqueue, note=note)


def triton_config(fused_moe: Any, model: MoeModel, tokens: int) -> tuple[dict[str, int], str]:
    """Return the config of vLLM's Triton kernel for both products of a layer, and the same in words.

    Args:
        fused_moe: vLLM's module of that name.
        tokens: tokens of the layer before routing.
    """
    w1, w2 = (model.experts, 2 * model.width, model.hidden), (model.experts, model.hidden, model.width)
    config = fused_moe.try_get_optimal_moe_config(w1, w2, model.top, None, tokens)
    tuned = fused_moe.get_moe_configs(model.experts, model.width, None) is not None
    return config, f"{'tuned' if tuned else 'default'} config {config}"


def deep_gemm() -> Any:
    """Return DeepGEMM's module from vLLM's wheel, set up as vLLM does it: with programmatic dependent launch.

    Raises:
        ImportError: vLLM, or DeepGEMM's extension, is missing.
        AssertionError: no CUDA toolkit is found.
    """
    module = importlib.import_module("vllm.third_party.deep_gemm")
    module.set_pdl(True)
    return module


@contextmanager
def alignment_of(module: Any, rows: int) -> Iterator[None]:
    """Give DeepGEMM another alignment of groups while the context lasts. It bounds the height of its tiles."""
    before = module.get_mk_alignment_for_contiguous_layout()
    module.set_mk_alignment_for_contiguous_layout(rows)
    try:
        yield
    finally:
        module.set_mk_alignment_for_contiguous_layout(before)


def contiguous_alignment(module: Any, total: int, groups: int) -> int:
    """Return the multiple of rows to which vLLM pads each group.

    Args:
        total: rows of all groups.
        groups: number of groups.
    """
    usual = module.get_mk_alignment_for_contiguous_layout()
    fitting = module.get_theoretical_mk_alignment_for_contiguous_layout(total, groups)
    return fitting if 0 < fitting <= usual else usual


def deep_gemm_call(_: MoeProblem, operands: Operands) -> RivalCall:
    """Return the call of DeepGEMM's contiguous form, on padded copies of the rows.

    Raises:
        ImportError: see :func:`deep_gemm`.
        RuntimeError: DeepGEMM refuses the problem, or nvcc fails.
    """
    module, w, (total, k), device = deep_gemm(), operands.w, operands.a.shape, operands.a.device
    alignment = contiguous_alignment(module, total, len(operands.rows))
    *begins, height = padded_begins(operands.rows, alignment)
    places = row_places(operands.rows, begins).to(device)
    a, output = operands.a.new_zeros(height, k), operands.a.new_empty(height, w.shape[1])
    a[places] = operands.a
    # Padding has the group -1, as in vLLM: DeepGEMM skips half a tile that begins with it.
    groups = torch.full((height,), -1, dtype=torch.int32, device=device)
    groups[places] = group_of_rows(operands.rows).to(device, torch.int32)

    def enqueue() -> Any:
        with alignment_of(module, alignment):
            module.m_grouped_bf16_gemm_nt_contiguous(a, w, output, groups)
        return output

    return RivalCall(enqueue, lambda output: output[places], f"groups padded to {alignment} rows")


def deep_gemm_masked_call(_: MoeProblem, operands: Operands) -> RivalCall:
    """Return the call of DeepGEMM's masked form, where each group has room for the rows of the largest one.

    Raises:
        ImportError: see :func:`deep_gemm`.
        RuntimeError: DeepGEMM refuses the problem, or nvcc fails.
    """
    module, w, (total, k), device = deep_gemm(), operands.w, operands.a.shape, operands.a.device
    groups, most = len(operands.rows), max(operands.rows)
    height, expected = rounded_up(most, _MASKED_ROWS), expected_rows(total, groups, most)
    places = row_places(operands.rows, [group * height for group in range(groups)]).to(device)
    a, output = operands.a.new_zeros(groups, height, k), operands.a.new_empty(groups, height, w.shape[1])
    a.view(-1, k)[places] = operands.a
    rows = torch.tensor(operands.rows, dtype=torch.int32, device=device)

    def enqueue() -> Any:
        module.m_grouped_bf16_gemm_nt_masked(a, w, output, rows, expected)
        return output

    return RivalCall(enqueue, lambda output: output.view(-1, w.shape[1])[places], f"{expected} rows expected")


RIVALS: dict[str, Callable[[MoeProblem, Operands], RivalCall]] = {
    "torch": torch_call,
    "loop": loop_call,
    "triton": triton_call,
    "deep_gemm": deep_gemm_call,
    "deep_gemm_masked": deep_gemm_masked_call,
}


def rivals_of(one: MoeProblem, names: Sequence[str]) -> list[str]:
    """Return those of the named rivals that a problem has."""
    return [name for name in names if name != "deep_gemm_masked" or one.tokens <= MASKED_TOKENS]


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def expected_rows(total: int, groups: int, most: int) -> int:
    """Return vLLM's estimate of a group's rows, by which DeepGEMM chooses its tile for the masked form.

    Args:
        total: rows of all groups.
        groups: number of groups.
        most: rows of the largest group.
    """
    return min(most, max(16, rounded_up(total // groups, 16)))


def padded_begins(rows: Sequence[int], multiple: int) -> list[int]:
    """Return where each group begins if every group is padded to a multiple of rows, and behind them the total.

    Args:
        rows: rows of each group. A group without rows takes no place.
    """
    return list(itertools.accumulate((rounded_up(count, multiple) for count in rows), initial=0))


def group_of_rows(rows: Sequence[int]) -> Any:
    """Return the group of each row, int64 (total rows), on the CPU."""
    return torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))


def row_places(rows: Sequence[int], begins: Sequence[int]) -> Any:
    """Return the place of each row in a buffer where groups begin elsewhere, int64 (total rows), on the CPU.

    Args:
        rows: rows of each group.
        begins: where each group begins in the buffer.
    """
    sizes = torch.tensor(rows)
    shifts = torch.tensor(begins) - (sizes.cumsum(0) - sizes)
    return torch.arange(int(sizes.sum())) + torch.repeat_interleave(shifts, sizes)
