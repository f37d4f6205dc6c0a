// Accumulator fragments of wgmma m64nN. For each block `nb` of 8 columns, lane l of warp w holds two columns of two
// rows.
//   columns  8*nb + 2*(l%4) + {0, 1}
//   rows     16*w + l/4 and 16*w + l/4 + 8
// PTX ISA: wgmma: Register Fragments and Shared Memory Matrix Layouts (D fragment).
#pragma once
#include "epilogue/fused.cuh"
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

#if FUSED
// Four sums, of columns `col` and `col` + 1 in rows `row` and `row` + 8, to C.
__device__ __forceinline__ void store_fused(const Extras& extras, u16* c, int row, int col, int m, int n, float (&v)[4]) {
  if constexpr (FUSED_GATED) {
    store_gated(extras, c, row, col, m, n, v[0], v[1]);
    store_gated(extras, c, row + 8, col, m, n, v[2], v[3]);
  } else {
    apply(extras, 0, v[0], v[1]);
    apply(extras, 1, v[2], v[3]);
    store_pair(c, row, col, m, n, pack2<BF16>(v[0], v[1]));
    store_pair(c, row + 8, col, m, n, pack2<BF16>(v[2], v[3]));
  }
}

// The lane's Extras for a block of 64 rows that starts at (y0, x0). 8-column block nb lies 8 nb to the right.
__device__ __forceinline__ Lane fragment_lane(const Fused& fused, int x0, int y0, int m, int n, int wg_thread) {
  const int lane = wg_thread % 32, warp = wg_thread / 32;
  return Lane(fused, y0 + warp * 16 + lane / 4, 8, x0 + 2 * (lane % 4), m, n);
}

// The whole epilogue in place, for stores that read accumulators. With FUSED_GATED it also stores to `c`. FUSED_BATCH
// fragments are loaded at once, and FUSED_AT_ONCE of them become outputs together.
template <int MI>
__device__ __forceinline__ void fuse(AccReg (&acc)[MI][ACC_REGS], const Fused& fused, u16* c, int x0, int y0, int m,
                                     int n, int wg_thread) {
  constexpr int BLOCKS = BN / 8;
  const int row = y0 + wg_thread / 32 * 16 + wg_thread % 32 / 4, col = x0 + 2 * (wg_thread % 4);
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const Lane lane = fragment_lane(fused, x0, y0 + mi * 64, m, n, wg_thread);
#pragma unroll
    for (int first = 0; first < BLOCKS; first += FUSED_BATCH) {
      // Nothing outside of C is stored. The branch also keeps ptxas from interleaving all fragments, which would spill.
      if (x0 + 8 * first >= n) continue;
      Extras extras[FUSED_BATCH];
#pragma unroll
      for (int i = 0; i < FUSED_BATCH && first + i < BLOCKS; ++i) extras[i] = lane.load<true>(8 * (first + i));
#pragma unroll
      for (int part = 0; part < FUSED_BATCH && first + part < BLOCKS; part += FUSED_AT_ONCE) {
        if (x0 + 8 * (first + part) >= n) continue;
#pragma unroll
        for (int i = part; i < part + FUSED_AT_ONCE && first + i < BLOCKS; ++i) {
          AccReg* v = acc[mi] + 4 * (first + i);
          if constexpr (FUSED_GATED) {
            store_gated(extras[i], c, row + mi * 64, col + 8 * (first + i), m, n, v[0], v[1]);
            store_gated(extras[i], c, row + mi * 64 + 8, col + 8 * (first + i), m, n, v[2], v[3]);
          } else {
            apply(extras[i], 0, v[0], v[1]);
            apply(extras[i], 1, v[2], v[3]);
          }
        }
      }
    }
  }
}
#endif
