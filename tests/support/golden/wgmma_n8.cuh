#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(float (&d)[4], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, "
      "%4, %5, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate));
}
#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(float (&d)[4], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0, %1, %2, %3}, "
      "%4, %5, p, 1, 1, 0, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate));
}
#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(float (&d)[4], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, "
      "%4, %5, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate));
}
#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(float (&d)[4], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, "
      "%4, %5, p, 1, 1, 0, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate));
}
#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(u32 (&d)[2], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 "
      "{%0, %1}, "
      "%2, %3, p, 1, 1, 0, 0;\n}"
      : "+r"(d[0]), "+r"(d[1])
      : "l"(a), "l"(b), "r"(accumulate));
}
#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n8k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance(u32 (&d)[2], u64 a, u64 b,
                                               int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 "
      "{%0, %1}, "
      "%2, %3, p, 1, 1, 0, 1;\n}"
      : "+r"(d[0]), "+r"(d[1])
      : "l"(a), "l"(b), "r"(accumulate));
}
