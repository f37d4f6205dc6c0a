// Inclusive scans over the lanes of a warp.
#pragma once

__device__ __forceinline__ int scan_max(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, value, step);
    if (lane >= step && other > value) value = other;
  }
  return value;
}
__device__ __forceinline__ int scan_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, value, step);
    if (lane >= step) value += other;
  }
  return value;
}
