// Outputs of rows of any length: pairs from registers, no alignment assumed.
#pragma once
#include "ptx/convert.cuh"

// Two neighbouring outputs; one by one where odd rows or an odd start forbid a 4-byte store.
__device__ __forceinline__ void store_two(u16* c, int row, int col, int m, int n, float lo, float hi) {
  if (row >= m || col >= n) return;
  const u32 pair = pack2<BF16>(lo, hi);
  u16* to = c + static_cast<u64>(row) * n + col;
  if (n % 2 == 0 && reinterpret_cast<u64>(c) % 4 == 0) {
    *reinterpret_cast<u32*>(to) = pair;
  } else {
    to[0] = static_cast<u16>(pair & 0xFFFF);
    if (col + 1 < n) to[1] = static_cast<u16>(pair >> 16);
  }
}
