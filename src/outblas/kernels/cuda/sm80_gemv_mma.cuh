// sm80_gemv_mma: C[M, N] = A[M, K] B for at most BM = 8 or 16 rows of A (tokens), bound by the reading of B (weights).
// mma.sync m16n8k16 with the operands swapped: 16 weight rows by 8 tokens.
//
// Weights go from global memory to the threads that multiply them, 16 bytes a load, every byte once. UNROLL steps are
// in flight, in registers or in a ring in shared memory. In the ring, every thread reads back only its own copies, so
// no barrier is needed. A sum over K may be permuted, so a thread's 16 bytes need no shuffle: tokens are read with the
// same permutation (below).
// BN rows per CTA: WN warps side by side, and WK warps that take every WK-th step of K. Each of the SPLIT CTAs of a
// cluster (sm_90) takes a slice of K.
//
// Let (g, t) = (lane / 4, lane % 4).
// K-major weights (TN), a step of 64: a lane loads k = 32 h + 8 t + {0..7} of rows 16 i + 2 g + r.
// N-major weights (NN), a step of 32: a lane loads k = 8 t + e of columns 64 q + 8 g + {0..7}.
// In both cases, mma's k slots 2t, 2t+1, 2t+8, 2t+9 are the lane's k = 8 t + 4 j + {0..3} (for j = 0, 1). Its rows g, g
// + 8 are two adjacent weight rows, so that outputs are stored in pairs.
// M <= BM, N any (NN: a multiple of 8), K a multiple of 8. The knobs are constants of the prelude (source.py).
#pragma once
#include "epilogue/store_two.cuh"
#include "gemv/one_tile.cuh"
#include "gemv/walk.cuh"

// Sums of fragment `unit` of the warp's rows from row0.
__device__ __forceinline__ void store_unit(u16* c, int unit, int row0, int m, int n, int lane, const float (&v)[4]) {
  const int token = unit % NT * 8 + 2 * (lane % 4);
  const int row = row0 + pair_row(unit / NT, lane);
  store_two(c, token, row, m, n, v[0], v[2]);
  store_two(c, token + 1, row, m, n, v[1], v[3]);
}

#if FUSED
// store_unit of sums that the epilogue follows: a lane's two pairs of a fragment are of two tokens.
struct FusedStore {
  const Fused& fused;
  u16* c;
  int row0, m, n, lane;

  __device__ __forceinline__ Extras extras(int unit) const {
    const int col = row0 + pair_row(unit / NT, lane);
    return Lane(fused, unit % NT * 8 + 2 * (lane % 4), 1, col, m, n).load<false>(0);
  }
  __device__ __forceinline__ void operator()(int unit, float (&v)[4], const Extras& extras) const {
    if constexpr (FUSED_GATED) {
      const int token = unit % NT * 8 + 2 * (lane % 4), col = row0 + pair_row(unit / NT, lane);
      store_gated(extras, c, token, col, m, n, v[0], v[2]);
      store_gated(extras, c, token + 1, col, m, n, v[1], v[3]);
    } else {
      apply(extras, 0, v[0], v[2]);
      apply(extras, 1, v[1], v[3]);
      store_unit(c, unit, row0, m, n, lane, v);
    }
  }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm80_gemv_mma(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n,
                  int k FUSED_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp % WK, warp_n = warp / WK;
  const int rank = blockIdx.x % SPLIT;
  const int row0 = blockIdx.x / SPLIT * BN + warp_n * ROWS;

  if (PDL) pdl_launch_dependents();
  FUSED_MAKE
  if constexpr (PERSISTENT) {
    Source from(a, b, row0, m, n, k, k, lane);
    const u32 mine = smem + threadIdx.x * 16;
    u32 exchange = smem + RING_BYTES + KEPT_STEPS * TOKEN_BYTES, other = exchange + Sums::EXCHANGE_BYTES;
    const auto finish = [&](const Fragment(&acc)[MT][NT], int tile_row0) {
#if FUSED
      const FusedStore store{fused, c, tile_row0 + warp_n * ROWS, m, n, lane};
      Sums::finish(acc, exchange, 0, warp_n, warp_k, lane, store);
#else
      Sums::finish(acc, exchange, 0, warp_n, warp_k, lane, [&](int unit, const float(&v)[4]) {
        store_unit(c, unit, tile_row0 + warp_n * ROWS, m, n, lane, v);
      });
#endif
      const u32 used = exchange;
      exchange = other, other = used;
    };
    if (PDL && !EARLY_B) pdl_wait();  // EARLY_B: behind the first steps' weights
    if constexpr (RING_SHARED)
      walk_shared(from, mine, mine + RING_BYTES, n, k, warp_n, warp_k, lane, finish);
    else
      walk_registers(from, mine, n, k, warp_n, warp_k, lane, finish);
  } else {
    Sums::open_inbox(smem, rank);
    const int all = (k + STEP - 1) / STEP;
    const int share = all / SPLIT, extra = all % SPLIT;
    const int first = rank * share + (rank < extra ? rank : extra);
    const int last = first + share + (rank < extra ? 1 : 0);
    const int steps = (last - first - warp_k + WK - 1) / WK;
    const Source from(a, b, row0, m, n, k, last * STEP < k ? last * STEP : k, lane);

    Fragment acc[MT][NT] = {};
    if (PDL && !EARLY_B) pdl_wait();  // EARLY_B: behind the first steps' weights
    if constexpr (RING_SHARED)
      stream_shared(acc, from, smem + threadIdx.x * 16, (first + warp_k) * STEP, WK * STEP, steps);
    else
      stream_registers(acc, from, (first + warp_k) * STEP, WK * STEP, steps);

#if FUSED
    Sums::finish(acc, smem, rank, warp_n, warp_k, lane, FusedStore{fused, c, row0, m, n, lane});
#else
    Sums::finish(acc, smem, rank, warp_n, warp_k, lane,
                 [&](int unit, const float(&v)[4]) { store_unit(c, unit, row0, m, n, lane, v); });
#endif
  }
}
