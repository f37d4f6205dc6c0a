// The tile order: `GROUP` tiles of one extent at a time, so that concurrent CTAs share rows and columns of the operands
// in L2.
#pragma once

struct TileCoord {
  int m, n;
};

// a / b for 0 <= a < 2^22 and b > 0, by a reciprocal and a correction.
// It takes a third of the instructions of an integer division, which every warp would execute twice per tile.
__device__ __forceinline__ int small_quotient(int a, int b) {
  int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int rest = a - q * b;
  if (rest < 0) --q;
  if (rest >= b) ++q;
  return q;
}

// Tile `index` (below 2^22) of a tiles_m x tiles_n grid. RASTER_M: within a group of GROUP tile rows walk along
// m first, then n; otherwise the same with m and n exchanged.
template <bool RASTER_M, int GROUP>
__device__ __forceinline__ TileCoord raster_tile(int index, int tiles_m, int tiles_n) {
  const int inner = RASTER_M ? tiles_m : tiles_n;
  const int outer = RASTER_M ? tiles_n : tiles_m;
  const int band = small_quotient(index, GROUP * outer);
  const int in_band = index - band * GROUP * outer;
  const int left = inner - band * GROUP;
  const int width = left < GROUP ? left : GROUP;
  const int o = small_quotient(in_band, width);
  const int i = band * GROUP + (in_band - o * width);
  return RASTER_M ? TileCoord{i, o} : TileCoord{o, i};
}

// The same order for one tile per CTA, without a division. The launcher makes the grid (CLUSTER * width, outer, bands).
// Here width = min(GROUP, inner), and the hardware walks x, y, z. `inside` is false for the CTAs that pad the last
// band. With PARTS > 1, every band occurs once per part of K (k_part), one after the other.
template <bool RASTER_M, int GROUP, int CLUSTER, int PARTS = 1>
__device__ __forceinline__ TileCoord grid_tile(int tiles_m, int tiles_n, bool& inside) {
  const int i = static_cast<int>(blockIdx.z) / PARTS * GROUP + static_cast<int>(blockIdx.x) / CLUSTER;
  const int o = static_cast<int>(blockIdx.y);
  inside = i < (RASTER_M ? tiles_m : tiles_n);
  return RASTER_M ? TileCoord{i, o} : TileCoord{o, i};
}

// The part of K of a CTA in such a grid.
// Concurrent CTAs work on the same part of different tiles, so they share rows and columns of the operands in L2. CTAs
// of different parts share nothing.
template <int PARTS>
__device__ __forceinline__ int k_part() {
  return static_cast<int>(blockIdx.z) % PARTS;
}
