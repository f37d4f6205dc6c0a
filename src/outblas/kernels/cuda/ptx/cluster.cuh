// Thread-block clusters and distributed shared memory.
// PTX ISA: barrier.cluster, mapa, st.async; Special Registers: %cluster_ctarank.
#pragma once
#include "ptx/types.cuh"

// %cluster_ctarank: rank of this CTA in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// barrier.cluster.arrive.relaxed: announces this thread without waiting. What the peers need to see,
// the initialised mbarriers, is released by fence.mbarrier_init; .release here would add a
// MEMBAR.ALL.GPU to the start of every kernel.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// barrier.cluster.wait.acquire: until every live thread of the cluster has arrived.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// mapa: the address of the same shared-memory offset in CTA `cta` of the cluster.
__device__ __forceinline__ u32 map_to_cta(u32 addr, u32 cta) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(cta));
  return r;
}

// st.async: writes 16 bytes to another CTA and completes 16 bytes at its mbarrier.
__device__ __forceinline__ void st_async_v4(u32 addr, u32 bar, float a, float b, float c, float d) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(addr),
               "r"(bar), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
