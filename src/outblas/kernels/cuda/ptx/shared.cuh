// Shared memory, one element at a time. PTX ISA: Data Movement and Conversion Instructions: st.
#pragma once
#include "ptx/types.cuh"

// st.shared.u16.
__device__ __forceinline__ void store_shared(u32 addr, u16 value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(addr), "h"(value) : "memory");
}
