/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [128, 1, 1]}
*/
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int BM = 64, BN = 64, BK = 32, THREADS = 128;
constexpr int PITCH = BK + 8;  // elements from a row to the next in shared memory

extern "C" __global__ void gemm(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  __shared__ __align__(16) u16 a_tile[BM * PITCH];  // a_tile[row * PITCH + k] = A[(m0 + row) * K + k0 + k]
  __shared__ __align__(16) u16 b_tile[BN * PITCH];  // b_tile[column * PITCH + k] = B[(n0 + column) * K + k0 + k]
  const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;  // this warp's 32 x 32 part of the tile
  float sums[2][4][4] = {};  // blocks of 16 rows and 8 columns: four sums of this lane in each
  for (int k0 = 0; k0 < K; k0 += BK) {
    // HOLE load
    __syncthreads();
    // HOLE multiply
    __syncthreads();
  }
  // HOLE store
}
