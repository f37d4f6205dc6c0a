// Asynchronous copies global -> shared of 16, 8 or 4 bytes.
// PTX ISA: Data Movement and Conversion Instructions: cp.async.
#pragma once
#include "ptx/types.cuh"

// cp.async: copies BYTES, or writes zeros where `valid` is false (nothing is then read).
template <int BYTES>
__device__ __forceinline__ void cp_async(u32 dst, const void* src, bool valid) {
  const int n = valid ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES), "r"(n) : "memory");
}

// cp.async.commit_group: closes the group of copies issued by this thread so far.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: until at most N groups are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
