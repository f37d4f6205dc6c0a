// Halves of two registers, put together. PTX ISA: Data Movement and Conversion Instructions: prmt.
#pragma once
#include "ptx/types.cuh"

// prmt: the upper half of `a`, then the lower half of `b`: what lies between the two in memory.
__device__ __forceinline__ u32 halves_between(u32 a, u32 b) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x5432;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
