// Accumulator fragments of wgmma m64nN: lane l of warp w holds, for every 8 columns `nb`, columns
// 8*nb + 2*(l%4) + {0, 1} of rows 16*w + l/4 and 16*w + l/4 + 8.
// PTX ISA: wgmma: Register Fragments and Shared Memory Matrix Layouts (D fragment).
#pragma once
#include "ptx/convert.cuh"

#if ACC_FP16
using AccReg = u32;                      // two fp16 in one register
constexpr int ACC_REGS = BN / 4;         // registers per thread and m64 block
#else
using AccReg = float;
constexpr int ACC_REGS = BN / 2;
#endif

// Two neighbouring outputs of 8-column block nb, upper (half 0) or lower (half 1) 8 rows, packed.
__device__ __forceinline__ u32 packed_pair(const AccReg (&acc)[ACC_REGS], int nb, int half) {
#if ACC_FP16
  return acc[2 * nb + half];
#else
  return pack2<BF16>(acc[4 * nb + 2 * half], acc[4 * nb + 2 * half + 1]);
#endif
}

// The four values of 8-column block nb as fp32: upper pair, lower pair.
__device__ __forceinline__ void fragment_f32(const AccReg (&acc)[ACC_REGS], int nb, float (&v)[4]) {
#if ACC_FP16
  unpack2(acc[2 * nb], v[0], v[1]);
  unpack2(acc[2 * nb + 1], v[2], v[3]);
#else
  for (int i = 0; i < 4; ++i) v[i] = acc[4 * nb + i];
#endif
}

// One pair to global memory, if it lies inside C. n is even on every path that gets here.
__device__ __forceinline__ void store_pair(u16* c, int row, int col, int m, int n, u32 pair) {
  if (row < m && col < n) *reinterpret_cast<u32*>(c + static_cast<u64>(row) * n + col) = pair;
}
