"""Kernels of CUDA-L2 as free kernels: a text per problem, with a stand-in for torch and an entry of ours."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import ContractError, UsageError
from outblas.core.problem import Acc, Layout, Problem
from outblas_lab.custom.free_kernel import FreeKernel

#: (GPU, accumulator) -> folder below ``kernels`` in the checkout.
FOLDERS: dict[tuple[str, Acc], str] = {
    ("a100", "fp32"): "a100_F32F16F16F32",
    ("a100", "fp16"): "a100_F16F16F16F16",
    ("h100", "fp32"): "h100_F32F16F16F32",
}
_TORCH_HEADER = re.compile(r"#include\s*<(?:torch|ATen|c10)/[^>]*>")
_TILE = re.compile(r"\b(BM|BN|BK)\s*=\s*Int<\s*(\d+)\s*>")
_READS_ROWS, _READS_COLUMNS = re.compile(r"(?<!\w)b\s*\.\s*data_ptr"), re.compile(r"\bb_col_major\s*\.\s*data_ptr")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WAITS = re.compile(r"\bcuda(?:Device|Stream)Synchronize\s*\(")
_ENTRY = """
extern "C" int outblas_launch(const void* A, const void* B, void* C, int M, int N, int K, void*, size_t,
                              cudaStream_t stream) {
  stand_in::stream() = stream;
  void* const given = const_cast<void*>(B);
  const torch::Tensor a{const_cast<void*>(A), M, K}, c{C, M, N};
  const torch::Tensor b{OUTBLAS_NN ? given : nullptr, K, N}, columns{OUTBLAS_NN ? nullptr : given, K, N};
  try {
    %s(a, b, columns, c);
  } catch (...) {
    return -1;
  }
  return static_cast<int>(cudaGetLastError());
}
"""


@dataclass(frozen=True)
class CudaL2Kernel:
    """A kernel of CUDA-L2 for one problem.

    Attributes:
        text: its text with the stand-in, the entry and a launch block.
        problem: the problem of its file, with the layout in which it reads B.
        padded: the problem that it computes: M, N and K rounded up to its tile, as its own benchmark pads them.
        waits: its text waits for the GPU in each call; the stand-in does not.
    """

    text: str
    problem: Problem
    padded: Problem
    waits: bool

    @functools.cached_property
    def kernel(self) -> FreeKernel:
        """Return the free kernel; its ``launch.form`` is ``host``."""
        return FreeKernel.parse(self.text)

    def to_json(self) -> dict[str, Any]:
        """Return the text and the facts as JSON types, for :meth:`from_json`."""
        return {"text": self.text, "problem": self.problem.key, "padded": self.padded.key, "waits": self.waits}

    @staticmethod
    def from_json(data: dict[str, Any]) -> CudaL2Kernel:
        """Return the kernel of what :meth:`to_json` returned."""
        return CudaL2Kernel(
            data["text"], Problem.from_key(data["problem"]), Problem.from_key(data["padded"]), data["waits"]
        )


def read_kernel(checkout: Path, gpu: str, problem: Problem) -> CudaL2Kernel:
    """Return CUDA-L2's kernel for the M, N, K and accumulator of a problem.

    Args:
        checkout: folder of the repository.
        gpu: ``a100`` or ``h100``.
        problem: fp16; its layout is not used.

    Raises:
        UsageError: the checkout lacks the file.
        ContractError: the kernel reads B both row by row and column by column, so no layout has what it reads.
    """
    path = checkout / "kernels" / FOLDERS[gpu, problem.acc] / f"{problem.m}_{problem.n}_{problem.k}.cu"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror})", "a checkout of CUDA-L2 with its kernels", "name its folder"
        ) from error
    return wrap(text, f"cuda_l2_{gpu}_{problem.acc}", problem)


def wrap(text: str, entry: str, problem: Problem) -> CudaL2Kernel:
    """Return the kernel of a file's text.

    Args:
        text: the file.
        entry: the function that it defines, which takes A, B, B by columns and C.
        problem: the problem of the file; its layout is not used.

    Raises:
        ContractError: it reads both forms of B.
    """
    code = _COMMENT.sub(" ", text)
    layout = _layout(code)
    tile = {name: int(size) for name, size in _TILE.findall(code)}
    m, n, k = (
        math.ceil(extent / tile[side]) * tile[side] if len(tile) == 3 else extent
        for extent, side in ((problem.m, "BM"), (problem.n, "BN"), (problem.k, "BK"))
    )
    requires = [f"M == {m}", f"N == {n}", f"K == {k}"]
    block = {"form": "host", "acc": problem.acc, "uses": ["cutlass"], "requires": requires}
    parts = [
        f"/* outblas-launch\n{json.dumps(block)}\n*/",
        Path(__file__).with_name("torch_stand_in.cuh").read_text(encoding="utf-8"),
        _TORCH_HEADER.sub("", text),
        _ENTRY % entry,
    ]
    return CudaL2Kernel(
        "\n".join(parts),
        Problem(problem.m, problem.n, problem.k, layout, problem.dtype, problem.acc),
        Problem(m, n, k, layout, problem.dtype, problem.acc),
        _WAITS.search(code) is not None,
    )


def _layout(code: str) -> Layout:
    """Return the layout whose B a text reads."""
    rows, columns = _READS_ROWS.search(code), _READS_COLUMNS.search(code)
    if rows and columns:
        raise ContractError("it reads B in both forms", "a kernel of one layout", "leave it out")
    return "NN" if rows else "TN"
