// The epilogue: sums to a tile in shared memory, in blocks of 64 columns, and from there to rows of C.
//
// The rows of the sums are those of A in shared memory, which lie comb after comb. For TN the columns are rows of B, and
// lie comb after comb, too. Then a lane holds eight neighbours of a row of C: one of each comb. The rows of a comb of C
// are all as far behind a 16-byte boundary, so vectors of C are made of two units of the tile.
#pragma once
#include "combs/align.cuh"
#include "epilogue/fragment.cuh"
#include "ptx/mma.cuh"

constexpr int TILE_BLOCK_BYTES = BM * COMB_ROW_BYTES;  // 64 columns of the tile

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

// Rows of a comb of C from a tile whose corner is (m0, n0), by a warp. Each row begins S elements behind a 16-byte
// boundary. Vector u has the tile's columns from 8 u - S.
template <int S>
struct CombStore {
  u32 tile;
  int comb, lane, cols;  // columns of the tile that C has
  u16* corner;           // of the tile's row `comb`
  long long apart;       // elements from a row of the comb to the next
  int rows;              // of the comb that C has

  // The unit `u` of row `row` of the tile. A unit outside is never stored: it may be any.
  __device__ __forceinline__ void load_unit(int row, int u, u32 (&unit)[4]) const {
    const int at = u < 0 ? 0 : u < BN / UNIT ? u : BN / UNIT - 1;
    load_shared(unit_address(tile + at / 8 * TILE_BLOCK_BYTES, comb * A_COMB + row, at % 8), unit);
  }
  __device__ __forceinline__ void load(int row, int u, u32 (&vector)[4]) const {
    u32 low[4], high[4];
    load_unit(row, u, high);
    if constexpr (S == 0) {
      eight_from<8>(high, high, vector);
    } else {
      load_unit(row, u - 1, low);
      eight_from<8 - S>(low, high, vector);
    }
  }

  // Vectors that lie in the tile and in C.
  __device__ __forceinline__ void store_whole() const {
    constexpr int MOST = BN / UNIT, FIRST = S > 0;
    const int behind = (cols + S) / UNIT;
#pragma unroll 2
    for (int i = lane; i < A_COMB * MOST; i += 32) {
      const int row = i / MOST, u = FIRST + i % MOST;
      u32 vector[4];
      load(row, u, vector);
      if (row < rows && u < behind) store_vector<4>(corner + row * apart + u * UNIT - S, vector);
    }
  }

  // The first and the last vector of each row, of which some elements are another tile's.
  __device__ __forceinline__ void store_ends() const {
    const int behind = (cols + S) / UNIT, left = (cols + S) % UNIT;
    for (int i = lane; i < 2 * A_COMB; i += 32) {
      const int row = i / 2, u = i % 2 ? behind : 0;
      const int from = u == 0 ? S : 0, to = u == behind ? left : UNIT;
      const bool here = row < rows && (i % 2 == 0 ? S > 0 : behind > 0 || S == 0);
      u32 vector[4];
      load(row, u, vector);
#pragma unroll
      for (int e = 0; e < UNIT; ++e)
        if (here && from <= e && e < to)
          corner[row * apart + u * UNIT - S + e] = static_cast<u16>(vector[e / 2] >> 16 * (e % 2));
    }
  }
};

template <int S>
__device__ __forceinline__ void store_comb(Shift<S>, u32 tile, int comb, int lane, int cols, u16* corner, long long apart,
                                           int rows) {
  const CombStore<S> store{tile, comb, lane, cols, corner, apart, rows};
  store.store_whole();
  store.store_ends();
}

// The combs of a warp, from `first`, of a tile whose corner is (m0, n0) of C.
__device__ __forceinline__ void store_combs(u16* c, u32 tile, int first, int lane, int m0, int n0, int m, int n) {
#pragma unroll 1
  for (int comb = first; comb < first + OWN_COMBS; ++comb) {
    const int row = m0 + comb, rows = (m - row + COMBS - 1) / COMBS, cols = n - n0 < BN ? n - n0 : BN;
    u16* const corner = c + static_cast<u64>(row) * n + n0;
    with_shift(comb_shift(n, comb), [&](auto shift) {
      store_comb(shift, tile, comb, lane, cols, corner, static_cast<long long>(COMBS) * n, rows);
    });
  }
}
