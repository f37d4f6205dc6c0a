// Split-K inside a cluster: the SPLIT CTAs of a tile push their partial sums through distributed shared memory.
// The tile's 8-column fragments are dealt to OWNERS CTAs. An owner receives the other SPLIT - 1 parts by st.async. Its
// mbarrier counts the bytes, so no second cluster barrier is needed. The owner adds the others' parts to its own in rank
// order (bitwise repeatable) and stores. With SHIFT, an element may lie in two tiles and have two owners, and both store
// it. So they add all parts in rank order. The first two owners do so anyway: a sum of two has one order.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// Bytes of one fragment (4 fp32 of each of 128 threads).
constexpr int FRAGMENT_BYTES = 128 * 16;

template <int MI, int WARPGROUPS>
struct ClusterReduce {
  static constexpr int UNITS = MI * (BN / 8);
  static constexpr int OWNED = UNITS / OWNERS;
  static constexpr int SLOT_BYTES = WARPGROUPS * OWNED * FRAGMENT_BYTES;
  static constexpr int EXPECTED_BYTES = (SPLIT - 1) * SLOT_BYTES;
  static constexpr bool IN_ORDER = SHIFT && OWNERS > 2;

  // `rank`: this CTA's part of K; peer ranks lie `peer_stride` apart in the cluster from `peer_base`.
  static __device__ __forceinline__ void run(const AccReg (&acc)[MI][ACC_REGS], u32 inbox, u32 bar, int rank,
                                             int peer_base, int peer_stride, u16* c, int x0, int y0, int m, int n,
                                             int warpgroup, int wg_thread FUSED_ARGUMENTS) {
    float own[OWNED][4];
#pragma unroll
    for (int owner = 0; owner < OWNERS; ++owner) {
      const u32 cta = peer_base + owner * peer_stride;
      const int slot = rank < owner ? rank : rank - 1;
      const u32 remote = map_to_cta(inbox + slot * SLOT_BYTES + warpgroup * OWNED * FRAGMENT_BYTES + wg_thread * 16, cta);
      const u32 remote_bar = map_to_cta(bar, cta);
#pragma unroll
      for (int i = 0; i < OWNED; ++i) {
        const int unit = owner * OWNED + i;
        float v[4];
        fragment_f32(acc[unit / (BN / 8)], unit % (BN / 8), v);
        if (owner == rank) {
#pragma unroll
          for (int e = 0; e < 4; ++e) own[i][e] = v[e];
        } else {
          st_async_v4(remote + i * FRAGMENT_BYTES, remote_bar, v[0], v[1], v[2], v[3]);
        }
      }
    }
    if (rank >= OWNERS) return;
#if FUSED
    Extras extras[FUSED_BATCH];
    const auto ask = [&](int first) {
#pragma unroll
      for (int i = 0; i < FUSED_BATCH && first + i < OWNED; ++i) {
        const int unit = rank * OWNED + first + i;
        const Lane at = fragment_lane(fused, x0, y0 + unit / (BN / 8) * 64, m, n, wg_thread);
        extras[i] = at.load<true>(8 * (unit % (BN / 8)));
      }
    };
    ask(0);
#endif
    mbar_wait_cluster(bar, 0);
    const int lane = wg_thread % 32, warp = wg_thread / 32;
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
#if FUSED
      if (i > 0 && i % FUSED_BATCH == 0) ask(i);
      if (x0 + 8 * ((rank * OWNED + i) % (BN / 8)) >= n) continue;  // as in fragment.cuh: ptxas would mix all of it
#endif
      float sum[IN_ORDER ? 4 : 1] = {};
#pragma unroll
      for (int slot = 0; slot < SPLIT - 1; ++slot) {
        const u32 from = inbox + slot * SLOT_BYTES + (warpgroup * OWNED + i) * FRAGMENT_BYTES + wg_thread * 16;
        float v[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(from)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (IN_ORDER) {
            if (slot == rank) sum[e] += own[i][e];
            sum[e] += v[e];
          } else {
            own[i][e] += v[e];
          }
        }
      }
      if constexpr (IN_ORDER) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (rank == SPLIT - 1) sum[e] += own[i][e];
          own[i][e] = sum[e];
        }
      }
      const int unit = rank * OWNED + i;
      const int row = y0 + (unit / (BN / 8)) * 64 + warp * 16 + lane / 4;
      const int col = x0 + (unit % (BN / 8)) * 8 + 2 * (lane % 4);
#if FUSED
      store_fused(extras[i % FUSED_BATCH], c, row, col, m, n, own[i]);
#else
      store_pair(c, row, col, m, n, pack2<BF16>(own[i][0], own[i][1]));
      store_pair(c, row + 8, col, m, n, pack2<BF16>(own[i][2], own[i][3]));
#endif
    }
  }
};
