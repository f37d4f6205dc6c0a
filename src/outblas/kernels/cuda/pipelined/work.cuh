// The tiles of a CTA, and its part of K.
#pragma once
#include "scheduler/raster.cuh"

struct Work {
  int tiles_m, tiles_n;
  int first, step, tiles;  // a CTA computes tiles first, first + step, ... below `tiles`
  TileCoord only;          // the one tile of a CTA that is not persistent
  int part;                // of K
  int k_begin, k_stages;   // in stages of BK

  __device__ __forceinline__ Work(int m, int n, int k) {
    tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    if constexpr (PERSISTENT) {
      first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x), tiles = tiles_m * tiles_n;
      only = {0, 0}, part = 0;
    } else {
      bool inside;
      only = grid_tile<true, GROUP, 1, SPLIT>(tiles_m, tiles_n, inside);
      first = 0, step = 1, tiles = inside ? 1 : 0;
      part = k_part<SPLIT>();
    }
    const int all = (k + BK - 1) / BK;
    const int share = all / SPLIT, extra = all % SPLIT;
    k_begin = part * share + (part < extra ? part : extra);
    k_stages = share + (part < extra ? 1 : 0);
  }
  // Row and column of tile `index`, in elements.
  __device__ __forceinline__ TileCoord origin(int index) const {
    const TileCoord t = PERSISTENT ? raster_tile<true, GROUP>(index, tiles_m, tiles_n) : only;
    return {t.m * BM, t.n * BN};
  }
  // Number of the only tile among all.
  __device__ __forceinline__ int number() const { return only.m * tiles_n + only.n; }
};

// A stage of the sequence that a CTA works off: all stages of its first tile, then those of the next.
struct Position {
  int tile, stage;
  TileCoord at;

  __device__ __forceinline__ explicit Position(const Work& work) : tile(work.first), stage(0), at(work.origin(tile)) {}
  __device__ __forceinline__ bool exists(const Work& work) const {
    return PERSISTENT ? tile < work.tiles : stage < work.k_stages;
  }
  __device__ __forceinline__ void next(const Work& work) {
    ++stage;
    if (PERSISTENT && stage == work.k_stages) {
      stage = 0, tile += work.step;
      if (tile < work.tiles) at = work.origin(tile);
    }
  }
};
