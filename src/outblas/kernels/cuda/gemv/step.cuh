// One step of K in sm80_gemv_mma: a thread's registers, the addresses that it reads, and its products.
#pragma once
#include "epilogue/warp_sums.cuh"
#include "ptx/cache_policy.cuh"
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
// A walk may keep the tokens of all of K in shared memory: each thread keeps what it reads itself, KEPT_STEPS steps.
constexpr bool KEPT = KEPT_STEPS > 0;
constexpr int TOKEN_BYTES = TOKEN_LOADS * THREADS * 16;  // of one step
constexpr int SLOT_BYTES = LOADS * THREADS * 16 + (KEPT ? 0 : TOKEN_BYTES);
constexpr int RING_BYTES = RING_SHARED ? UNROLL * SLOT_BYTES : 0;
// A CTA that walks over tiles adds up one while the ring fills with the next, in two exchanges by turns.
using Sums = WarpSums<MT, NT, WN, PERSISTENT ? 0 : RING_BYTES, PERSISTENT>;
constexpr int SMEM_BYTES = PERSISTENT ? RING_BYTES + KEPT_STEPS * TOKEN_BYTES + 2 * Sums::EXCHANGE_BYTES : Sums::TOTAL_BYTES;

// What a thread holds of one step.
using Weights = u32[LOADS][4];
using Tokens = u32[TOKEN_LOADS][4];

// First weight row, of the warp's, of the pair that a lane holds in block `tile`.
__device__ __forceinline__ int pair_row(int tile, int lane) {
  return B_K_MAJOR ? 16 * tile + 2 * (lane / 4) : 64 * (tile / 4) + 8 * (lane / 4) + 2 * (tile % 4);
}

// The addresses that a thread reads: element offsets of its rows (or columns) at k = 0, and its own first k.
// Rows past N read row 0. Their results are never stored, and rows do not mix.
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
    seek(row0, k, lane);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      present[j] = 8 * j + lane / 4 < m;
      token[j] = present[j] ? static_cast<u32>(8 * j + lane / 4) * k : 0;
    }
  }

  // From here on the weights are those of the warp's rows from row0.
  __device__ __forceinline__ void seek(int row0, int k, int lane) {
#pragma unroll
    for (int s = 0; s < STREAMS; ++s) {
      const int row = row0 + (B_K_MAJOR ? pair_row(s / 2, lane) + s % 2 : 64 * s + 8 * (lane / 4));
      const int lies = B_K_MAJOR ? row_of_b(row, n) : row;
      weight[s] = row < n ? static_cast<u32>(lies) * (B_K_MAJOR ? k : 1) : 0;
    }
  }

  // Load i of the step that starts at k0, up to `end`: TN: 32-k half i % 2 of row i / 2. NN: k row i % 8 of block i / 8.
  __device__ __forceinline__ const u16* weights_at(int i, int k0, int end, bool& valid) const {
    const int at = k0 + lane_k + (B_K_MAJOR ? 32 * (i % 2) : i % 8);
    valid = at < end;
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

// Loader of weights: reads k before `end` (0: nothing), with an L2 hint if STREAM_B.
struct Reading {
  int end;
  u64 policy;

  __device__ __forceinline__ explicit Reading(int end_) : end(end_), policy(STREAM_B ? evict_first_policy() : 0) {}
};

// The loads of one step into registers.
__device__ __forceinline__ void load_weights(const Source& from, const Reading& how, int k0, Weights& w) {
  bool valid;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const u16* src = from.weights_at(i, k0, how.end, valid);
    if constexpr (STREAM_B)
      load_stream_hint<PREFETCH>(src, valid, w[i], how.policy);
    else
      load_stream<PREFETCH>(src, valid, w[i]);
  }
}

__device__ __forceinline__ void load_tokens(const Source& from, int k0, Tokens& x) {
  bool valid;
#pragma unroll
  for (int i = 0; i < TOKEN_LOADS; ++i) {
    const u16* src = from.tokens_at(i, k0, valid);
    load_shared_by_warps(src, valid, x[i]);
  }
}

// WARM_K: while the CTA waits for its predecessor, WARM_K elements of K beyond the ring are prefetched into L2.
// Each request covers one row. The warps with the first steps issue them. For K-major weights.
__device__ __forceinline__ void warm(const Source& from, const Reading& how, int k0) {
  if constexpr (WARM_K > 0) {
    if (threadIdx.x / 32 % WK != 0 || from.lane_k != 0 || k0 >= how.end) return;
    const int left = how.end - k0;
#pragma unroll
    for (int s = 0; s < Source::STREAMS; ++s)
      prefetch_into_l2(from.b + from.weight[s] + k0, (left < WARM_K ? left : WARM_K) * ELEM);
  }
}

// The first loads of a ring in registers. EARLY_B: the weights are loaded before the predecessor has ended.
__device__ __forceinline__ void first_loads(const Source& from, const Reading& how, int k0, int stride,
                                            Weights (&w)[UNROLL], Tokens (&x)[AHEAD]) {
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) {
    load_weights(from, how, k0 + s * stride, w[s]);
    if (!EARLY_B && s < AHEAD) load_tokens(from, k0 + s * stride, x[s]);
  }
  if constexpr (EARLY_B) {
    warm(from, how, k0 + UNROLL * stride);
    pdl_wait();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) load_tokens(from, k0 + s * stride, x[s]);
  }
}

// The loads of one step into this thread's part of a slot in shared memory.
__device__ __forceinline__ void copy_weights(u32 slot, const Source& from, const Reading& how, int k0) {
  bool valid;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const u16* src = from.weights_at(i, k0, how.end, valid);
    copy_stream<PREFETCH>(slot + i * THREADS * 16, src, valid);
  }
}

template <int BEHIND = LOADS>  // number of 16-byte pieces of each thread that may still be in flight
__device__ __forceinline__ void copy_tokens(u32 slot, const Source& from, int k0) {
  bool valid;
#pragma unroll
  for (int i = 0; i < TOKEN_LOADS; ++i) {
    const u16* src = from.tokens_at(i, k0, valid);
    copy_shared_by_warps(slot + (BEHIND + i) * THREADS * 16, src, valid);
  }
}

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
