// cp.async into four stages, three in flight: 128 x 128 x 32, 4 warps of 64 x 64. Units of 16 bytes are swizzled instead of
// padded. TN and NN (B transposed on its way into registers by ldmatrix.trans).
/* outblas-launch
{"form": "device", "entry": "gemm_cp_async_stages", "acc": "fp32", "grid": ["ceil(N, 128)", "ceil(M, 128)", 1],
 "block": [128, 1, 1], "shared": 65536, "requires": ["K % 8 == 0", "N % 8 == 0", "ceil(M, 128) <= 65535"]}
*/
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"

constexpr bool BF16 = OUTBLAS_BF16, NN = OUTBLAS_NN;
constexpr int TILE = 128, DEPTH = 32, STAGES = 4, THREADS = 128;
constexpr int OPERAND_BYTES = TILE * DEPTH * ELEM, STAGE_BYTES = 2 * OPERAND_BYTES;

// Unit `u` (8 elements of K) of a row of 64 bytes: two rows share the 32 banks, so the row counts by twos.
__device__ __forceinline__ u32 k_major(int row, int u) { return row * 64 + (u ^ row / 2 % 4) * 16; }
// Unit `u` (8 elements of N) of a row of 256 bytes: one of the 32 of K.
__device__ __forceinline__ u32 n_major(int k, int u) { return k * 256 + (u ^ k % 8) * 16; }

__device__ __forceinline__ void copy_k_major(u32 to, const u16* from, int first_row, int rows, int k0, int K) {
#pragma unroll
  for (int i = 0; i < TILE * 4 / THREADS; ++i) {
    const int row = i * (THREADS / 4) + threadIdx.x / 4, u = threadIdx.x % 4;
    const bool inside = first_row + row < rows && k0 + 8 * u < K;
    cp_async<16>(to + k_major(row, u), inside ? from + static_cast<u64>(first_row + row) * K + k0 + 8 * u : from, inside);
  }
}

__device__ __forceinline__ void copy_n_major(u32 to, const u16* from, int col0, int N, int k0, int K) {
#pragma unroll
  for (int i = 0; i < DEPTH * 16 / THREADS; ++i) {
    const int k = i * (THREADS / 16) + threadIdx.x / 16, u = threadIdx.x % 16;
    const bool inside = col0 + 8 * u < N && k0 + k < K;
    cp_async<16>(to + n_major(k, u), inside ? from + static_cast<u64>(k0 + k) * N + col0 + 8 * u : from, inside);
  }
}

// Fragments of B for two blocks of 8 columns from `col` on, and 16 of K from `k` on.
__device__ __forceinline__ void fragments_b(u32 b, int col, int k, u32 (&first)[2], u32 (&second)[2]) {
  const int lane = threadIdx.x % 32;
  if constexpr (NN)
    ldmatrix_x4_trans(b + n_major(k + lane % 16, col / 8 + lane / 16), first[0], first[1], second[0], second[1]);
  else
    ldmatrix_x4(b + k_major(col + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2), first[0], first[1], second[0],
                second[1]);
}

__device__ __forceinline__ void multiply(float (&acc)[4][8][4], u32 a, u32 b, int warp_row, int warp_col) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    u32 x[4][4], y[8][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ldmatrix_x4(a + k_major(warp_row + 16 * i + lane % 16, k / 8 + lane / 16), x[i][0], x[i][1], x[i][2], x[i][3]);
#pragma unroll
    for (int j = 0; j < 8; j += 2) fragments_b(b, warp_col + 8 * j, k, y[j], y[j + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) mma_f32<BF16>(acc[i][j], x[i], y[j][0], y[j][1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_cp_async_stages(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 smem = smem_u32(shared);
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE, steps = (K + DEPTH - 1) / DEPTH;
  const int warp = threadIdx.x / 32, warp_row = warp / 2 * 64, warp_col = warp % 2 * 64;

  // A step behind the last is an empty group, so that groups and steps count alike.
  auto fetch = [&](int step) {
    const u32 to = smem + step % STAGES * STAGE_BYTES;
    if (step < steps) {
      copy_k_major(to, A, row0, M, step * DEPTH, K);
      if constexpr (NN)
        copy_n_major(to + OPERAND_BYTES, B, col0, N, step * DEPTH, K);
      else
        copy_k_major(to + OPERAND_BYTES, B, col0, N, step * DEPTH, K);
    }
    cp_async_commit();
  };

  float acc[4][8][4] = {};
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this step is there for all, and all have left the stage that is filled next
    fetch(step + STAGES - 1);
    const u32 at = smem + step % STAGES * STAGE_BYTES;
    multiply(acc, at, at + OPERAND_BYTES, warp_row, warp_col);
  }
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + warp_row + 16 * i + lane / 4 + 8 * half, col = col0 + warp_col + 8 * j + lane % 4 * 2;
        if (row < M && col < N)  // N is even
          *reinterpret_cast<u32*>(C + static_cast<u64>(row) * N + col) =
              pack2<BF16>(acc[i][j][2 * half], acc[i][j][2 * half + 1]);
      }
}
