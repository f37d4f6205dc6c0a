// Rounding of fp32 accumulators to the half-precision output, two at a time.
// PTX ISA: Data Movement and Conversion Instructions: cvt.
#pragma once
#include "ptx/types.cuh"

// Packs (lo, hi) as fp16x2 or bf16x2, round to nearest even.
template <bool BF16>
__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 r;
  if constexpr (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Unpacks fp16x2 to two fp32 (exact).
__device__ __forceinline__ void unpack2(u32 packed, float& lo, float& hi) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(lo), "=f"(hi)
      : "r"(packed));
}
