// Tensor cores out of shared memory by ldmatrix, two buffers: the next tile travels through registers while this one is
// multiplied. 128 x 128 x 32, 8 warps of 64 x 32. Rows of shared memory are padded by 16 bytes. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_ldmatrix_two_buffers", "acc": "fp32", "grid": ["ceil(N, 128)", "ceil(M, 128)", 1],
 "block": [256, 1, 1], "requires": ["K % 8 == 0", "ceil(M, 128) <= 65535"]}
*/
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

#if OUTBLAS_NN
#error "gemm_ldmatrix_two_buffers reads B as N x K (TN)"
#endif

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int TILE = 128, DEPTH = 32, PITCH = DEPTH + 8;  // elements; 80 bytes: 8 rows of ldmatrix meet 8 banks of 16 bytes

// What a thread carries of a 128 x 32 tile: 8 elements of each of two rows.
struct Carried {
  uint4 v[2];

  __device__ __forceinline__ void load(const u16* from, int first_row, int rows, int k0, int K) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + i * 64 + threadIdx.x / 4, k = k0 + threadIdx.x % 4 * 8;
      v[i] = row < rows && k < K ? *reinterpret_cast<const uint4*>(from + static_cast<u64>(row) * K + k)
                                 : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void store(u16* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(to + (i * 64 + threadIdx.x / 4) * PITCH + threadIdx.x % 4 * 8) = v[i];
  }
};

__device__ __forceinline__ void store_two(u16* C, int row, int col, int M, int N, float first, float second) {
  const u32 pair = pack2<BF16>(first, second);
  if (row >= M) return;
  u16* to = C + static_cast<u64>(row) * N + col;
  if (col < N) to[0] = static_cast<u16>(pair);
  if (col + 1 < N) to[1] = static_cast<u16>(pair >> 16);
}

__device__ __forceinline__ void multiply(float (&acc)[4][4][4], const u16* a, const u16* b, int warp_row, int warp_col) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    u32 x[4][4], y[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ldmatrix_x4(smem_u32(a + (warp_row + 16 * i + lane % 16) * PITCH + k + lane / 16 * 8), x[i][0], x[i][1], x[i][2],
                  x[i][3]);
#pragma unroll
    for (int j = 0; j < 4; j += 2)
      ldmatrix_x4(smem_u32(b + (warp_col + 8 * j + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8), y[j][0],
                  y[j][1], y[j + 1][0], y[j + 1][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_f32<BF16>(acc[i][j], x[i], y[j][0], y[j][1]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_ldmatrix_two_buffers(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  __shared__ __align__(16) u16 a[2][TILE * PITCH];
  __shared__ __align__(16) u16 b[2][TILE * PITCH];
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_col = warp % 4 * 32;
  float acc[4][4][4] = {};
  Carried next_a, next_b;
  next_a.load(A, row0, M, 0, K);
  next_b.load(B, col0, N, 0, K);
  next_a.store(a[0]);
  next_b.store(b[0]);
  __syncthreads();
  int buffer = 0;
  for (int k0 = 0; k0 < K; k0 += DEPTH, buffer ^= 1) {
    const bool more = k0 + DEPTH < K;
    if (more) {
      next_a.load(A, row0, M, k0 + DEPTH, K);
      next_b.load(B, col0, N, k0 + DEPTH, K);
    }
    multiply(acc, a[buffer], b[buffer], warp_row, warp_col);
    if (more) {  // the other buffer: everybody left it before the last barrier
      next_a.store(a[buffer ^ 1]);
      next_b.store(b[buffer ^ 1]);
    }
    __syncthreads();
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + warp_row + 16 * i + lane / 4, col = col0 + warp_col + 8 * j + lane % 4 * 2;
      store_two(C, row, col, M, N, acc[i][j][0], acc[i][j][1]);
      store_two(C, row + 8, col, M, N, acc[i][j][2], acc[i][j][3]);
    }
}
