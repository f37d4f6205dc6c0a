// The epilogue: sums to a tile in shared memory, in blocks of 64 columns, and from there by the combs of C.
//
// The rows of the sums are those of A in shared memory, which lie comb after comb. So do the boxes of C. For TN the
// columns are rows of B, and lie comb after comb, too. Then a lane holds eight neighbours of a row of C: one of each
// comb.
#pragma once
#include "combs/maps.cuh"
#include "epilogue/fragment.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_vector.cuh"

constexpr int SPANS = BN / COMB_SPAN;                       // blocks of 64 columns
constexpr int TILE_BLOCK_BYTES = BM * COMB_ROW_BYTES;       // one of them

// TN: a warp's 16 rows from `row`, both halves of 8.
__device__ __forceinline__ void write_rows_of_combs(const AccReg (&acc)[ACC_REGS], u32 tile, int row, int lane) {
#pragma unroll
  for (int span = 0; span < SPANS; ++span)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int nb = 2 * i * SPANS + span, next = nb + SPANS;  // 8-column blocks of the combs 2 i and 2 i + 1
          words[i] = pack2<BF16>(acc[4 * nb + 2 * half + odd], acc[4 * next + 2 * half + odd]);
        }
        const int at = row + lane / 4 + 8 * half, unit = 2 * (lane % 4) + odd;
        store_shared_x4(unit_address(tile + span * TILE_BLOCK_BYTES, at, unit), words);
      }
}

// NN: the same for columns in their own order.
__device__ __forceinline__ void write_rows(const AccReg (&acc)[ACC_REGS], u32 tile, int row, int lane) {
#pragma unroll
  for (int nb = 0; nb < BN / 8; nb += 2) {
    const u32 block = tile + nb / 8 * TILE_BLOCK_BYTES;
    stmatrix_x4(unit_address(block, row + lane % 16, nb % 8 + lane / 16), packed_pair(acc, nb, 0),
                packed_pair(acc, nb, 1), packed_pair(acc, nb + 1, 0), packed_pair(acc, nb + 1, 1));
  }
}

// One thread stores COUNT combs from `first` of a tile whose corner is (m0, n0) of C.
template <int COUNT>
__device__ __forceinline__ void store_combs(const CombMaps& maps, u32 tile, int first, int m0, int n0, int m, int n) {
  constexpr int BOX_BYTES = A_ROWS / COMBS * COMB_ROW_BYTES;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      const int s = first + i, col = n0 + span * COMB_SPAN;
      if (m0 + s < m && col < n)
        tma_store(&maps.comb[s], tile + span * TILE_BLOCK_BYTES + s * BOX_BYTES, col + comb_shift(n, s), m0 / COMBS);
    }
  tma_store_commit();
  tma_store_wait_read<0>();
}
