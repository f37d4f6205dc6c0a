// What a warp's mma.sync accumulates into, with the accumulator that the prelude names (ACC_FP16, BF16).
#pragma once
#include "epilogue/fused.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

#if ACC_FP16
using Fragment = u32[2];
#else
using Fragment = float[4];
#endif

// A 16x8 fragment as fp32: (row l/4, columns 2(l%4), +1), then the same of row l/4 + 8, of lane l.
// PTX ISA: Matrix Fragments for mma.m16n8k16.
__device__ __forceinline__ void fragment_f32(const Fragment& d, float (&v)[4]) {
#if ACC_FP16
  unpack2(d[0], v[0], v[1]);
  unpack2(d[1], v[2], v[3]);
#else
  for (int e = 0; e < 4; ++e) v[e] = d[e];
#endif
}

// d += a b, m16n8k16 of the prelude's type.
__device__ __forceinline__ void mma(Fragment& d, const u32 (&a)[4], u32 b0, u32 b1) {
#if ACC_FP16
  mma_f16(d, a, b0, b1);
#else
  mma_f32<BF16>(d, a, b0, b1);
#endif
}
