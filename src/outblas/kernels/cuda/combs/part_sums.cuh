// Split-K through global memory for warpgroups: the SPLIT CTAs of a tile write their sums to a workspace and count. The
// CTA that arrives last adds them up, always in the order of the parts: bitwise repeatable. No CTA waits for another.
//
// The workspace starts with COUNTERS_BYTES of counters, one per tile. They return to zero, so nothing has to clear them
// between kernels. SPLIT parts of BM x BN fp32 per tile follow, in the order of the fragments: 16 bytes of each thread.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/global.cuh"
#include "ptx/sync.cuh"

// For all threads of the consumers. Returns true in the CTA that has the sums of all parts in `acc`.
template <int MI, int CONSUMER_THREADS>
__device__ __forceinline__ bool sum_parts(AccReg (&acc)[MI][ACC_REGS], unsigned char* workspace, int tile, int part,
                                          int thread, int barrier) {
  constexpr int UNITS = MI * ACC_REGS / 4, UNIT_FLOATS = CONSUMER_THREADS * 4, PART_FLOATS = UNITS * UNIT_FLOATS;
  float* const first = reinterpret_cast<float*>(workspace + COUNTERS_BYTES) +
                       static_cast<u64>(tile) * SPLIT * PART_FLOATS + thread * 4;
  const bool used = A_ROWS >= 64 || thread / 32 * 16 < A_ROWS;  // this warp's rows were loaded
  if (used) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      float v[4];
      fragment_f32(acc[unit / (ACC_REGS / 4)], unit % (ACC_REGS / 4), v);
      store_f32x4(first + part * PART_FLOATS + unit * UNIT_FLOATS, v);
    }
  }
  named_sync(barrier, CONSUMER_THREADS);  // one thread counts for the whole CTA
  u32* const counter = reinterpret_cast<u32*>(workspace) + tile;
  const bool last = thread == 0 && count_in_turn(counter, SPLIT - 1) == SPLIT - 1;
  if (!named_any(barrier, CONSUMER_THREADS, last)) return false;
#pragma unroll
  for (int i = 0; i < MI * ACC_REGS; ++i) acc[i / ACC_REGS][i % ACC_REGS] = 0;
#pragma unroll 1
  for (int each = 0; used && each < SPLIT; ++each) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      float v[4];
      load_f32x4_of_other_sms(v, first + each * PART_FLOATS + unit * UNIT_FLOATS);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[unit / (ACC_REGS / 4)][unit % (ACC_REGS / 4) * 4 + e] += v[e];
    }
  }
  return true;
}
