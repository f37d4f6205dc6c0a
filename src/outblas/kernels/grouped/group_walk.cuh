// The tiles of all groups in one order, for a persistent grid. Where groups end is known on the device alone.
//
// The table in shared memory has the groups that are not empty: ends of their tiles, and their group, begin and end.
// Ends that run backwards or past the last row are clamped, so that no row is read or written twice or outside.
#pragma once
#include "ptx/types.cuh"
#include "scheduler/raster.cuh"
#include "warp_scan.cuh"

struct GroupTile {
  int group, begin, end;  // first row of A of the tile; end of the group's rows
  int row;                // first row of W of this CTA's tile
};

// Fields of the table, one array of `groups` integers each, behind the number of groups that are not empty.
enum { TILE_END = 0, GROUP_ID = 1, GROUP_BEGIN = 2, GROUP_END = 3 };
__device__ __forceinline__ int table_place(int field, int groups, int index) { return 1 + field * groups + index; }

// One warp fills the table. `ends`: the groups' ends, of which each group begins at the one before. A lane has EACH groups
// that follow one another. Their loads are in flight together, and a round of scans is enough for 32 * EACH groups.
template <int TILE, int EACH>
__device__ __forceinline__ void fill_group_table(int* table, const int* ends, int groups, int rows, int lane) {
  int last_end = 0, tiles_before = 0, filled = 0;
  for (int base = 0; base < groups; base += 32 * EACH) {
    const int first = base + lane * EACH;
    int end[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) end[i] = first + i < groups ? ends[first + i] : 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      end[i] = end[i] < rows ? end[i] : rows;
      if (i && end[i] < end[i - 1]) end[i] = end[i - 1];
    }
    const int before = __shfl_up_sync(0xFFFFFFFF, scan_max(end[EACH - 1], lane), 1);
    const int begin = lane && before > last_end ? before : last_end;
    int tiles[EACH], all = 0, some = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      end[i] = end[i] > begin ? end[i] : begin;
      tiles[i] = (end[i] - (i ? end[i - 1] : begin) + TILE - 1) / TILE;
      all += tiles[i], some += tiles[i] > 0;
    }
    int tile_end = tiles_before + scan_sum(all, lane) - all, place = filled + scan_sum(some, lane) - some;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      tile_end += tiles[i];
      if (tiles[i] > 0) {
        table[table_place(TILE_END, groups, place)] = tile_end;
        table[table_place(GROUP_ID, groups, place)] = first + i;
        table[table_place(GROUP_BEGIN, groups, place)] = i ? end[i - 1] : begin;
        table[table_place(GROUP_END, groups, place)] = end[i];
        ++place;
      }
    }
    filled = __shfl_sync(0xFFFFFFFF, place, 31);
    last_end = __shfl_sync(0xFFFFFFFF, end[EACH - 1], 31);
    tiles_before = __shfl_sync(0xFFFFFFFF, tile_end, 31);
  }
  if (lane == 0) table[0] = filled;
}

template <int TILE>
__device__ __forceinline__ void make_group_table(int* table, const int* ends, int groups, int rows, int lane) {
  if (groups <= 32)
    fill_group_table<TILE, 1>(table, ends, groups, rows, lane);
  else
    fill_group_table<TILE, 8>(table, ends, groups, rows, lane);
}

// A warp's walk over the tiles of its cluster. All lanes of the warp call `next` together.
struct GroupWalk {
  const int* table;
  int groups, filled, row_tiles, tile, step, rank, lane;
  int place;  // of the tile's group in the table

  __device__ __forceinline__ GroupWalk(const int* table, int groups, int row_tiles, int first, int step, int rank, int lane)
      : table(table), groups(groups), filled(table[0]), row_tiles(row_tiles), tile(first - step), step(step), rank(rank),
        lane(lane), place(0) {}

  __device__ __forceinline__ bool has_next() const {
    return filled && tile + step < table[table_place(TILE_END, groups, filled - 1)] * row_tiles;
  }

  // The next tile; false behind the last one.
  __device__ __forceinline__ bool next(GroupTile& at) {
    tile += step;
    for (;;) {  // 32 groups at a time
      const int probe = place + lane;
      const bool ends_before = probe < filled && table[table_place(TILE_END, groups, probe)] * row_tiles <= tile;
      const u32 before = __ballot_sync(0xFFFFFFFF, ends_before);
      place += __popc(before);
      if (before != 0xFFFFFFFF) break;
    }
    if (place >= filled) return false;
    const int first = place ? table[table_place(TILE_END, groups, place - 1)] : 0;
    const int tiles = table[table_place(TILE_END, groups, place)] - first;
    const TileCoord t = raster_tile<true, GROUP>(tile - first * row_tiles, tiles, row_tiles);
    at.group = table[table_place(GROUP_ID, groups, place)];
    at.begin = table[table_place(GROUP_BEGIN, groups, place)] + t.m * BN;
    at.end = table[table_place(GROUP_END, groups, place)];
    at.row = (t.n * CLUSTER + rank) * ROWS;
    return true;
  }
};
