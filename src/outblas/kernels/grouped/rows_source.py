"""The source of the kernels that sort, gather and combine the rows of a mixture of experts."""

from __future__ import annotations

from importlib import resources
from itertools import product

from outblas.core.problem import Dtype
from outblas.kernels.kernel_hash import kernel_headers
from outblas.kernels.source import Source

#: Name of the source; the entries are those of :class:`outblas.runtime.moe_rows.MoeRows`.
FAMILY = "moe_rows"
#: torch's name of a type -> its type in C++.
EXPERTS = {"int32": "int", "int64": "long long"}
SCORES = {"float32": "float", "bfloat16": "u16", "float16": "u16"}


def rows_source(dtype: Dtype, experts: str, scores: str) -> Source:
    """Return the source for tokens of a dtype.

    Args:
        experts: a key of :data:`EXPERTS`, the type of the router's choice.
        scores: a key of :data:`SCORES`, the type of its weights.
    """
    lines = ['#include "ptx/types.cuh"', f"using EXPERT = {EXPERTS[experts]};", f"using SCORE = {SCORES[scores]};"]
    lines += [f"constexpr bool BF16 = {str(dtype == 'bf16').lower()};"]
    lines += [f"constexpr bool SCORE_BF16 = {str(scores == 'bfloat16').lower()};", f'#include "{FAMILY}.cuh"', ""]
    files = resources.files("outblas.kernels.grouped").iterdir()
    own = sorted((file.name, file.read_text()) for file in files if file.name in ("warp_scan.cuh", f"{FAMILY}.cuh"))
    return Source("\n".join(lines), "moe_route", (*kernel_headers(), *own), (), "fp32", FAMILY)


def all_sources() -> tuple[Source, ...]:
    """Return the sources that a wheel ships: scores in fp32 or as the tokens."""
    kinds = (("bf16", "bfloat16"), ("bf16", "float32"), ("fp16", "float16"), ("fp16", "float32"))
    return tuple(rows_source(dtype, experts, scores) for (dtype, scores), experts in product(kinds, EXPERTS))  # type: ignore[arg-type]
