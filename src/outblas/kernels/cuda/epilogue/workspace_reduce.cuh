// Split-K through global memory: the SPLIT CTAs of a tile write their partial sums to a workspace and increment a
// counter.
// The sums are in the order of the accumulators' registers. The last CTA to arrive adds them up and stores. No CTA
// waits for another, so any number of parts may run anywhere, in any order.
//
// With REDUCE_ALL every part adds up a share of the tile, if all parts arrive soon enough. A part waits for PATIENCE
// cycles, then gives its share up and ends; the last to arrive takes over all shares that were given up. So no part has
// to be resident together with another. Parts add in the same order as without REDUCE_ALL: the same bits.
//
// The workspace starts with COUNTERS_BYTES of counters: one per tile and warpgroup, or one Meeting per tile and warp
// (REDUCE_ALL). They return to zero, so nothing has to clear them between kernels. SPLIT parts of
// BM x BN fp32 per tile follow.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/global.cuh"
#include "ptx/sync.cuh"

// Eight columns of a warpgroup's 64 rows: 4 fp32 of each of 128 threads, 16 bytes a thread, side by side.
constexpr int FRAGMENT_FLOATS = 128 * 4;

#if REDUCE_ALL
// Where the parts of a tile meet, warp by warp: one word of 64 bits, zero before and after.
//   bits 0 to 7    parts that have arrived
//   bits 8 to 15   parts that have left; the last to leave clears the word
//   bits 32 to 63  parts that have given their share up
struct Meeting {
  static constexpr long long PATIENCE = 8000;  // cycles
  static constexpr u64 ARRIVAL = 1, LEAVE = 256;

  u64* word;
  u64 at_leave;  // the word before this warp left; lane 0 only

  static __device__ __forceinline__ u32 arrived(u64 word) { return word % LEAVE; }

  // Shares that this warp must add up, one bit each; the same in all lanes. `has_share`: its own is not empty.
  __device__ __forceinline__ u32 shares(int part, bool has_share) {
    u32 mine = 0;
    __syncwarp();  // lane 0 counts for the whole warp
    if (threadIdx.x % 32 == 0) {
      const u64 own = u64{1} << (32 + part);
      const u64 before = atomic_add_acq_rel(word, has_share ? ARRIVAL : ARRIVAL + LEAVE);
      at_leave = before;
      if (arrived(before) == SPLIT - 1) {
        mine = static_cast<u32>((has_share ? before | own : before) >> 32);
        if (has_share) at_leave = atomic_add_acq_rel(word, LEAVE);
      } else if (has_share) {
        const long long begin = clock64();
        bool met = false;
        while (!met && clock64() - begin < PATIENCE) met = arrived(load_acquire(word)) == SPLIT;
        at_leave = atomic_add_acq_rel(word, met ? LEAVE : LEAVE + own);
        // If the last arrived just now, nobody has seen that this share was given up.
        if (met || arrived(at_leave) == SPLIT) mine = static_cast<u32>(own >> 32);
      }
    }
    return __shfl_sync(0xFFFFFFFF, mine, 0);
  }
  // Clears the word if all others had left.
  __device__ __forceinline__ void close() {
    if (threadIdx.x % 32 == 0 && at_leave / LEAVE % 256 == SPLIT - 1) *word = 0;
  }
};
#endif

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

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
  static constexpr int SHARE = REDUCE_ALL ? (UNITS + SPLIT - 1) / SPLIT : UNITS;  // fragments that one part adds up
  static constexpr int BATCH =
      largest_divisor(UNITS % SHARE == 0 ? SHARE : common_divisor(SHARE, UNITS % SHARE), LOADS / TOGETHER);

  // A warpgroup writes part `part` of tile `tile`, then adds up what falls to it and stores.
  static __device__ __forceinline__ void run(const AccReg (&acc)[MI][ACC_REGS], unsigned char* workspace, int tile,
                                             int part, u16* c, int x0, int y0, int m, int n, int warpgroup,
                                             int wg_thread, int barrier FUSED_ARGUMENTS) {
    float* first = reinterpret_cast<float*>(workspace + COUNTERS_BYTES) + static_cast<u64>(tile) * SPLIT * PART_FLOATS +
                   warpgroup * UNITS * FRAGMENT_FLOATS + wg_thread * 4;
    float* mine = first + part * PART_FLOATS;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      float v[4];
      fragment_f32(acc[unit / (BN / 8)], unit % (BN / 8), v);
      store_f32x4(mine + unit * FRAGMENT_FLOATS, v);
    }
#if REDUCE_ALL
    Meeting meeting{reinterpret_cast<u64*>(workspace) + (tile * WARPGROUPS + warpgroup) * 4 + wg_thread / 32, 0};
    const u32 shares = meeting.shares(part, part * SHARE < UNITS);
#pragma unroll 1
    for (int share = 0; share < SPLIT; ++share) {
      if ((shares >> share & 1) == 0) continue;
      const int end = share * SHARE + SHARE < UNITS ? share * SHARE + SHARE : UNITS;
#pragma unroll 1
      for (int unit = share * SHARE; unit < end; unit += BATCH) add_up(first, unit, c, x0, y0, m, n, wg_thread FUSED_PASS);
    }
    meeting.close();
#else
    u32* counter = reinterpret_cast<u32*>(workspace) + tile * WARPGROUPS + warpgroup;
    named_sync(barrier, 128);  // one thread counts for the whole warpgroup
    const bool last = wg_thread == 0 && count_in_turn(counter, SPLIT - 1) == SPLIT - 1;
    if (!named_any(barrier, 128, last)) return;
#pragma unroll 1  // unrolled, ptxas would begin a batch's loads before the sums of the one before, and spill
    for (int unit = 0; unit < UNITS; unit += BATCH) add_up(first, unit, c, x0, y0, m, n, wg_thread FUSED_PASS);
#endif
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
