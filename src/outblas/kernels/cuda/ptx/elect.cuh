// elect.sync: true in one lane of a warp, all of whose lanes get here. PTX ISA: elect.sync.
#pragma once
#include "ptx/types.cuh"

__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
