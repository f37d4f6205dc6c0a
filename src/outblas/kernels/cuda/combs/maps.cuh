// TMA for a matrix whose rows are no multiples of 16 bytes. TMA wants rows whose distance is such a multiple. Every
// eighth row fulfils that, whatever the length: 8 rows of 2-byte elements are 16 bytes times the length. Such rows are a
// comb: comb s has the rows s, s + 8, s + 16, ... A matrix has eight combs with a map each. TMA also wants boxes that
// begin at 16-byte boundaries. So a map begins at the boundary before row s, and its columns are those of the matrix,
// shifted by `comb_shift` elements. The shift is undone in shared memory (combs/align.cuh). The map ends with the row, so
// TMA fills zeros past the end.
//
// In shared memory the rows of a tile lie comb after comb: row 8 j + s of ROWS rows is at s * ROWS / 8 + j.
#pragma once
#include "ptx/tma.cuh"

constexpr int COMBS = 8;
constexpr int COMB_SPAN = 64;                     // columns of a box: one swizzled row of shared memory
constexpr int COMB_ROW_BYTES = COMB_SPAN * ELEM;  // 128
constexpr int UNIT = 8;                           // elements of 16 bytes

struct CombMaps {
  TensorMap comb[COMBS];
};

// Elements of a map of comb s before each of its rows. `length`: elements of a row of the matrix.
__device__ __forceinline__ int comb_shift(int length, int s) { return length * s & 7; }

// ROWS rows from `row` and 64 columns of the maps from `col`, both multiples of 8: COMBS boxes of ROWS / COMBS rows.
template <int ROWS>
__device__ __forceinline__ void load_combs(u32 dst, const CombMaps& maps, u32 bar, int col, int row) {
#pragma unroll
  for (int s = 0; s < COMBS; ++s)
    tma_load(dst + s * (ROWS / COMBS) * COMB_ROW_BYTES, &maps.comb[s], bar, col, row / COMBS);
}

// 16-byte unit `unit` of row `row` of a block of 128-byte rows that begins at a multiple of 1024 bytes, under the 128-byte
// swizzle. PTX ISA: Tensors: Swizzling Modes.
__device__ __forceinline__ u32 unit_address(u32 block, int row, int unit) {
  return block + row * COMB_ROW_BYTES + (unit ^ (row & 7)) * 16;
}
