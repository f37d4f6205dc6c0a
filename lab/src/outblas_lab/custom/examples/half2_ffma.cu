// 128 x 128 of C per CTA on the fp32 units, with 8 x 8 outputs per thread.
// Operands stay pairs of halves in shared memory, which halves the bytes that are read from it. They are widened in
// registers. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_half2_ffma", "acc": "fp32", "grid": ["ceil(N, 128)", "ceil(M, 128)", 1],
 "block": [256, 1, 1], "requires": ["K % 2 == 0", "ceil(M, 128) <= 65535"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_NN
#error "gemm_half2_ffma reads B as N x K (TN)"
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

constexpr int TILE = 128, PAIRS = 8, PITCH = TILE + 1;  // 16 of K at a time: 8 pairs of each row

// Pair `k` of row `r` lies at to[k * PITCH + r].
__device__ __forceinline__ void fill(unsigned* to, const Half* from, int first_row, int rows, int k0, int K) {
#pragma unroll
  for (int i = 0; i < TILE * PAIRS / 256; ++i) {
    const int at = i * 256 + threadIdx.x, row = at / PAIRS, pair = at % PAIRS;
    unsigned v = 0;
    if (first_row + row < rows && k0 + 2 * pair < K)
      v = *reinterpret_cast<const unsigned*>(from + static_cast<size_t>(first_row + row) * K + k0 + 2 * pair);
    to[pair * PITCH + row] = v;
  }
}

__device__ __forceinline__ float2 pair_of(const unsigned* from, int k, int row) {
  return widen(*reinterpret_cast<const Pair*>(from + k * PITCH + row));
}

extern "C" __global__ void __launch_bounds__(256, 1)
    gemm_half2_ffma(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  __shared__ unsigned a[PAIRS * PITCH], b[PAIRS * PITCH];
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;  // this thread's rows are y + 16 i, its columns x + 16 j
  float sum[8][8] = {};
  for (int k0 = 0; k0 < K; k0 += 2 * PAIRS) {
    fill(a, A, row0, M, k0, K);
    fill(b, B, col0, N, k0, K);
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < PAIRS; ++k) {
      float2 cols[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) cols[j] = pair_of(b, k, x + 16 * j);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 r = pair_of(a, k, y + 16 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(r.y, cols[j].y, fmaf(r.x, cols[j].x, sum[i][j]));
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = row0 + y + 16 * i, col = col0 + x + 16 * j;
      if (row < M && col < N) C[static_cast<size_t>(row) * N + col] = Half(sum[i][j]);
    }
}
