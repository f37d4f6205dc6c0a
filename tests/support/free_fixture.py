"""Free kernels that several tests write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outblas.core.errors import ToolchainMissing
from outblas_lab.jail.jailed_evaluator import FreeOptions
from outblas_lab.jail.toolchain import find_nvcc, include_folders

#: A worker that answers what a kernel orders, and imports no torch ahead.
ANSWERS, IMPORTS_NOTHING = "support.free_workers:make_handler", FreeOptions(prepare="support.free_workers:prepare")
EXPLOITS = Path(__file__).parents[1] / "adversarial" / "exploits"
DEVICE = {"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 16)", "ceil(M, 16)", 1]}
BODY = """
#include <cuda_fp16.h>
extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void*) {
  int col = blockIdx.x * 16 + threadIdx.x, row = blockIdx.y * 16 + threadIdx.y;
  if (row >= m || col >= n) return;
  float sum = 0.0f;
  for (int i = 0; i < k; ++i) sum += __half2float(a[(size_t)row * k + i]) * __half2float(b[(size_t)col * k + i]);
  c[(size_t)row * n + col] = __float2half(sum);
}
"""


def missing():
    """Return why free kernels cannot be compiled here; None if they can."""
    try:
        include_folders()
        find_nvcc()
    except ToolchainMissing as error:
        return str(error)
    return None


def block(**keys):
    return f"/* outblas-launch {json.dumps(keys)} */\n"


def device_text(body=BODY, **keys):
    """A text of form ``device``, right unless ``body`` is not."""
    return block(**{**DEVICE, "block": [16, 16, 1], **keys}) + body


def host_text(body, **keys):
    """A text of form ``host``: ``body`` stands before a launch of nothing."""
    return (
        block(form="host", acc="fp32", **keys)
        + "#include <cuda_runtime.h>\n"
        + body
        + """
__global__ void nothing() {}
extern "C" int outblas_launch(const void*, const void*, void*, int, int, int, void*, size_t, cudaStream_t stream) {
  nothing<<<1, 1, 0, stream>>>();
  return BEFORE;
}
""".replace("BEFORE", "extra()" if "int extra()" in body else "0")
    )


def exploit(name):
    return (EXPLOITS / f"{name}.cu").read_text()


compiles = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(name="cache", autouse=True, scope="module")
def cache_fixture(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
