// Shared memory, 16 bytes at a time. PTX ISA: Data Movement and Conversion Instructions: ld, st.
#pragma once
#include "ptx/types.cuh"

// ld.shared.v4.b32.
__device__ __forceinline__ void load_shared_x4(u32 (&r)[4], u32 addr) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// st.shared.v4.b32.
__device__ __forceinline__ void store_shared_x4(u32 addr, const u32 (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// prmt: the low halves of two registers, and the high halves.
__device__ __forceinline__ u32 low_halves(u32 first, u32 second) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(first), "r"(second));
  return r;
}
__device__ __forceinline__ u32 high_halves(u32 first, u32 second) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(first), "r"(second));
  return r;
}
