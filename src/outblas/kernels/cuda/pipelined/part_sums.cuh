// Split-K through global memory for mma.sync warps: the SPLIT CTAs of a tile write their sums to a workspace and count.
// The CTA that arrives last adds them up, always in the order of the parts: bitwise repeatable. No CTA waits for
// another, so any number of parts may run anywhere, in any order.
//
// The workspace starts with COUNTERS_BYTES of counters, one per tile. They return to zero, so nothing has to clear them
// between kernels. SPLIT parts of BM x BN fp32 per tile follow, in the order of the fragments: 16 bytes of each lane.
#pragma once
#include "pipelined/warp_tile.cuh"
#include "ptx/global.cuh"
#include "ptx/sync.cuh"

struct PartSums {
  static constexpr int FRAGMENT_FLOATS = 32 * 4;
  static constexpr int WARP_FLOATS = MT * NT * FRAGMENT_FLOATS;
  static constexpr int PART_FLOATS = WM * WN * WARP_FLOATS;
  static constexpr int COUNT_BARRIER = 1;  // named barrier

  // For all threads: writes part `part` of tile `tile`. In the last CTA, calls store(i, sums) for each block row.
  template <class Store>
  static __device__ __forceinline__ void run(const Fragment (&acc)[MT][NT], unsigned char* workspace, int tile,
                                             int part, int warp, int lane, const Store& store) {
    float* const first = reinterpret_cast<float*>(workspace + COUNTERS_BYTES) +
                         static_cast<u64>(tile) * SPLIT * PART_FLOATS + warp * WARP_FLOATS + lane * 4;
    float* const mine = first + part * PART_FLOATS;
#pragma unroll
    for (int unit = 0; unit < MT * NT; ++unit) {
      float v[4];
      fragment_f32(acc[unit / NT][unit % NT], v);
      store_f32x4(mine + unit * FRAGMENT_FLOATS, v);
    }
    __syncthreads();  // one thread counts for the whole CTA
    u32* const counter = reinterpret_cast<u32*>(workspace) + tile;
    const bool last = threadIdx.x == 0 && count_in_turn(counter, SPLIT - 1) == SPLIT - 1;
    if (!named_any(COUNT_BARRIER, THREADS, last)) return;
#pragma unroll 1  // the accumulators are free by now: their registers hold one block row of sums, and loads in flight
    for (int i = 0; i < MT; ++i) {
      float sums[NT][4];
      add_up(first + i * NT * FRAGMENT_FLOATS, sums);
      store(i, sums);
    }
  }

  // One block row of all parts. The CTA's own part is read back, too.
  static __device__ __forceinline__ void add_up(const float* from, float (&sums)[NT][4]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) load_f32x4_of_other_sms(sums[j], from + j * FRAGMENT_FLOATS);
#pragma unroll 1
    for (int part = 1; part < SPLIT; ++part) {
      float v[NT][4];
#pragma unroll
      for (int j = 0; j < NT; ++j) load_f32x4_of_other_sms(v[j], from + part * PART_FLOATS + j * FRAGMENT_FLOATS);
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][e] += v[j][e];
    }
  }
};
