// Tiles in shared memory as panels of at most 64 columns, in which ldmatrix and 16-byte accesses have no bank conflict.
//
// A panel has UNITS units of 16 bytes per row: 8, 4 or 2, the largest that divides the tile's columns. So any multiple
// of 16 columns is served. Panels follow each other, and the rows of a panel are contiguous. Within a row the unit is
// XORed with bits of the row number. Units of equal number in eight successive rows are one phase of ldmatrix. They then
// lie in 32 different banks.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

constexpr int THREADS = 32 * WM * WN;  // of a CTA, which loads its tiles together

template <int ROWS, int COLS>
struct Panels {
  static_assert(COLS % 16 == 0 && ROWS % 16 == 0, "whole blocks of ldmatrix");
  static constexpr int UNITS = COLS % 64 == 0 ? 8 : COLS % 32 == 0 ? 4 : 2;
  static constexpr int ROW_BYTES = UNITS * 16;
  static constexpr int BYTES = ROWS * COLS * ELEM;
  // Copies of VEC elements: of a panel's row, and rows between two copies of a thread.
  static constexpr int PER_ROW = UNITS * 8 / VEC;
  static constexpr int ROWS_APART = THREADS / PER_ROW;

  // Byte offset of unit `unit` (8 columns) of row `row`. 16 rows further it is 16 ROW_BYTES more.
  static __device__ __forceinline__ u32 offset(int row, int unit) {
    const int swizzled = unit % UNITS ^ row / (8 / UNITS) % UNITS;
    return ((unit / UNITS * ROWS + row) * UNITS + swizzled) * 16;
  }

  // The tile from global memory, by all threads of the CTA. `from` is its first element, in rows of `stride` elements.
  // Elements from row `rows` or column `cols` on are outside of the matrix: they become zeros, and nothing is read.
  static __device__ __forceinline__ void load(u32 smem, const u16* from, int stride, int rows, int cols) {
    if constexpr (VEC == 8 && COLS == UNITS * 8)
      load_panel(smem, from, stride, rows, cols);
    else if constexpr (VEC == 8 && ROWS % ROWS_APART == 0)
      load_panels(smem, from, stride, rows, cols);
    else if constexpr (VEC == 1)
      load_elements(smem, from, stride, rows, cols);
    else
      load_in_turn(smem, from, stride, rows, cols);
  }

 private:
  // Addresses in the next two are carried from copy to copy. Computed from the row, all would be kept in registers.
  //
  // One panel: all copies of a thread are in one column.
  static __device__ __forceinline__ void load_panel(u32 smem, const u16* from, int stride, int rows, int cols) {
    constexpr int COPIES = (ROWS + ROWS_APART - 1) / ROWS_APART, UNROLL = COPIES <= 8 ? COPIES : 4;
    const int row = static_cast<int>(threadIdx.x) / PER_ROW, col = static_cast<int>(threadIdx.x) % PER_ROW * VEC;
    const int inside = col < cols ? rows - row : 0;
    const u16* source = from + (static_cast<long long>(row) * stride + col);
#pragma unroll UNROLL
    for (int i = 0; i < COPIES; ++i) {
      if (ROWS % ROWS_APART != 0 && row + i * ROWS_APART >= ROWS) break;
      copy(smem, row + i * ROWS_APART, col, source, i * ROWS_APART < inside);
      source += static_cast<long long>(ROWS_APART) * stride;
    }
  }
  // All copies of a thread are in the same rows of each panel.
  static __device__ __forceinline__ void load_panels(u32 smem, const u16* from, int stride, int rows, int cols) {
    const int row = static_cast<int>(threadIdx.x) / PER_ROW, col = static_cast<int>(threadIdx.x) % PER_ROW * VEC;
    const u16* source = from + (static_cast<long long>(row) * stride + col);
#pragma unroll
    for (int down = 0; down < ROWS; down += ROWS_APART) {
#pragma unroll
      for (int right = 0; right < COLS; right += UNITS * 8)
        copy(smem, row + down, col + right, source + right, row + down < rows && col + right < cols);
      source += static_cast<long long>(ROWS_APART) * stride;
    }
  }
  // Any shape and any VEC above 1.
  static __device__ __forceinline__ void load_in_turn(u32 smem, const u16* from, int stride, int rows, int cols) {
    constexpr int TOTAL = ROWS * COLS / VEC, COPIES = (TOTAL + THREADS - 1) / THREADS;
    constexpr int UNROLL = COPIES <= 4 ? COPIES : 2;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < TOTAL; i += THREADS) {
      const int row = i / PER_ROW % ROWS, col = i / (PER_ROW * ROWS) * UNITS * 8 + i % PER_ROW * VEC;
      copy(smem, row, col, from + (static_cast<long long>(row) * stride + col), row < rows && col < cols);
    }
  }
  // One by one: as many loads in flight as BATCH, before their values are stored.
  static __device__ __forceinline__ void load_elements(u32 smem, const u16* from, int stride, int rows, int cols) {
    constexpr int TOTAL = ROWS * COLS, BATCH = 4;
#pragma unroll 1
    for (int first = threadIdx.x; first < TOTAL; first += BATCH * THREADS) {
      u16 values[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + j * THREADS, row = i / COLS, col = i % COLS;
        values[j] = row < ROWS && row < rows && col < cols ? from[static_cast<long long>(row) * stride + col] : u16{0};
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int i = first + j * THREADS, row = i / COLS, col = i % COLS;
        if (row < ROWS) store_shared(smem + offset(row, col / 8) + col % 8 * ELEM, values[j]);
      }
    }
  }
  static __device__ __forceinline__ void copy(u32 smem, int row, int col, const u16* source, bool valid) {
    cp_async<VEC * ELEM>(smem + offset(row, col / 8) + col % 8 * ELEM, source, valid);
  }
};
