// A product with few rows of A. B is read once, in 16-byte vectors, four of its rows per warp.
// The lanes of a warp share K and add up in a fixed order by shuffles. Memory bandwidth is the limit, not the
// multiplications. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_few_rows", "acc": "fp32", "grid": ["ceil(N, 16)", "ceil(M, 4)", 1], "block": [128, 1, 1],
 "requires": ["M <= 64", "K % 8 == 0"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_NN
#error "gemm_few_rows reads B as N x K (TN)"
#endif
#if OUTBLAS_BF16
using Half = __nv_bfloat16;
using Pair = __nv_bfloat162;
__device__ __forceinline__ float2 widen(Pair p) { return __bfloat1622float2(p); }
#else
using Half = __half;
using Pair = __half2;
__device__ __forceinline__ float2 widen(Pair p) { return __half22float2(p); }
#endif

constexpr int ROWS = 4, COLS = 4;  // of C, per warp

// Eight elements as fp32; zeros where `inside` is false, and then nothing is read.
__device__ __forceinline__ void load8(float (&v)[8], const Half* from, bool inside) {
  union {
    uint4 packed;
    Pair pair[4];
  } raw;
  raw.packed = inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = widen(raw.pair[i]);
    v[2 * i] = two.x, v[2 * i + 1] = two.y;
  }
}

extern "C" __global__ void __launch_bounds__(128)
    gemm_few_rows(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = blockIdx.y * ROWS, col0 = (blockIdx.x * 4 + warp) * COLS;
  if (col0 >= N) return;  // whole warps alone
  float sum[ROWS][COLS] = {};
  for (int k = lane * 8; k < K; k += 32 * 8) {
    float b[COLS][8];
#pragma unroll
    for (int j = 0; j < COLS; ++j) load8(b[j], B + static_cast<size_t>(col0 + j) * K + k, col0 + j < N);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float a[8];
      load8(a, A + static_cast<size_t>(row0 + i) * K + k, row0 + i < M);
#pragma unroll
      for (int j = 0; j < COLS; ++j)
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[i][j] = fmaf(a[e], b[j][e], sum[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i)
#pragma unroll
    for (int j = 0; j < COLS; ++j) {
      float s = sum[i][j];
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) s += __shfl_xor_sync(0xFFFFFFFF, s, apart);
      // A row of zeros that stands for one outside of A meets Inf in B and is NaN; it is not stored.
      if (lane == 0 && row0 + i < M && col0 + j < N) C[static_cast<size_t>(row0 + i) * N + col0 + j] = Half(s);
    }
}
