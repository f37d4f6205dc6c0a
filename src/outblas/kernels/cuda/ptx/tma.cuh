// The tensor memory accelerator: tiles between global and shared memory by descriptor.
// PTX ISA: Data Movement and Conversion Instructions: cp.async.bulk.tensor.
#pragma once
#include "ptx/cache_policy.cuh"
#include "ptx/types.cuh"

// prefetch.tensormap: brings a descriptor into the descriptor cache. PTX ISA: prefetch.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The loads and the store below with a policy (ptx/cache_policy.cuh).
__device__ __forceinline__ void tma_load_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask,
                                                        u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_store_hint(const TensorMap* map, u32 src, int x, int y, u64 policy) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(map),
               "r"(src), "r"(x), "r"(y), "l"(policy)
               : "memory");
}

// cp.async.bulk.tensor.2d global -> shared of this CTA; completes `bar` by bytes.
__device__ __forceinline__ void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}

// The load of a map with three extents, with a policy for L2 or without.
template <bool HAS_POLICY>
__device__ __forceinline__ void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, u64 policy) {
  if constexpr (HAS_POLICY)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The load of a map with four extents, to this CTA or (SHARED) to those of `mask`, with a policy for L2 or without.
template <bool SHARED, bool HAS_POLICY>
__device__ __forceinline__ void tma_load_4d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, int w,
                                            u16 mask, u64 policy) {
  if constexpr (SHARED && HAS_POLICY)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "h"(mask), "l"(policy)
        : "memory");
  else if constexpr (SHARED)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "h"(mask)
        : "memory");
  else if constexpr (HAS_POLICY)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// tma_load, written to the same offset of every CTA whose bit is set in `mask` (multicast).
__device__ __forceinline__ void tma_load_multicast(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

// cp.async.bulk.tensor.2d shared -> global; out-of-range elements are clipped.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(src),
               "r"(x), "r"(y)
               : "memory");
}

// cp.async.bulk.commit_group: closes the group of stores issued by this thread so far.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: until at most N groups still read their shared memory.
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
