// sm80_gemv_mma: C[M, N] = A[M, K] B for at most BM = 8 or 16 rows of A (tokens), bound by the reading of
// B (weights). mma.sync m16n8k16 with the operands swapped: 16 weight rows by 8 tokens.
//
// Weights go from global memory to the threads that multiply them, 16 bytes a load, every byte once, with
// UNROLL steps in flight: in registers, or in a ring in shared memory of which every thread reads back only
// what it copied itself (no barrier). A sum over K may be permuted, so a thread's 16 bytes need no shuffle:
// tokens are read with the same permutation (below). BN rows per CTA: WN warps side by side, WK warps that
// take every WK-th step of K; SPLIT CTAs of a cluster (sm_90) take a slice of K each.
//
// K-major weights (TN), a step of 64: lane (g, t) = (l / 4, l % 4) loads k = 32 h + 8 t + {0..7} of rows
// 16 i + 2 g + r. N-major weights (NN), a step of 32: it loads k = 8 t + e of columns 64 q + 8 g + {0..7}.
// Either way mma's k slots 2t, 2t+1, 2t+8, 2t+9 are the lane's k = 8 t + 4 j + {0..3} (for j = 0, 1), and its
// rows g, g + 8 are two neighbouring weight rows, so that outputs are stored in pairs.
// M <= BM, N any (NN: a multiple of 8), K a multiple of 8. The knobs are constants of the prelude (source.py).
#pragma once
#include "epilogue/store_two.cuh"
#include "epilogue/warp_sums.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/load.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"

constexpr int THREADS = 32 * WN * WK;
constexpr int ROWS = BN / WN;  // weight rows of a warp
constexpr int MT = ROWS / 16;  // m16 blocks of a warp
constexpr int NT = BM / 8;     // n8 blocks: tokens
constexpr int STEP = B_K_MAJOR ? 64 : 32;
constexpr int HALVES = STEP / 32;               // 32 k: one 16-byte load of a token, two mma
constexpr int LOADS = ROWS * STEP / (32 * 8);   // 16-byte loads of weights, per thread and step
constexpr int TOKEN_LOADS = NT * HALVES;        // the same of tokens
// Steps of tokens in registers: they come from L1 or L2, so that fewer are in flight than of weights.
constexpr int AHEAD = UNROLL % 2 == 0 ? 2 : 1;
constexpr int SLOT_BYTES = (LOADS + TOKEN_LOADS) * THREADS * 16;
using Sums = WarpSums<MT, NT, WN, RING_SHARED ? UNROLL * SLOT_BYTES : 0>;
constexpr int SMEM_BYTES = Sums::TOTAL_BYTES;

// What a thread holds of one step.
using Weights = u32[LOADS][4];
using Tokens = u32[TOKEN_LOADS][4];

// First weight row, of the warp's, of the pair that a lane holds in block `tile`.
__device__ __forceinline__ int pair_row(int tile, int lane) {
  return B_K_MAJOR ? 16 * tile + 2 * (lane / 4) : 64 * (tile / 4) + 8 * (lane / 4) + 2 * (tile % 4);
}

// Where a thread reads: element offsets of its rows (or columns) at k = 0, and its own first k.
// Rows past N read row 0: what they give is never stored, and rows do not mix.
struct Source {
  static constexpr int STREAMS = B_K_MAJOR ? 2 * MT : ROWS / 64;
  const u16* a;
  const u16* b;
  u32 weight[STREAMS];
  u32 token[NT];
  bool present[NT];  // absent tokens are not read
  int n, k_end, lane_k;

  __device__ __forceinline__ Source(const u16* a_, const u16* b_, int row0, int m, int n_, int k, int k_end_, int lane)
      : a(a_), b(b_), n(n_), k_end(k_end_), lane_k(8 * (lane % 4)) {
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      const int row = row0 + (B_K_MAJOR ? pair_row(s / 2, lane) + s % 2 : 64 * s + 8 * (lane / 4));
      weight[s] = row < n ? static_cast<u32>(row) * (B_K_MAJOR ? k : 1) : 0;
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      present[j] = 8 * j + lane / 4 < m;
      token[j] = present[j] ? static_cast<u32>(8 * j + lane / 4) * k : 0;
    }
  }

  // Load i of the step that starts at k0: TN: 32-k half i % 2 of row i / 2. NN: k row i % 8 of block i / 8.
  __device__ __forceinline__ const u16* weights_at(int i, int k0, bool& valid) const {
    const int at = k0 + lane_k + (B_K_MAJOR ? 32 * (i % 2) : i % 8);
    valid = at < k_end;
    const u32 offset = B_K_MAJOR ? weight[i / 2] + at : weight[i / 8] + static_cast<u32>(at) * n;
    return b + (valid ? offset : 0);
  }

  // Load i: 32-k half i % HALVES of token block i / HALVES.
  __device__ __forceinline__ const u16* tokens_at(int i, int k0, bool& valid) const {
    const int at = k0 + lane_k + 32 * (i % HALVES);
    valid = present[i / HALVES] && at < k_end;
    return a + (valid ? token[i / HALVES] + at : 0);
  }
};

// Everything that this thread has of one step: MT x NT x 2 HALVES products.
__device__ __forceinline__ void multiply(Fragment (&acc)[MT][NT], const Weights& w, const Tokens& x) {
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        u32 a[4];  // rows g, g + 8 of the first two k slots, then of the last two
        if constexpr (B_K_MAJOR) {
          a[0] = w[(2 * i) * HALVES + half][2 * j], a[1] = w[(2 * i + 1) * HALVES + half][2 * j];
          a[2] = w[(2 * i) * HALVES + half][2 * j + 1], a[3] = w[(2 * i + 1) * HALVES + half][2 * j + 1];
        } else {
          const int row = i / 4 * 8 + 4 * j, pair = i % 4;
          a[0] = low_halves(w[row][pair], w[row + 1][pair]), a[1] = high_halves(w[row][pair], w[row + 1][pair]);
          a[2] = low_halves(w[row + 2][pair], w[row + 3][pair]), a[3] = high_halves(w[row + 2][pair], w[row + 3][pair]);
        }
#pragma unroll
        for (int t = 0; t < NT; ++t)
          mma_f32<BF16>(acc[i][t], a, x[t * HALVES + half][2 * j], x[t * HALVES + half][2 * j + 1]);
      }
}

// The K loop with UNROLL steps of weights in registers. Step i of this warp starts at k0 + i * stride.
__device__ __forceinline__ void stream_registers(Fragment (&acc)[MT][NT], const Source& from, int k0, int stride,
                                                 int steps) {
  Weights w[UNROLL];
  Tokens x[AHEAD];
  bool valid;
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const u16* src = from.weights_at(i, k0 + s * stride, valid);
      load_stream<PREFETCH>(src, valid, w[s][i]);
    }
#pragma unroll
    for (int i = 0; !EARLY_B && s < AHEAD && i < TOKEN_LOADS; ++i) {
      const u16* src = from.tokens_at(i, k0 + s * stride, valid);
      load_shared_by_warps(src, valid, x[s][i]);
    }
  }
  if constexpr (EARLY_B) {
    pdl_wait();
#pragma unroll
    for (int i = 0; i < AHEAD * TOKEN_LOADS; ++i) {
      const u16* src = from.tokens_at(i % TOKEN_LOADS, k0 + i / TOKEN_LOADS * stride, valid);
      load_shared_by_warps(src, valid, x[i / TOKEN_LOADS][i % TOKEN_LOADS]);
    }
  }
#pragma unroll 1
  for (int step = 0; step < steps; step += UNROLL) {
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) {
      multiply(acc, w[s], x[s % AHEAD]);
#pragma unroll
      for (int i = 0; i < TOKEN_LOADS; ++i) {
        const u16* src = from.tokens_at(i, k0 + (s + AHEAD) * stride, valid);
        load_shared_by_warps(src, valid, x[s % AHEAD][i]);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const u16* src = from.weights_at(i, k0 + (s + UNROLL) * stride, valid);
        load_stream<PREFETCH>(src, valid, w[s][i]);
      }
    }
    k0 += UNROLL * stride;
  }
}

__device__ __forceinline__ void copy_weights(u32 slot, const Source& from, int k0) {
  bool valid;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const u16* src = from.weights_at(i, k0, valid);
    copy_stream<PREFETCH>(slot + i * THREADS * 16, src, valid);
  }
}

__device__ __forceinline__ void copy_tokens(u32 slot, const Source& from, int k0) {
  bool valid;
#pragma unroll
  for (int i = 0; i < TOKEN_LOADS; ++i) {
    const u16* src = from.tokens_at(i, k0, valid);
    copy_shared_by_warps(slot + (LOADS + i) * THREADS * 16, src, valid);
  }
}

// The same with the UNROLL steps in shared memory; `ring` is the thread's first 16 bytes.
__device__ __forceinline__ void stream_shared(Fragment (&acc)[MT][NT], const Source& from, u32 ring, int k0, int stride,
                                              int steps) {
  if constexpr (EARLY_B) {  // these weights are all in the first group, which is waited for first
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) copy_weights(ring + s * SLOT_BYTES, from, k0 + s * stride);
    pdl_wait();
  }
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) {
    if constexpr (!EARLY_B) copy_weights(ring + s * SLOT_BYTES, from, k0 + s * stride);
    copy_tokens(ring + s * SLOT_BYTES, from, k0 + s * stride);
    cp_async_commit();
  }
  u32 slot = ring;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<UNROLL - 1>();
    Weights w;
    Tokens x;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) load_shared(slot + i * THREADS * 16, w[i]);
#pragma unroll
    for (int i = 0; i < TOKEN_LOADS; ++i) load_shared(slot + (LOADS + i) * THREADS * 16, x[i]);
    multiply(acc, w, x);  // the products need the values: the slot is free again
    copy_weights(slot, from, k0 + (step + UNROLL) * stride);
    copy_tokens(slot, from, k0 + (step + UNROLL) * stride);
    cp_async_commit();
    slot = slot == ring + (UNROLL - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
  }
  cp_async_wait<0>();  // the exchange between warps uses the ring again
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_gemv_mma(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp % WK, warp_n = warp / WK;
  const int rank = blockIdx.x % SPLIT;
  const int row0 = blockIdx.x / SPLIT * BN + warp_n * ROWS;

  if (PDL) pdl_launch_dependents();
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

  Sums::finish(acc, smem, rank, warp_n, warp_k, lane, [&](int unit, const float(&v)[4]) {
    const int token = unit % NT * 8 + 2 * (lane % 4);
    const int row = row0 + pair_row(unit / NT, lane);
    store_two(c, token, row, m, n, v[0], v[2]);
    store_two(c, token + 1, row, m, n, v[1], v[3]);
  });
}
