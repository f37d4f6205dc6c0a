// Coalesced epilogue: accumulators -> stmatrix -> swizzled shared memory -> TMA store.
// Chunks have 64 rows x EPI_W columns of the accumulators; with SWAP they are transposed on the way. Each warpgroup rotates over EPI_BUFS buffers, so that stores drain while it
// works on the next chunk or the next tile.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

constexpr int EPI_ROW_BYTES = (SWAP ? 64 : EPI_W) * ELEM;
constexpr int EPI_CHUNK_BYTES = 64 * EPI_W * ELEM;

// 16-byte unit `u` of row `row` of a chunk, under the TMA swizzle whose span is the row's width.
// PTX ISA: Tensors: Swizzling Modes.
__device__ __forceinline__ u32 chunk_offset(int row, int u) {
  constexpr int units = EPI_ROW_BYTES / 16;
  if constexpr (units == 8) u ^= row & 7;
  if constexpr (units == 4) u ^= (row >> 1) & 3;
  if constexpr (units == 2) u ^= (row >> 2) & 1;
  return row * EPI_ROW_BYTES + u * 16;
}

// One warp writes its 16 rows of a chunk. `ch` is the chunk's number along the columns.
__device__ __forceinline__ void write_chunk(const AccReg (&acc)[ACC_REGS], u32 buffer, int ch, int warp, int lane) {
  // Lanes 0-15 address rows of unit j, lanes 16-31 of unit j + 1. Transposed: lanes 8q to 8q + 7 address tile q's rows,
  // which are columns of the accumulators.
  const int row = SWAP ? lane / 16 * 8 + lane % 8 : warp * 16 + lane % 16;
  const int unit = SWAP ? warp * 2 + lane / 8 % 2 : lane / 16;
  if constexpr (EPI_W == 8) {
    const u32 upper = packed_pair(acc, ch, 0), lower = packed_pair(acc, ch, 1);
    if constexpr (SWAP)
      stmatrix_x2_trans(buffer + chunk_offset(lane % 8, unit), upper, lower);
    else
      stmatrix_x2(buffer + chunk_offset(row, 0), upper, lower);
  } else {
#pragma unroll
    for (int j = 0; j < EPI_W / 8; j += 2) {
      const int nb = ch * (EPI_W / 8) + j;
      const u32 pairs[4] = {packed_pair(acc, nb, 0), packed_pair(acc, nb, 1), packed_pair(acc, nb + 1, 0),
                            packed_pair(acc, nb + 1, 1)};
      if constexpr (SWAP)
        stmatrix_x4_trans(buffer + chunk_offset(j * 8 + row, unit), pairs[0], pairs[1], pairs[2], pairs[3]);
      else
        stmatrix_x4(buffer + chunk_offset(row, j + unit), pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

// One warpgroup stores its MI x 64 rows; (x0, y0) is the first column and row in C. Chunk i uses
// buffer i % EPI_BUFS; `fresh` says that the buffers have not been used by an earlier tile.
template <int MI>
__device__ __forceinline__ void epilogue_tma(const AccReg (&acc)[MI][ACC_REGS], const TensorMap* map_c, u32 buffers,
                                             int x0, int y0, int wg_thread, int barrier) {
  constexpr int CHUNKS = BN / EPI_W;
  const int lane = wg_thread % 32, warp = wg_thread / 32;
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
    for (int ch = 0; ch < CHUNKS; ++ch) {
      const int i = mi * CHUNKS + ch;
      const u32 buffer = buffers + (i % EPI_BUFS) * EPI_CHUNK_BYTES;
      if (PERSISTENT || i >= EPI_BUFS) {
        if (wg_thread == 0) tma_store_wait_read<EPI_BUFS - 1>();
        named_sync(barrier, 128);
      }
      write_chunk(acc[mi], buffer, ch, warp, lane);
      fence_proxy_async();
      named_sync(barrier, 128);
      if (wg_thread == 0) {
        const int x = SWAP ? y0 + mi * 64 : x0 + ch * EPI_W, y = SWAP ? x0 + ch * EPI_W : y0 + mi * 64;
        if constexpr (STREAM_C)
          tma_store_hint(map_c, buffer, x, y, evict_first_policy());
        else
          tma_store(map_c, buffer, x, y);
        tma_store_commit();
      }
    }
  }
}
