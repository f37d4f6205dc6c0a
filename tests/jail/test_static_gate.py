"""Gate 1 of free kernels: what lives on after a launch, what a cubin leaves open, and the products that it makes."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings")

from outblas.core.evaluation import Evaluation, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.jail.build import BuiltKernel  # noqa: E402
from outblas_lab.jail.static_gate import MAX_KEPT_BYTES, MAX_STACK_BYTES, examine  # noqa: E402
from support.free_fixture import cache_fixture, compiles, device_text, host_text  # noqa: F401  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = [pytest.mark.long, compiles]
ENTRY = """
#include <cassert>
#include <cuda_fp16.h>
{before}
extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void*) {{ {body} }}
"""


def examined(before: str = "", body: str = "") -> BuiltKernel | Evaluation:
    text = device_text(ENTRY.format(before=before, body=body))
    return examine(Problem(64, 64, 64), FreeKernel.parse(text), H200)


def why(found: BuiltKernel | Evaluation) -> str:
    assert isinstance(found, Evaluation), "it would be run"
    assert found.status is Status.STATIC_REJECTED, found.log
    return found.detail


def kept(kind: str, count: int) -> BuiltKernel | Evaluation:
    return examined(f"{kind} char kept[{count}];", "kept[m] = n; c[0] = __float2half(kept[k]);")


def stack(count: int) -> BuiltKernel | Evaluation:
    return examined("", f"volatile int z[{count // 4}]; z[m] = n; c[0] = __float2half(z[k]);")


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("", 'if (m < 0) printf("%d", m); assert(n > 0); c[0] = a[0];'),
        ("__constant__ int table[256] = {1, 2};", "c[0] = __float2half(table[m]);"),
        ("__device__ unsigned tickets[4096];", "atomicAdd(tickets + m, 1u); c[0] = a[0];"),
        ("", "c[0] = __float2half(sin((double)m * 1e30) + pow((double)m, 3.1));"),
        (
            "__device__ __noinline__ int f(int x) { return x < 2 ? x : f(x - 1) + f(x - 2); }",
            "c[0] = __float2half(f(m));",
        ),
        ("", "volatile int z[128]; z[m] = n; c[0] = __float2half(z[k]);"),
    ],
    ids=["printf and assert", "table", "counters", "mathematics", "recursion", "small stack"],
)
def test_what_honest_kernels_use_is_let_through(before, body):
    assert isinstance(found := examined(before, body), BuiltKernel), found


def test_variables_of_every_kind_are_counted_to_the_byte():
    for kind in ("__device__", "__managed__"):
        assert isinstance(found := kept(kind, MAX_KEPT_BYTES), BuiltKernel), found
        assert f"{MAX_KEPT_BYTES + 1} bytes of __device__ and __constant__ variables" in why(
            kept(kind, MAX_KEPT_BYTES + 1)
        )
    both = "__constant__ char table[20000]; __device__ char kept[20000];"
    assert "40000 bytes" in why(examined(both, "kept[m] = table[n]; c[0] = __float2half(kept[k]);"))


def test_a_stack_is_counted_to_the_byte():
    assert isinstance(found := stack(MAX_STACK_BYTES), BuiltKernel), found
    assert f"{MAX_STACK_BYTES + 16} bytes of local memory per thread" in why(stack(MAX_STACK_BYTES + 16))


def test_the_stack_of_a_kernel_that_is_not_the_entry_counts():
    other = 'extern "C" __global__ void other(int* o, int x) { volatile int z[9999]; z[x] = 1; *o = z[x + 1]; }'
    assert "local memory" in why(examined(other, "c[0] = a[0];"))


def test_device_code_of_a_library_is_held_to_the_same_limits():
    strange = "__global__ void g(int* o, int x) { volatile int z[9999]; z[x] = 1; *o = z[x + 1]; }\n"
    strange += "int extra() { g<<<1, 1>>>(nullptr, 1); return 0; }"
    text = host_text(strange)
    assert "local memory" in why(examine(Problem(64, 64, 64), FreeKernel.parse(text), H200))


@pytest.mark.parametrize("name", ["malloc", "free", "__nv_aligned_device_malloc"])
def test_every_name_left_to_the_driver_but_print_and_assert_is_refused(name):
    calls = {
        "malloc": "c[0] = *(half*)malloc(m);",
        "free": "free(c);",
        "__nv_aligned_device_malloc": "c[0] = *(half*)__nv_aligned_device_malloc(m, 16);",
    }
    before = 'extern "C" __device__ void* __nv_aligned_device_malloc(size_t, size_t);'
    assert "on the GPU; the driver may resolve only printf and assert" in why(examined(before, calls[name]))


@pytest.mark.parametrize(
    "conversion",
    ["__nv_fp8_e4m3 q(x); c[0] = __float2half((float)q);", "__nv_fp8_e5m2 q(x); c[0] = __float2half((float)q);"],
)
def test_conversions_to_floats_of_8_bits_are_refused(conversion):
    body = f"float x = __half2float(a[m]); {conversion}"
    assert "F2FP of 8-bit floats" in why(examined("#include <cuda_fp8.h>", body))
