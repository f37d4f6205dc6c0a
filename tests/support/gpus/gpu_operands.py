"""Random operands on the GPU, for tests that run there."""

from __future__ import annotations

from typing import Any

import torch

from outblas.core.problem import Problem


def operands(problem: Problem, seed: int = 0) -> tuple[Any, Any, Any]:
    """(A, B as matmul takes it, B as stored)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    a = torch.randn(problem.m, problem.k, device="cuda", generator=generator).to(dtype)
    stored = torch.randn(problem.b_shape, device="cuda", generator=generator).to(dtype)
    return a, stored.t() if problem.layout == "TN" else stored, stored
