// 64 x 64 of C per CTA, 4 x 4 of it in the registers of each of 256 threads.
// Operands arrive in vectors of 8 halves. They lie in shared memory as fp32, K-major, so that a thread reads its four
// rows and its four columns as one float4 each. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_register_tiles", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1],
 "block": [256, 1, 1], "requires": ["K % 8 == 0", "ceil(M, 64) <= 65535"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_NN
#error "gemm_register_tiles reads B as N x K (TN)"
#endif
#if OUTBLAS_BF16
using Half = __nv_bfloat16;
#else
using Half = __half;
#endif

constexpr int TILE = 64, DEPTH = 32, PITCH = TILE + 4;  // a row of shared memory: 64 columns, and 4 that move the banks

// One thread's vector of a 64 x 32 tile, written transposed: to[k][row]. Zeros outside of the matrix.
__device__ __forceinline__ void fill(float* to, const Half* from, int first_row, int rows, int k0, int K) {
  const int row = threadIdx.x % TILE, k = threadIdx.x / TILE * 8;
  union {
    uint4 packed;
    Half element[8];
  } v;
  v.packed = make_uint4(0, 0, 0, 0);
  if (first_row + row < rows && k0 + k < K)
    v.packed = *reinterpret_cast<const uint4*>(from + static_cast<size_t>(first_row + row) * K + k0 + k);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[(k + i) * PITCH + row] = static_cast<float>(v.element[i]);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_register_tiles(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  __shared__ __align__(16) float a[DEPTH * PITCH];
  __shared__ __align__(16) float b[DEPTH * PITCH];
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int x = threadIdx.x % 16 * 4, y = threadIdx.x / 16 * 4;  // this thread's corner in the tile
  float sum[4][4] = {};
  for (int k0 = 0; k0 < K; k0 += DEPTH) {
    fill(a, A, row0, M, k0, K);
    fill(b, B, col0, N, k0, K);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < DEPTH; ++k) {
      const float4 r = *reinterpret_cast<const float4*>(a + k * PITCH + y);
      const float4 c = *reinterpret_cast<const float4*>(b + k * PITCH + x);
      const float rows[4] = {r.x, r.y, r.z, r.w}, cols[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(rows[i], cols[j], sum[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (row0 + y + i < M && col0 + x + j < N)
        C[static_cast<size_t>(row0 + y + i) * N + col0 + x + j] = Half(sum[i][j]);
}
