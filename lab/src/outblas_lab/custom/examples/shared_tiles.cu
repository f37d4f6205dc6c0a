// 32 x 32 tiles of A and B in shared memory, one element of C per thread. Tails are zeros in shared memory, so that the
// inner loop has no bounds.
/* outblas-launch
{"form": "device", "entry": "gemm_shared_tiles", "acc": "fp32", "grid": ["ceil(N, 32)", "ceil(M, 32)", 1],
 "block": [32, 32, 1], "requires": ["ceil(M, 32) <= 65535"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_BF16
using Half = __nv_bfloat16;
#else
using Half = __half;
#endif

constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(TILE * TILE)
    gemm_shared_tiles(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  // One column more than the tile: threads of a warp that read a column find 32 different banks.
  __shared__ float a[TILE][TILE + 1], b[TILE][TILE + 1];  // a[row][k], b[column][k]
  const int x = threadIdx.x, y = threadIdx.y;
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE) {
    const int k = k0 + x;
    a[y][x] = row0 + y < M && k < K ? static_cast<float>(A[static_cast<size_t>(row0 + y) * K + k]) : 0.0f;
#if OUTBLAS_NN
    const int down = k0 + y, col = col0 + x;
    b[x][y] = col < N && down < K ? static_cast<float>(B[static_cast<size_t>(down) * N + col]) : 0.0f;
#else
    b[y][x] = col0 + y < N && k < K ? static_cast<float>(B[static_cast<size_t>(col0 + y) * K + k]) : 0.0f;
#endif
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILE; ++i) sum = fmaf(a[y][i], b[x][i], sum);
    __syncthreads();  // before the next tiles overwrite these
  }
  if (row0 + y < M && col0 + x < N) C[static_cast<size_t>(row0 + y) * N + col0 + x] = Half(sum);
}
