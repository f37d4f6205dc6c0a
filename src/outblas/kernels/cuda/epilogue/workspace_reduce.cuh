// Split-K through global memory: the SPLIT CTAs of a tile write their partial sums to a workspace and increment a
// counter.
// The sums are in the order of the accumulators' registers. The last CTA to arrive adds them up and stores. No CTA
// waits for another, so any number of parts may run anywhere, in any order.
//
// The workspace starts with COUNTERS_BYTES of counters, one per tile and warpgroup. They wrap around to zero, so
// nothing has to clear them between kernels. SPLIT parts of BM x BN fp32 per tile follow.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/global.cuh"
#include "ptx/sync.cuh"

// Eight columns of a warpgroup's 64 rows: 4 fp32 of each of 128 threads, 16 bytes a thread, side by side.
constexpr int FRAGMENT_FLOATS = 128 * 4;

template <int MI, int WARPGROUPS>
struct WorkspaceReduce {
  static constexpr int UNITS = MI * (BN / 8);
  static constexpr int PART_FLOATS = WARPGROUPS * UNITS * FRAGMENT_FLOATS;
  // Loads in flight (LOADS at most): of TOGETHER parts of BATCH fragments.
  static constexpr int TOGETHER = SPLIT < LOADS ? SPLIT : LOADS;

  static __device__ constexpr int largest_divisor(int value, int limit) {
    int d = limit < value ? limit : value;
    while (value % d != 0) --d;
    return d;
  }
  static constexpr int BATCH = largest_divisor(UNITS, LOADS / TOGETHER);

  // A warpgroup writes part `part` of tile `tile`; if it was the last, it adds up and stores.
  static __device__ __forceinline__ void run(const AccReg (&acc)[MI][ACC_REGS], unsigned char* workspace, int tile,
                                             int part, u16* c, int x0, int y0, int m, int n, int warpgroup,
                                             int wg_thread, int barrier FUSED_ARGUMENTS) {
    u32* counter = reinterpret_cast<u32*>(workspace) + tile * WARPGROUPS + warpgroup;
    float* first = reinterpret_cast<float*>(workspace + COUNTERS_BYTES) + static_cast<u64>(tile) * SPLIT * PART_FLOATS +
                   warpgroup * UNITS * FRAGMENT_FLOATS + wg_thread * 4;
    float* mine = first + part * PART_FLOATS;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      float v[4];
      fragment_f32(acc[unit / (BN / 8)], unit % (BN / 8), v);
      store_f32x4(mine + unit * FRAGMENT_FLOATS, v);
    }
    named_sync(barrier, 128);  // one thread counts for the whole warpgroup
    const bool last = wg_thread == 0 && count_in_turn(counter, SPLIT - 1) == SPLIT - 1;
    if (!named_any(barrier, 128, last)) return;
#pragma unroll 1  // unrolled, ptxas would begin a batch's loads before the sums of the one before, and spill
    for (int unit = 0; unit < UNITS; unit += BATCH) add_up(first, unit, c, x0, y0, m, n, wg_thread FUSED_PASS);
  }

  // The sums of BATCH fragments from `unit` on, to C. Parts are always added in their order: bitwise repeatable.
  // This CTA's own part is read back, too. Taking it from registers would cost a predicate and four moves per load, and
  // would keep the accumulators alive.
  static __device__ __forceinline__ void add_up(const float* first, int unit, u16* c, int x0, int y0, int m, int n,
                                                int wg_thread FUSED_ARGUMENTS) {
#if FUSED
    Extras extras[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const Lane at = fragment_lane(fused, x0, y0 + (unit + i) / (BN / 8) * 64, m, n, wg_thread);
      extras[i] = at.load<true>(8 * ((unit + i) % (BN / 8)));
    }
#endif
    const float* from = first + unit * FRAGMENT_FLOATS;
    float sum[BATCH][4];
#pragma unroll
    for (int p0 = 0; p0 < SPLIT; p0 += TOGETHER) {
      float v[TOGETHER][BATCH][4];
#pragma unroll
      for (int p = p0; p < p0 + TOGETHER && p < SPLIT; ++p) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) load_f32x4_of_other_sms(v[p - p0][i], from + p * PART_FLOATS + i * FRAGMENT_FLOATS);
      }
#pragma unroll
      for (int p = p0; p < p0 + TOGETHER && p < SPLIT; ++p) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][e] = p == 0 ? v[p - p0][i][e] : sum[i][e] + v[p - p0][i][e];
        }
      }
    }
    const int lane = wg_thread % 32, warp = wg_thread / 32;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int row = y0 + (unit + i) / (BN / 8) * 64 + warp * 16 + lane / 4;
      const int col = x0 + (unit + i) % (BN / 8) * 8 + 2 * (lane % 4);
#if FUSED
      store_fused(extras[i], c, row, col, m, n, sum[i]);
#else
      store_pair(c, row, col, m, n, pack2<BF16>(sum[i][0], sum[i][1]));
      store_pair(c, row + 8, col, m, n, pack2<BF16>(sum[i][2], sum[i][3]));
#endif
    }
  }
};
