// K in parts, for outputs with too few tiles to fill the GPU.
// Each CTA writes its 64 x 64 partial sums to the workspace and increments a counter. The last CTA of a tile adds the
// parts in their order, so the bits do not depend on which CTA is last.
// Counters wrap around to zero, so every call starts with zeros. A split K has at most 2 SMS parts in all, for which
// the workspace has room. cp.async, three stages. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_split_k", "acc": "fp32",
 "grid": ["ceil(N, 64)", "ceil(M, 64)", "max(1, min(min(16, ceil(K, 64)), 2 * SMS // (ceil(M, 64) * ceil(N, 64))))"],
 "block": [128, 1, 1], "shared": 49152,
 "workspace": "65536 + 16384 * 2 * SMS",
 "requires": ["K % 8 == 0", "N % 2 == 0", "ceil(M, 64) * ceil(N, 64) <= 16384"]}
*/
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"

#if OUTBLAS_NN
#error "gemm_split_k reads B as N x K (TN)"
#endif

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int TILE = 64, DEPTH = 64, STAGES = 3, THREADS = 128;
constexpr int OPERAND_BYTES = TILE * DEPTH * ELEM, STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int COUNTERS_BYTES = 65536, FRAGMENTS = 2 * 4;  // of 16 x 8 outputs: 4 fp32 per lane

// Unit `u` (8 elements of K) of a row of 128 bytes.
__device__ __forceinline__ u32 unit(int row, int u) { return row * 128 + (u ^ row % 8) * 16; }

__device__ __forceinline__ void copy(u32 to, const u16* from, int first_row, int rows, int k0, int K) {
#pragma unroll
  for (int i = 0; i < TILE * 8 / THREADS; ++i) {
    const int row = i * (THREADS / 8) + threadIdx.x / 8, u = threadIdx.x % 8;
    const bool inside = first_row + row < rows && k0 + 8 * u < K;
    cp_async<16>(to + unit(row, u), inside ? from + static_cast<u64>(first_row + row) * K + k0 + 8 * u : from, inside);
  }
}

__device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][4], u32 a, u32 b, int warp_row, int warp_col) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    u32 x[2][4], y[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix_x4(a + unit(warp_row + 16 * i + lane % 16, k / 8 + lane / 16), x[i][0], x[i][1], x[i][2], x[i][3]);
#pragma unroll
    for (int j = 0; j < 4; j += 2)
      ldmatrix_x4(b + unit(warp_col + 8 * j + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2), y[j][0], y[j][1],
                  y[j + 1][0], y[j + 1][1]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_f32<BF16>(acc[4 * i + j], x[i], y[j][0], y[j][1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_split_k(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 smem = smem_u32(shared);
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int parts = gridDim.z, part = blockIdx.z;
  const int all = (K + DEPTH - 1) / DEPTH;  // no part is empty: there are at most as many as steps
  const int begin = static_cast<int>(static_cast<u64>(all) * part / parts);
  const int end = static_cast<int>(static_cast<u64>(all) * (part + 1) / parts);
  const int warp = threadIdx.x / 32, warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;

  auto fetch = [&](int step) {
    const u32 to = smem + (step - begin) % STAGES * STAGE_BYTES;
    if (step < end) {
      copy(to, A, row0, M, step * DEPTH, K);
      copy(to + OPERAND_BYTES, B, col0, N, step * DEPTH, K);
    }
    cp_async_commit();
  };

  float acc[FRAGMENTS][4] = {};
  for (int i = 0; i < STAGES - 1; ++i) fetch(begin + i);
  for (int step = begin; step < end; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    fetch(step + STAGES - 1);
    const u32 at = smem + (step - begin) % STAGES * STAGE_BYTES;
    multiply(acc, at, at + OPERAND_BYTES, warp_row, warp_col);
  }

  if (parts > 1) {
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    u32* counter = static_cast<u32*>(workspace) + tile;
    float* sums = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace) + COUNTERS_BYTES) +
                  static_cast<u64>(tile) * parts * (TILE * TILE) + threadIdx.x * 4;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) store_f32x4(sums + part * (TILE * TILE) + f * (THREADS * 4), acc[f]);
    __syncthreads();  // the one thread that counts speaks for all
    int* last = reinterpret_cast<int*>(shared);  // the stages have been read
    if (threadIdx.x == 0) *last = count_in_turn(counter, parts - 1) == static_cast<u32>(parts - 1);
    __syncthreads();
    if (!*last) return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      acc[f][0] = acc[f][1] = acc[f][2] = acc[f][3] = 0.0f;
      for (int p = 0; p < parts; ++p) {
        float v[4];
        load_f32x4_of_other_sms(v, sums + p * (TILE * TILE) + f * (THREADS * 4));
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[f][e] += v[e];
      }
    }
  }

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + warp_row + f / 4 * 16 + lane / 4 + 8 * half;
      const int col = col0 + warp_col + f % 4 * 8 + lane % 4 * 2;
      if (row < M && col < N)  // N is even
        *reinterpret_cast<u32*>(C + static_cast<u64>(row) * N + col) = pack2<BF16>(acc[f][2 * half], acc[f][2 * half + 1]);
    }
}
