// Sums of the accumulators of mma.sync warps. WK warps of a CTA share a position's K, and the SPLIT CTAs of a cluster
// share a tile's K.
// Fragments are dealt to WARP_OWNERS warps, then to OWNERS CTAs. An owner adds the parts of the others in a fixed order
// (bitwise repeatable) and keeps the result.
#pragma once
#include "epilogue/warp_fragment.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// ld.shared.v4: adds four fp32 of shared memory. PTX ISA: Data Movement: ld.
__device__ __forceinline__ void add_from_shared(u32 addr, float (&v)[4]) {
  float o[4];
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(o[0]), "=f"(o[1]), "=f"(o[2]), "=f"(o[3])
               : "r"(addr)
               : "memory");
  for (int e = 0; e < 4; ++e) v[e] += o[e];
}

// MT x NT fragments per warp, POSITIONS groups of WK warps.
// Shared memory: WORK_BYTES of the K loop (reused by the exchange between warps), the inbox of the cluster, its
// barrier.
// BY_TURNS: the caller alternates between two exchange buffers. The barrier inside one exchange then also proves that
// the exchange before it has been read.
template <int MT, int NT, int POSITIONS, int WORK_BYTES, bool BY_TURNS = false>
struct WarpSums {
  static constexpr int FRAGMENT_BYTES = 32 * 16;  // 4 fp32 of each lane
  static constexpr int WARP_OWNED = MT * NT / WARP_OWNERS;
  static constexpr int CTA_OWNED = WARP_OWNED / OWNERS;
  static constexpr int EXCHANGE_BYTES = POSITIONS * MT * NT * FRAGMENT_BYTES * (WK - 1);
  static constexpr int INBOX_OFFSET = WORK_BYTES > EXCHANGE_BYTES ? WORK_BYTES : EXCHANGE_BYTES;
  static constexpr int SLOT_BYTES = POSITIONS * WARP_OWNERS * CTA_OWNED * FRAGMENT_BYTES;
  static constexpr int INBOX_BYTES = (SPLIT - 1) * SLOT_BYTES;
  static constexpr int BAR_OFFSET = INBOX_OFFSET + INBOX_BYTES;
  static constexpr int TOTAL_BYTES = BAR_OFFSET + 8;

  // Before the K loop: this CTA's inbox is ready to receive.
  static __device__ __forceinline__ void open_inbox(u32 smem, int rank) {
    if constexpr (SPLIT > 1) {
      if (threadIdx.x == 0) {
        mbar_init(smem + BAR_OFFSET, 1);
        fence_mbar_init();
        if (rank < OWNERS) mbar_arrive_expect_tx(smem + BAR_OFFSET, INBOX_BYTES);
      }
      __syncthreads();
      cluster_arrive();
    }
  }

  // After the K loop, for all threads: calls store(unit, sums) for every fragment that this warp owns in the end.
  // unit = row block * NT + column block of its position. FUSED: store(unit, sums, store.extras(unit)).
  template <class Store>
  static __device__ __forceinline__ void finish(const Fragment (&acc)[MT][NT], u32 smem, int rank, int position,
                                                int warp_k, int lane, Store store) {
    float own[WARP_OWNED][4], mine[CTA_OWNED][4];
    reduce_warps(acc, own, smem, position, warp_k, lane);
    int unit0 = warp_k * WARP_OWNED;
    if constexpr (SPLIT > 1) cluster_wait();  // the peers' inboxes exist
    if (warp_k >= WARP_OWNERS) return;
    if constexpr (SPLIT > 1) {
      if (!reduce_cluster(own, mine, smem, rank, position * WARP_OWNERS + warp_k, lane)) return;
      unit0 += rank * CTA_OWNED;
    }
#if FUSED
    Extras extras[CTA_OWNED];
#pragma unroll
    for (int i = 0; i < CTA_OWNED; ++i) extras[i] = store.extras(unit0 + i);
#pragma unroll
    for (int i = 0; i < CTA_OWNED; ++i) store(unit0 + i, SPLIT > 1 ? mine[i] : own[i], extras[i]);
#else
#pragma unroll
    for (int i = 0; i < CTA_OWNED; ++i) store(unit0 + i, SPLIT > 1 ? mine[i] : own[i]);
#endif
  }

 private:
  // Sums the WK parts of a position: warp g < WARP_OWNERS keeps units [g * WARP_OWNED, ...), in a fixed
  // order; the others are done.
  static __device__ __forceinline__ void reduce_warps(const Fragment (&acc)[MT][NT], float (&own)[WARP_OWNED][4],
                                                      u32 smem, int position, int warp_k, int lane) {
    if constexpr (WK > 1 && !BY_TURNS) __syncthreads();  // the exchange reuses the stages
#pragma unroll
    for (int g = 0; g < WARP_OWNERS; ++g) {
      const int slot = warp_k < g ? warp_k : warp_k - 1;
#pragma unroll
      for (int i = 0; i < WARP_OWNED; ++i) {
        const int unit = g * WARP_OWNED + i;
        float v[4];
        fragment_f32(acc[unit / NT][unit % NT], v);
        if (g == warp_k) {
#pragma unroll
          for (int e = 0; e < 4; ++e) own[i][e] = v[e];
        } else {
          const u32 to = smem + (((position * WARP_OWNERS + g) * (WK - 1) + slot) * WARP_OWNED + i) * FRAGMENT_BYTES + lane * 16;
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                       : "memory");
        }
      }
    }
    if constexpr (WK > 1) {
      __syncthreads();
#pragma unroll
      for (int slot = 0; slot < WK - 1; ++slot)
#pragma unroll
        for (int i = 0; i < WARP_OWNED; ++i)
          if (warp_k < WARP_OWNERS)
            add_from_shared(
                smem + (((position * WARP_OWNERS + warp_k) * (WK - 1) + slot) * WARP_OWNED + i) * FRAGMENT_BYTES + lane * 16,
                own[i]);
    }
  }

  // Pushes this warp's sums to the owning CTAs of the cluster; an owner adds what the others sent.
  static __device__ __forceinline__ bool reduce_cluster(float (&own)[WARP_OWNED][4], float (&mine)[CTA_OWNED][4],
                                                        u32 smem, int rank, int sender, int lane) {
#pragma unroll
    for (int owner = 0; owner < OWNERS; ++owner) {
      const int slot = rank < owner ? rank : rank - 1;
#pragma unroll
      for (int i = 0; i < CTA_OWNED; ++i) {
        const float(&v)[4] = own[owner * CTA_OWNED + i];
        if (owner == rank) {
#pragma unroll
          for (int e = 0; e < 4; ++e) mine[i][e] = v[e];
        } else {
          const u32 to = smem + INBOX_OFFSET + slot * SLOT_BYTES + (sender * CTA_OWNED + i) * FRAGMENT_BYTES + lane * 16;
          st_async_v4(map_to_cta(to, owner), map_to_cta(smem + BAR_OFFSET, owner), v[0], v[1], v[2], v[3]);
        }
      }
    }
    if (rank >= OWNERS) return false;
    mbar_wait_cluster(smem + BAR_OFFSET, 0);
#pragma unroll
    for (int slot = 0; slot < SPLIT - 1; ++slot)
#pragma unroll
      for (int i = 0; i < CTA_OWNED; ++i)
        add_from_shared(smem + INBOX_OFFSET + slot * SLOT_BYTES + (sender * CTA_OWNED + i) * FRAGMENT_BYTES + lane * 16,
                        mine[i]);
    return true;
  }
};
