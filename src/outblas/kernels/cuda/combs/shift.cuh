// Elements of a row that lie across 16-byte units.
#pragma once
#include "ptx/permute.cuh"

// WORDS words from element `shift`, 0 to 7, of `from`. A shift is a thread's own, so each of its bits selects.
template <int WORDS>
__device__ __forceinline__ void shifted(const u32 (&from)[WORDS + 4], int shift, u32 (&words)[WORDS]) {
  u32 by_four[WORDS + 2], by_two[WORDS + 1];
#pragma unroll
  for (int i = 0; i < WORDS + 2; ++i) by_four[i] = shift & 4 ? from[i + 2] : from[i];
#pragma unroll
  for (int i = 0; i < WORDS + 1; ++i) by_two[i] = shift & 2 ? by_four[i + 1] : by_four[i];
  const u32 selector = shift & 1 ? 0x5432 : 0x3210;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = permute_bytes(by_two[i], by_two[i + 1], selector);
}
