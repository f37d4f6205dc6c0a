// Warpgroup matrix multiply. PTX ISA: Asynchronous Warpgroup Level Matrix Instructions.
// The m64nNk16 wrapper itself is generated per N (one PTX operand per accumulator register) by
// source.py as "generated/wgmma_instance.cuh".
#pragma once
#include "ptx/types.cuh"

// wgmma.fence: orders register and shared-memory accesses before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: closes the group of wgmma issued so far.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group: until at most N groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Shared-memory matrix descriptor. PTX ISA: wgmma: Matrix Descriptor Format.
//   bits 0-13   address, in units of 16 bytes
//   bits 16-29  leading byte offset, in units of 16 bytes
//   bits 32-45  stride byte offset, in units of 16 bytes
//   bits 62-63  swizzle: 1 = 128 B, 2 = 64 B, 3 = 32 B.
// An address may be advanced by adding to the low word, because no sum leaves its 14 bits. In a cluster, the bits above
// the address hold the CTA's rank. They must not get into the leading offset.
__device__ __forceinline__ u32 descriptor_low(u32 addr, u32 leading_bytes) {
  return (addr & 0x3FFFF) >> 4 | leading_bytes >> 4 << 16;
}

__device__ __forceinline__ u64 descriptor(u32 low, u32 stride_bytes, u32 swizzle) {
  return static_cast<u64>(stride_bytes >> 4 | swizzle << 30) << 32 | low;
}
