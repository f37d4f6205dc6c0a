// sm80_mma_gemm: C[M, N] = A[M, K] B by cp.async multistage, ldmatrix and mma.sync.
//
// WM x WN x WK warps: WK > 1 splits every stage's K inside the CTA (tiny tiles with a long K).
// SPLIT > 1 (sm_90) splits K over a cluster and reduces through distributed shared memory.
// VEC elements per global load: 8, 4, 2 by cp.async of 16, 8, 4 bytes; 1 by scalar loads. So rows of any alignment are
// served. M, N and K are free. The knobs are constants that the generated prelude defines (source.py).
#pragma once
#include "epilogue/store_two.cuh"
#include "epilogue/warp_sums.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "scheduler/raster.cuh"

constexpr int WARPS = WM * WN * WK;
constexpr int THREADS = 32 * WARPS;
constexpr int MT = BM / WM / 16;  // m16 blocks of a warp
constexpr int NT = BN / WN / 8;   // n8 blocks of a warp
constexpr int K_STEPS = BK / 16 / WK;

constexpr int A_BYTES = BM * BK * ELEM;
constexpr int B_BYTES = BN * BK * ELEM;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
using Sums = WarpSums<MT, NT, WM * WN, STAGES * STAGE_BYTES>;
constexpr int SMEM_BYTES = Sums::TOTAL_BYTES;

// Byte offset of 16-byte unit `u` of row `row` in a tile of UNITS_PER_ROW units.
// The XOR swizzle puts the eight rows of an ldmatrix tile into different banks.
template <int UNITS_PER_ROW>
__device__ __forceinline__ u32 tile_offset(int row, int u) {
  if constexpr (UNITS_PER_ROW >= 8) u ^= row & 7;
  if constexpr (UNITS_PER_ROW == 4) u ^= (row >> 1) & 3;
  if constexpr (UNITS_PER_ROW == 2) u ^= (row >> 2) & 1;
  return (row * UNITS_PER_ROW + u) * 16;
}

// ROWS x COLS elements from a row-major matrix of `rows` x `cols` at (row0, col0), zeros outside. OF_B: a K-major B.
template <int ROWS, int COLS, bool OF_B = false>
__device__ __forceinline__ void load_tile(u32 smem, const u16* __restrict__ src, int row0, int col0, int rows, int cols) {
  constexpr int PER_ROW = COLS / VEC, TOTAL = ROWS * PER_ROW;
#pragma unroll
  for (int base = 0; base < TOTAL; base += THREADS) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (TOTAL % THREADS != 0 && i >= TOTAL) break;
    const int r = i / PER_ROW, col = i % PER_ROW * VEC;
    const bool valid = row0 + r < rows && col0 + col < cols;
    const int row = OF_B ? row_of_b(row0 + r, rows) : row0 + r;
    const u16* from = src + (valid ? static_cast<u64>(row) * cols + col0 + col : 0);
    const u32 to = smem + tile_offset<COLS / 8>(r, col / 8) + col % 8 * ELEM;
    if constexpr (VEC > 1) {
      cp_async<VEC * ELEM>(to, from, valid);
    } else {
      const u16 value = valid ? *from : u16{0};
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
    }
  }
}

__device__ __forceinline__ void load_b(u32 smem, const u16* b, TileCoord at, int k0, int n, int k) {
  if constexpr (B_K_MAJOR)
    load_tile<BN, BK, true>(smem + A_BYTES, b, at.n, k0, n, k);
  else
    load_tile<BK, BN>(smem + A_BYTES, b, k0, at.n, k, n);
}

__device__ __forceinline__ void load_stage(u32 smem, const u16* a, const u16* b, TileCoord at, int k0, int m, int n, int k) {
  load_tile<BM, BK>(smem, a, at.m, k0, m, k);
  load_b(smem, b, at, k0, n, k);
}

// This warp's share of one stage: K_STEPS steps of 16.
__device__ __forceinline__ void multiply_stage(Fragment (&acc)[MT][NT], u32 stage, int warp_m, int warp_n, int warp_k,
                                               int lane) {
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    const int k_unit = (warp_k * K_STEPS + step) * 2;
    u32 a[MT][4], b[NT][2];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const int row = (warp_m * MT + i) * 16 + lane % 16;
      ldmatrix_x4(stage + tile_offset<BK / 8>(row, k_unit + lane / 16), a[i][0], a[i][1], a[i][2], a[i][3]);
    }
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
      if constexpr (B_K_MAJOR) {
        const int row = (warp_n * NT + j) * 8 + lane % 8 + lane / 16 * 8;
        ldmatrix_x4(stage + A_BYTES + tile_offset<BK / 8>(row, k_unit + lane / 8 % 2), b[j][0], b[j][1], b[j + 1][0],
                    b[j + 1][1]);
      } else {
        const int row = k_unit * 8 + lane % 16;
        ldmatrix_x4_trans(stage + A_BYTES + tile_offset<BN / 8>(row, warp_n * NT + j + lane / 16), b[j][0], b[j][1],
                          b[j + 1][0], b[j + 1][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j) mma(acc[i][j], a[i], b[j][0], b[j][1]);
  }
}

#if FUSED
// Where a warp's fragments lie in C, (row0, col0) being their first element.
struct FusedStore {
  const Fused& fused;
  u16* c;
  int row0, col0, m, n;  // of this lane

  __device__ __forceinline__ Extras extras(int unit) const {
    return Lane(fused, row0 + unit / NT * 16, 8, col0, m, n).load<false>(unit % NT * 8);
  }
  __device__ __forceinline__ void operator()(int unit, float (&v)[4], const Extras& extras) const {
    const int row = row0 + unit / NT * 16, col = col0 + unit % NT * 8;
    if constexpr (FUSED_GATED) {
      store_gated(extras, c, row, col, m, n, v[0], v[1]);
      store_gated(extras, c, row + 8, col, m, n, v[2], v[3]);
    } else {
      apply(extras, 0, v[0], v[1]);
      apply(extras, 1, v[2], v[3]);
      store_two(c, row, col, m, n, v[0], v[1]);
      store_two(c, row + 8, col, m, n, v[2], v[3]);
    }
  }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_mma_gemm(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n,
                  int k FUSED_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp % WK, position = warp / WK;
  const int warp_m = position / WN, warp_n = position % WN;
  const int rank = blockIdx.x % SPLIT;
  bool inside;
  const TileCoord tile = grid_tile<true, GROUP, SPLIT>((m + BM - 1) / BM, (n + BN - 1) / BN, inside);
  if (!inside) return;
  const TileCoord at{tile.m * BM, tile.n * BN};

  if (PDL) pdl_launch_dependents();
  Sums::open_inbox(smem, rank);
  const int all = (k + BK - 1) / BK;
  const int share = all / SPLIT, extra = all % SPLIT;
  const int first = rank * share + (rank < extra ? rank : extra);
  const int iters = share + (rank < extra ? 1 : 0);

  Fragment acc[MT][NT] = {};
  constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 1;
  if constexpr (EARLY_B) {  // B of these stages is all in the first group, which is waited for first
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
      if (s < iters) load_b(smem + s * STAGE_BYTES, b, at, (first + s) * BK, n, k);
  }
  if (PDL) pdl_wait();
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    if (s < iters) {
      load_tile<BM, BK>(smem + s * STAGE_BYTES, a, at.m, (first + s) * BK, m, k);
      if constexpr (!EARLY_B) load_b(smem + s * STAGE_BYTES, b, at, (first + s) * BK, n, k);
    }
    cp_async_commit();
  }
  for (int i = 0; i < iters; ++i) {
    cp_async_wait<AHEAD - 1>();
    __syncthreads();
    if (STAGES > 1 && i + AHEAD < iters)
      load_stage(smem + (i + AHEAD) % STAGES * STAGE_BYTES, a, b, at, (first + i + AHEAD) * BK, m, n, k);
    if (STAGES > 1) cp_async_commit();
    multiply_stage(acc, smem + i % STAGES * STAGE_BYTES, warp_m, warp_n, warp_k, lane);
    if (STAGES == 1 && i + 1 < iters) {
      __syncthreads();
      load_stage(smem, a, b, at, (first + i + 1) * BK, m, n, k);
      cp_async_commit();
    }
  }
#if FUSED
  FUSED_MAKE
  const FusedStore store{fused, c, at.m + warp_m * MT * 16 + lane / 4, at.n + warp_n * NT * 8 + 2 * (lane % 4), m, n};
  Sums::finish(acc, smem, rank, position, warp_k, lane, store);
#else
  Sums::finish(acc, smem, rank, position, warp_k, lane, [&](int unit, const float(&v)[4]) {
    const int row = at.m + (warp_m * MT + unit / NT) * 16 + lane / 4;
    const int col = at.n + (warp_n * NT + unit % NT) * 8 + 2 * (lane % 4);
    store_two(c, row, col, m, n, v[0], v[1]);
    store_two(c, row + 8, col, m, n, v[2], v[3]);
  });
#endif
}
