// Bytes of two registers. PTX ISA: Data Movement and Conversion Instructions: prmt.
#pragma once
#include "ptx/types.cuh"

// prmt: the bytes of `low` have numbers 0 to 3, those of `high` 4 to 7; a digit of `selector` names each byte.
__device__ __forceinline__ u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}
