// The epilogue: sums to a tile in shared memory, in blocks of 64 columns, and from there to rows of C.
//
// The rows of the sums are those of A in shared memory, which lie comb after comb. For TN the columns are rows of B, and
// lie comb after comb, too. Then a lane holds eight neighbours of a row of C: one of each comb. A row of C begins
// anywhere, so a vector of C is made of two units of the tile.
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

// Rows of C from a tile whose corner is (m0, n0), by a warpgroup. A row begins `shift` elements behind a 16-byte boundary,
// and its vector u has the tile's columns from 8 u - shift.
struct CombStore {
  u16* c;
  u32 tile;
  int m0, n0, m, n;

  struct Row {
    int at, shift;  // row of the tile
    bool inside;    // of C
    u16* first;     // its element in the tile's first column
  };
  __device__ __forceinline__ Row row_of(int at) const {
    const int comb = at / (A_ROWS / COMBS), row = m0 + at % (A_ROWS / COMBS) * COMBS + comb;
    return {at, comb_shift(n, comb), row < m, c + static_cast<long long>(row) * n + n0};
  }
  __device__ __forceinline__ int columns() const { return n - n0 < BN ? n - n0 : BN; }

  // A vector of a row. Elements of it outside the tile may be any.
  __device__ __forceinline__ void load(const Row& row, int u, u32 (&vector)[4]) const {
    u32 words[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = u + i - (row.shift != 0), unit = from < 0 ? 0 : from < BN / UNIT ? from : BN / UNIT - 1;
      u32 loaded[4];
      load_shared(unit_address(tile + unit / 8 * TILE_BLOCK_BYTES, row.at, unit % 8), loaded);
#pragma unroll
      for (int word = 0; word < 4; ++word) words[4 * i + word] = loaded[word];
    }
    shifted(words, -row.shift & 7, vector);
  }

  // Vectors that lie in the tile and in C, of `rows` rows of the tile from `from`.
  __device__ __forceinline__ void store_whole(int from, int rows, int thread) const {
    constexpr int MOST = BN / UNIT;
#pragma unroll 2
    for (int i = thread; i < rows * MOST; i += 128) {
      const Row row = row_of(from + i / MOST);
      const int u = i % MOST, col = u * UNIT - row.shift;
      u32 vector[4];
      load(row, u, vector);
      if (row.inside && col >= 0 && col + UNIT <= columns()) store_vector<4>(row.first + col, vector);
    }
  }

  // The first and the last vector of each row, of which some elements are another tile's.
  __device__ __forceinline__ void store_ends(int from, int rows, int thread) const {
    for (int i = thread; i < 2 * rows; i += 128) {
      const Row row = row_of(from + i / 2);
      const int last = (columns() + row.shift) / UNIT, u = i % 2 ? last : 0;
      const int begin = u == 0 ? row.shift : 0, end = u == last ? (columns() + row.shift) % UNIT : UNIT;
      const bool own = i % 2 ? last > 0 || row.shift == 0 : row.shift != 0;
      u32 vector[4];
      load(row, u, vector);
#pragma unroll
      for (int e = 0; e < UNIT; ++e)
        if (row.inside && own && begin <= e && e < end)
          row.first[u * UNIT - row.shift + e] = static_cast<u16>(vector[e / 2] >> 16 * (e % 2));
    }
  }
};
