// Shared memory, 16 bytes at a time. PTX ISA: Data Movement and Conversion Instructions: st.
#pragma once
#include "ptx/types.cuh"

// st.shared.v4.b32.
__device__ __forceinline__ void store_shared_x4(u32 addr, const u32 (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
