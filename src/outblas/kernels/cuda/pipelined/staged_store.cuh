// Sums of a warp to C, 16 rows at a time through the warp's own slab of shared memory: whole lines, 16 bytes a lane.
// Rows of C that are no multiple of 16 bytes are stored in pairs of elements, or one by one.
#pragma once
#include "pipelined/warp_tile.cuh"

using Slab = Panels<16, WARP_N>;

// The slab to rows from `row0` and columns from `col0` on, one Word a lane.
template <class Word>
__device__ __forceinline__ void copy_slab(u16* c, const unsigned char* slab, int row0, int col0, int m, int n,
                                          int lane) {
  constexpr int WIDTH = sizeof(Word) / ELEM, PER_ROW = WARP_N / WIDTH;
  constexpr int UNROLL = WIDTH == 8 ? 16 * PER_ROW / 32 : 1;
#pragma unroll UNROLL
  for (int i = lane; i < 16 * PER_ROW; i += 32) {
    const int row = i / PER_ROW, col = i % PER_ROW * WIDTH;
    if (row0 + row >= m || col0 + col >= n) continue;
    *reinterpret_cast<Word*>(c + static_cast<u64>(row0 + row) * n + col0 + col) =
        *reinterpret_cast<const Word*>(slab + Slab::offset(row, col / 8) + col % 8 * ELEM);
  }
}

struct StagedStore {
  u16* c;
  unsigned char* slab;  // of this warp
  int row0, col0, m, n, lane;
#if FUSED
  const Fused& fused;
#endif

  // Block row `i` of the warp. The lane has two columns each of rows lane / 4 and lane / 4 + 8 of a block.
  __device__ __forceinline__ void operator()(int i, float (&sums)[NT][4]) const {
#if FUSED
    fuse(i, sums);
    if constexpr (FUSED_GATED) return;  // fuse has already stored
#endif
    __syncwarp();  // the rows before have been read
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<u32*>(slab + Slab::offset(lane / 4 + 8 * half, j) + lane % 4 * 4) =
            pack2<BF16>(sums[j][2 * half], sums[j][2 * half + 1]);
    __syncwarp();
    const u64 start = reinterpret_cast<u64>(c);
    if (n % 8 == 0 && start % 16 == 0)
      copy_slab<uint4>(c, slab, row0 + 16 * i, col0, m, n, lane);
    else if (n % 2 == 0 && start % 4 == 0)
      copy_slab<u32>(c, slab, row0 + 16 * i, col0, m, n, lane);
    else
      copy_slab<u16>(c, slab, row0 + 16 * i, col0, m, n, lane);
  }

#if FUSED
  // The whole epilogue in place, FUSED_GATED: and its store.
  __device__ __forceinline__ void fuse(int i, float (&sums)[NT][4]) const {
    const int row = row0 + 16 * i + lane / 4, col = col0 + 2 * (lane % 4);
    const Lane at(fused, row, 8, col, m, n);
#pragma unroll
    for (int first = 0; first < NT; first += FUSED_BATCH) {
      Extras extras[FUSED_BATCH];
#pragma unroll
      for (int j = first; j < first + FUSED_BATCH && j < NT; ++j) extras[j - first] = at.load<false>(8 * j);
#pragma unroll
      for (int j = first; j < first + FUSED_BATCH && j < NT; ++j) {
        auto& v = sums[j];
        if constexpr (FUSED_GATED) {
          store_gated(extras[j - first], c, row, col + 8 * j, m, n, v[0], v[1]);
          store_gated(extras[j - first], c, row + 8, col + 8 * j, m, n, v[2], v[3]);
        } else {
          apply(extras[j - first], 0, v[0], v[1]);
          apply(extras[j - first], 1, v[2], v[3]);
        }
      }
    }
  }
#endif
};
