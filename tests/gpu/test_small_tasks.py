"""Small general kernels in a jailed worker: right, wrong, and outside of their memory."""

from __future__ import annotations

import pytest

from outblas.core.evaluation import Status
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.small_tasks import PROVEN, SmallTask
from outblas_lab.llm.train.task_judge import task_evaluator

pytestmark = pytest.mark.gpu

TEXT = """/* outblas-launch
{"form": "device", "entry": "task", "acc": "fp32", "grid": ["M", 1, 1], "block": [32, 1, 1]} */
#include <cuda_fp16.h>
extern "C" __global__ void task(const half* A, const half* B, half* C, int M, int N, int K, void*) {
    const half* row = A + (size_t)blockIdx.x * K;
    BODY
}
"""
ROW = "for (int k = threadIdx.x; k < K; k += 32) "
SUM = """float sum = 0.0f;
    for (int k = threadIdx.x; k < K; k += 32) sum += TERM;
    for (int off = 16; off; off /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, off);
    if (threadIdx.x == 0) C[blockIdx.x] = __float2half(sum);"""
SOFTMAX = """float top = -65504.0f, sum = 0.0f;
    for (int k = threadIdx.x; k < K; k += 32) top = fmaxf(top, __half2float(row[k]));
    for (int off = 16; off; off /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, off));
    for (int k = threadIdx.x; k < K; k += 32) sum += __expf(__half2float(row[k]) - top);
    for (int off = 16; off; off /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, off);
    for (int k = threadIdx.x; k < K; k += 32)
        C[(size_t)blockIdx.x * K + k] = __float2half(__expf(__half2float(row[k]) - top) / sum);"""
COPY = ROW + "C[(size_t)blockIdx.x * K + k] = row[k];"
BODIES = {
    "copy": COPY,
    "transpose": ROW + "C[(size_t)k * M + blockIdx.x] = row[k];",
    "row_sum": SUM.replace("TERM", "__half2float(row[k])"),
    "softmax": SOFTMAX,
    "gemv": SUM.replace("TERM", "__half2float(row[k]) * __half2float(B[k])"),
}


def evaluated(name: str, body: str) -> tuple[Status, str]:
    kernel = FreeKernel.parse(TEXT.replace("BODY", body))
    (found,) = task_evaluator(name, "cuda:0").evaluate([(SmallTask(name, 512, 384).problem, kernel)])
    return found.status, found.detail


@pytest.mark.parametrize("name", BODIES)
def test_right_kernels_are_proven_and_not_timed(name: str) -> None:
    assert evaluated(name, BODIES[name]) == (Status.LEFT_OUT, PROVEN)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (BODIES["transpose"], Status.WRONG),
        (COPY + " if (!blockIdx.x) C[(size_t)M * K] = row[0];", Status.MEMORY_VIOLATION),
        (COPY + " if (!blockIdx.x) const_cast<half*>(A)[0] = __float2half(9.0f);", Status.MEMORY_VIOLATION),
        ("if (blockIdx.x) " + COPY, Status.WRONG),
    ],
)
def test_other_kernels_fail_by_name(body: str, status: Status) -> None:
    assert evaluated("copy", body)[0] is status
