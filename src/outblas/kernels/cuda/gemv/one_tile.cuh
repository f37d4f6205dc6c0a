// The K loop of sm80_gemv_mma where a CTA has one tile: UNROLL steps in flight, in registers or in shared memory.
#pragma once
#include "gemv/step.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"

// The K loop with UNROLL steps of weights in registers. Step i of this warp starts at k0 + i * stride.
__device__ __forceinline__ void stream_registers(Fragment (&acc)[MT][NT], const Source& from, int k0, int stride,
                                                 int steps) {
  Weights w[UNROLL];
  Tokens x[AHEAD];
  const Reading how(from.k_end);
  first_loads(from, how, k0, stride, w, x);
#pragma unroll 1
  for (int step = 0; step < steps; step += UNROLL) {
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) {
      multiply(acc, w[s], x[s % AHEAD]);
      load_tokens(from, k0 + (s + AHEAD) * stride, x[s % AHEAD]);
      load_weights(from, how, k0 + (s + UNROLL) * stride, w[s]);
    }
    k0 += UNROLL * stride;
  }
}

// The same with the UNROLL steps in shared memory; `ring` is the thread's first 16 bytes.
__device__ __forceinline__ void stream_shared(Fragment (&acc)[MT][NT], const Source& from, u32 ring, int k0, int stride,
                                              int steps) {
  const Reading how(from.k_end);
  if constexpr (EARLY_B) {  // these weights are all in the first group, which is waited for first
#pragma unroll
    for (int s = 0; s < UNROLL; ++s) copy_weights(ring + s * SLOT_BYTES, from, how, k0 + s * stride);
    warm(from, how, k0 + UNROLL * stride);
    pdl_wait();
  }
#pragma unroll
  for (int s = 0; s < UNROLL; ++s) {
    if constexpr (!EARLY_B) copy_weights(ring + s * SLOT_BYTES, from, how, k0 + s * stride);
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
    copy_weights(slot, from, how, k0 + (step + UNROLL) * stride);
    copy_tokens(slot, from, k0 + (step + UNROLL) * stride);
    cp_async_commit();
    slot = slot == ring + (UNROLL - 1) * SLOT_BYTES ? ring : slot + SLOT_BYTES;
  }
  cp_async_wait<0>();  // the exchange between warps uses the ring again
}
