// The K loops of sm80_gemv_mma for a CTA that walks over tiles blockIdx.x, blockIdx.x + gridDim.x, ...
// The ring of UNROLL steps flows from the end of one tile's K into the beginning of the next tile's K. So the next
// tile's loads are in flight while finish(sums, first row of the tile) adds up and stores.
// Every warp takes as many steps of a tile as warp 0 does, because all warps meet in the sums. Data past K, or after
// the last tile, are not read. Tokens are the same for every tile.
#pragma once
#include "gemv/step.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"

constexpr int STRIDE = WK * STEP;  // of K, from a warp's step to its next one

__device__ __forceinline__ void clear(Fragment (&acc)[MT][NT]) {
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;
}

// The tokens of a round, into shared memory; they are there when the round begins, which is when its weights are.
__device__ __forceinline__ void keep_round(u32 kept, const Source& from, int k0) {
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) copy_tokens<0>(kept + s * TOKEN_BYTES, from, k0 + s * STRIDE);
  cp_async_commit();
}

__device__ __forceinline__ void read_tokens(u32 kept, Tokens& x) {
#pragma unroll
  for (int i = 0; i < TOKEN_LOADS; ++i) load_shared(kept + i * THREADS * 16, x[i]);
}

// The ring in registers: a round of UNROLL steps belongs to one tile.
// KEPT: the first tile's rounds load the tokens, one round ahead, to `kept`, the thread's first 16 bytes there.
// Otherwise the tokens are read again for every tile, AHEAD steps ahead.
template <class Finish>
__device__ __forceinline__ void walk_registers(Source& from, u32 kept, int n, int k, int warp_n, int warp_k, int lane,
                                               Finish finish) {
  constexpr int ROUND = UNROLL * STRIDE;
  const int first = warp_k * STEP, rounds = (k + ROUND - 1) / ROUND, hop = gridDim.x * BN;
  Weights w[UNROLL];
  Tokens x[AHEAD];
  Reading how(k);
  if constexpr (KEPT) {
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) load_weights(from, how, first + s * STRIDE, w[s]);
    if (EARLY_B) {
      warm(from, how, first + ROUND);
      pdl_wait();
    }
    keep_round(kept, from, first);
  } else {
    first_loads(from, how, first, STRIDE, w, x);
  }
  Fragment acc[MT][NT] = {};
  int k0 = first, left = rounds;
  u32 at = kept;
  bool filling = KEPT;
#pragma unroll 1
  for (int row0 = blockIdx.x * BN; row0 < n;) {
    const bool last = --left == 0;
    const int next = last ? first : k0 + ROUND;
    if (last) {
      from.seek(row0 + hop + warp_n * ROWS, k, lane);
      how.end = row0 + hop < n ? k : 0;
    }
    if (KEPT && filling) {
      cp_async_wait<0>();
      if (!last) keep_round(at + UNROLL * TOKEN_BYTES, from, next);
    }
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) {
      if constexpr (KEPT) read_tokens(at + s * TOKEN_BYTES, x[s % AHEAD]);
      multiply(acc, w[s], x[s % AHEAD]);
      const int ahead = s + AHEAD;
      if (!KEPT) load_tokens(from, ahead < UNROLL ? k0 + ahead * STRIDE : next + (ahead - UNROLL) * STRIDE, x[s % AHEAD]);
      load_weights(from, how, next + s * STRIDE, w[s]);
    }
    at += UNROLL * TOKEN_BYTES;
    k0 = next;
    if (last) {
      finish(acc, row0);
      clear(acc);
      row0 += hop;
      left = rounds;
      at = kept;
      filling = false;
    }
  }
}

// Where the next step to be asked for lies.
struct Asking {
  int row0, k0, left;

  __device__ __forceinline__ void advance(Source& from, Reading& how, int k, int first, int steps, int lane) {
    k0 += STRIDE;
    if (--left == 0) {
      left = steps;
      k0 = first;
      row0 += gridDim.x * BN;
      from.seek(row0, k, lane);
      how.end = row0 < from.n ? k : 0;
    }
  }
};

// The ring in shared memory; `ring` and `kept` are the thread's first 16 bytes there. A short K has several tiles in the
// ring at once. KEPT: the first tile's steps bring the tokens.
template <class Finish>
__device__ __forceinline__ void walk_shared(Source& from, u32 ring, u32 kept, int n, int k, int warp_n, int warp_k,
                                            int lane, Finish finish) {
  const int first = warp_k * STEP, steps = (k + STRIDE - 1) / STRIDE;
  Reading how(k);
  Asking at{static_cast<int>(blockIdx.x) * BN + warp_n * ROWS, first, steps};
  int to_keep = steps;  // of the first tile
  const auto ask_tokens = [&](u32 slot, int k0) {
    if constexpr (KEPT) {
      if (to_keep > 0) copy_tokens<0>(kept + (steps - to_keep--) * TOKEN_BYTES, from, k0);
    } else {
      copy_tokens(slot, from, k0);
    }
    cp_async_commit();
  };
  if constexpr (EARLY_B) {  // these weights are all in the first group, which is waited for first
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) {
      copy_weights(ring + s * SLOT_BYTES, from, how, at.k0);
      at.advance(from, how, k, first, steps, lane);
    }
    warm(from, how, first + UNROLL * STRIDE);
    pdl_wait();
  }
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) {
    if constexpr (!EARLY_B) {
      copy_weights(ring + s * SLOT_BYTES, from, how, at.k0);
      at.advance(from, how, k, first, steps, lane);
    }
    ask_tokens(ring + s * SLOT_BYTES, first + s % steps * STRIDE);
  }
  u32 slot = ring;
#pragma unroll 1
  for (int row0 = blockIdx.x * BN; row0 < n; row0 += gridDim.x * BN) {
    Fragment acc[MT][NT] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<UNROLL - 1>();
      Weights w;
      Tokens x;
#pragma unroll
      for (int i = 0; i < LOADS; ++i) load_shared(slot + i * THREADS * 16, w[i]);
      read_tokens(KEPT ? kept + step * TOKEN_BYTES : slot + LOADS * THREADS * 16, x);
      multiply(acc, w, x);  // the products need the values: the slot is free again
      copy_weights(slot, from, how, at.k0);
      ask_tokens(slot, at.k0);
      at.advance(from, how, k, first, steps, lane);
      slot = slot == ring + (UNROLL - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
    }
    finish(acc, row0);
  }
  cp_async_wait<0>();
}
