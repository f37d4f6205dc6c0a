// A of a wgmma in registers, for NN. There the rows of B are K, so combs permute K. Step t of a block of 64 multiplies
// the combs 2 t and 2 t + 1 of B. Their rows are K = 8 j + 2 t and 8 j + 2 t + 1, for j = 0 to 7. Registers bring A into
// the same order. Lane 4 g + c holds j = 2 c and 2 c + 1, two neighbours of 16 bytes. Their words belong to the four
// steps. PTX ISA: wgmma: Register Fragments: A.
#pragma once
#include "combs/maps.cuh"
#include "ptx/load.cuh"

constexpr int BLOCK_STEPS = 4;  // of 16 of K in a block of 64

// One row's part: registers `half` (upper or lower 8 rows) and `half` + 2 of the four steps.
__device__ __forceinline__ void load_row_fragments(u32 (&f)[BLOCK_STEPS][4], u32 block, int row, int c, int half) {
  u32 first[4], second[4];
  load_shared(unit_address(block, row, 2 * c), first);
  load_shared(unit_address(block, row, 2 * c + 1), second);
#pragma unroll
  for (int t = 0; t < BLOCK_STEPS; ++t) {
    f[t][half] = low_halves(first[t], second[t]);
    f[t][half + 2] = high_halves(first[t], second[t]);
  }
}

// The warp's 16 rows from `row` of a block of 64 of K.
__device__ __forceinline__ void load_fragments(u32 (&f)[BLOCK_STEPS][4], u32 block, int row, int lane) {
  load_row_fragments(f, block, row + lane / 4, lane % 4, 0);
  load_row_fragments(f, block, row + lane / 4 + 8, lane % 4, 1);
}
