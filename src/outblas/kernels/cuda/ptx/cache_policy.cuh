// How L2 is to treat the lines that a load touches.
// PTX ISA: createpolicy, Cache Eviction Priority Hints.
#pragma once
#include "ptx/types.cuh"

// createpolicy.fractional: EVICT_FIRST for what is touched once, EVICT_LAST for what is read again and again.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 evict_last_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
