// Tensor cores without shared memory: every lane loads the pairs of its own fragments of mma.m16n8k16 from global memory.
// 64 x 64 of C per CTA, 32 x 32 per warp. TN and NN.
/* outblas-launch
{"form": "device", "entry": "gemm_mma_direct", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1],
 "block": [128, 1, 1], "requires": ["K % 2 == 0", "ceil(M, 64) <= 65535"]}
*/
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

constexpr bool BF16 = OUTBLAS_BF16;

// Two neighbours of K of one row (A, or B of TN), zeros outside.
__device__ __forceinline__ u32 along_k(const u16* from, int row, int rows, int k, int K) {
  return row < rows && k < K ? *reinterpret_cast<const u32*>(from + static_cast<u64>(row) * K + k) : 0;
}

// The same of one column of B as K x N.
__device__ __forceinline__ u32 down_k(const u16* from, int col, int N, int k, int K) {
  if (col >= N || k >= K) return 0;  // K is even
  const u16* at = from + static_cast<u64>(k) * N + col;
  return static_cast<u32>(at[0]) | static_cast<u32>(at[N]) << 16;
}

__device__ __forceinline__ void store_two(u16* C, int row, int col, int M, int N, float first, float second) {
  const u32 pair = pack2<BF16>(first, second);
  if (row >= M) return;
  u16* to = C + static_cast<u64>(row) * N + col;
  if (col < N) to[0] = static_cast<u16>(pair);
  if (col + 1 < N) to[1] = static_cast<u16>(pair >> 16);
}

extern "C" __global__ void __launch_bounds__(128)
    gemm_mma_direct(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row0 = blockIdx.y * 64 + warp / 2 * 32, col0 = blockIdx.x * 64 + warp % 2 * 32;
  const int group = lane / 4, pair = lane % 4 * 2;  // PTX ISA: fragments of mma.m16n8k16
  float acc[2][4][4] = {};
  for (int k0 = 0; k0 < K; k0 += 16) {
    u32 a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        a[i][r] = along_k(A, row0 + 16 * i + group + r % 2 * 8, M, k0 + pair + r / 2 * 8, K);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        b[j][r] = OUTBLAS_NN ? down_k(B, col0 + 8 * j + group, N, k0 + pair + 8 * r, K)
                             : along_k(B, col0 + 8 * j + group, N, k0 + pair + 8 * r, K);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_f32<BF16>(acc[i][j], a[i], b[j][0], b[j][1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + 16 * i + group, col = col0 + 8 * j + pair;
      store_two(C, row, col, M, N, acc[i][j][0], acc[i][j][1]);
      store_two(C, row + 8, col, M, N, acc[i][j][2], acc[i][j][3]);
    }
}
