"""Kernels of others on a GPU: CUTLASS 2.x in full, and a kernel with torch's interface through the stand-in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from rivals.timed_entries import time_entries  # noqa: E402

from outblas.core.errors import ToolchainMissing  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.gates import CellProver, prove  # noqa: E402
from outblas.judge.gpu_clock import GpuClock  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.custom.templates.fill import CutlassSm80  # noqa: E402
from outblas_lab.jail.build import build  # noqa: E402
from outblas_lab.jail.free_launch import load  # noqa: E402

pytestmark = pytest.mark.gpu

#: A plain product in the form of CUDA-L2's files: torch's interface, the default stream, a tile that needs padding.
TEXT = """
#include <torch/extension.h>
#include <cuda_fp16.h>
template <int N>
struct Int {};
inline auto BM = Int<48>{};
inline auto BN = Int<32>{};
inline auto BK = Int<16>{};
__global__ void multiply(const half* a, const half* b, half* c, int N, int K) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  for (int row = blockIdx.y * 48 + threadIdx.y; row < (blockIdx.y + 1) * 48; row += 16) {
    float sum = 0;
    for (int k = 0; k < K; ++k) sum += __half2float(a[row * K + k]) * __half2float(b[column * K + k]);
    c[row * N + column] = __float2half(sum);
  }
}
void product(torch::Tensor a, torch::Tensor b, torch::Tensor b_col_major, torch::Tensor c) {
  const int M = a.size(0), K = a.size(1), N = b.size(1);
  void* scratch = nullptr;
  cudaMalloc(&scratch, 1 << 20);
  multiply<<<dim3(N / 32, M / 48), dim3(32, 16), 4096>>>(
      (half*)a.data_ptr(), (half*)b_col_major.data_ptr(), (half*)c.data_ptr(), N, K);
  cudaFree(scratch);
  cudaDeviceSynchronize();
}
"""


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return lambda name: importlib.import_module(f"rivals.{name}")


def loaded(kernel: FreeKernel, problem: Problem, folder: Path) -> Any:
    gpu = gpu_of_device(0)
    try:
        return load(build(kernel, problem, gpu), folder, None, gpu)
    except ToolchainMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "instance",
    [
        CutlassSm80((128, 128, 32), (64, 64), 4, width=4),
        CutlassSm80((64, 64, 64), (32, 32), 5, acc="fp16"),
        CutlassSm80((64, 128, 64), (32, 64), 4, "stream_k"),
        CutlassSm80((64, 128, 64), (32, 64), 4, "stream_k", splits=4),  # of the same template, in the same process
        CutlassSm80((32, 64, 64), (16, 32), 6, "stream_k", splits=8),
    ],
    ids=lambda instance: instance.name,
)
def test_cutlass_for_ampere_is_right(instance: CutlassSm80, tmp_path: Path) -> None:
    for extents in ((200, 264, 328), (72, 136, 4104)):
        problem = Problem(*extents, acc=instance.acc)
        verdict = prove(loaded(instance.kernel(), problem, tmp_path), problem, None, "full")
        assert verdict.status is Status.PASSED, f"{problem.key}: {verdict}"


def test_a_kernel_with_torchs_interface_is_captured_padded_and_right(rivals: Any, tmp_path: Path) -> None:
    problem = Problem(100, 72, 40)
    found = rivals("cuda_l2_kernels").wrap(TEXT, "product", problem)
    assert found.padded == Problem(144, 96, 48)
    kernel = loaded(found.kernel, problem, tmp_path)
    bound = rivals("bound_rivals")
    with GpuClock(problem, 0, gpu=gpu_of_device(0)) as clock:
        prover = CellProver(clock.data, clock.torch_stream)
        proved = bound.Padded(kernel, found.padded, clock.torch_stream, copies_back=True)
        assert not rivals("proofs").why_not(proved, problem, clock, prover)
        entry = bound.SharedMemoryOf(bound.Padded(kernel, found.padded, clock.torch_stream, copies_back=False))
        (timing,) = time_entries(clock, {"foreign": entry}).values()
    assert timing.median_us > 0 and entry.shared_bytes == 4096
