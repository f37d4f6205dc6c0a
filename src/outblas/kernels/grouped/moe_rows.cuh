// The rows of a mixture of experts: sort them by expert, gather the tokens, and combine the experts' results.
//
// A kernel of the layer starts while the one before ends, and waits for it before it reads anything.
// EXPERT, SCORE: types of the router's choice and of its weights. BF16: dtype of tokens and results.
#pragma once
#include "ptx/sync.cuh"
#include "ptx/types.cuh"
#include "warp_scan.cuh"

constexpr int VECTOR = 8;  // elements of 16 bytes

struct alignas(16) Vector {
  u16 element[VECTOR];
};

__device__ __forceinline__ float half_to_float(u16 bits, bool is_bf16) {
  float value;
  if (is_bf16) return __uint_as_float(static_cast<u32>(bits) << 16);
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  if constexpr (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ float score_of(const float* scores, u64 place) { return scores[place]; }
__device__ __forceinline__ float score_of(const u16* scores, u64 place) { return half_to_float(scores[place], SCORE_BF16); }

// Adds one for each lane with a key of 0 or more; returns the lane's own place. Lanes of equal keys share an atomic.
__device__ __forceinline__ int take_place(int* counts, int key, int lane) {
  const u32 same = __match_any_sync(0xFFFFFFFF, key);
  const int leader = __ffs(same) - 1;
  int first = 0;
  if (lane == leader && key >= 0) first = atomicAdd(&counts[key], __popc(same));
  return __shfl_sync(0xFFFFFFFF, first, leader) + __popc(same & ((1u << lane) - 1));
}

// One CTA of 1024 threads. `ends`: where each expert's rows end. `tokens`: the token of each row; 0 behind the last end.
// `places`: the row of each choice; -1 where the expert is no group. Which row of its group a choice gets may change from
// run to run, and no result depends on it.
extern "C" __global__ void __launch_bounds__(1024) moe_route(
    const EXPERT* experts, int choices, int top, int groups, int* ends, int* tokens, int* places) {
  extern __shared__ int counts[];
  pdl_launch_dependents();
  const int thread = threadIdx.x, lane = thread % 32;
  for (int group = thread; group < groups; group += 1024) counts[group] = 0;
  __syncthreads();
  const int padded = (choices + 1023) / 1024 * 1024;  // whole warps take part
  for (int i = thread; i < padded; i += 1024) {
    const long long expert = i < choices ? static_cast<long long>(experts[i]) : -1;
    take_place(counts, expert >= 0 && expert < groups ? static_cast<int>(expert) : -1, lane);
  }
  __syncthreads();
  if (thread < 32) {
    int before = 0;
    for (int base = 0; base < groups; base += 32) {
      const int group = base + lane, count = group < groups ? counts[group] : 0;
      const int end = before + scan_sum(count, lane);
      if (group < groups) {
        counts[group] = end - count;
        ends[group] = end;
      }
      before = __shfl_sync(0xFFFFFFFF, end, 31);
    }
    for (int row = before + lane; row < choices; row += 32) tokens[row] = 0;
  }
  __syncthreads();
  for (int i = thread; i < padded; i += 1024) {
    const long long expert = i < choices ? static_cast<long long>(experts[i]) : -1;
    const bool is_group = expert >= 0 && expert < groups;
    const int row = take_place(counts, is_group ? static_cast<int>(expert) : -1, lane);
    if (i < choices) places[i] = is_group ? row : -1;
    if (is_group) tokens[row] = i / top;
  }
}

// One CTA for each row: rows[r] = x[tokens[r]].
extern "C" __global__ void moe_gather(const Vector* x, const int* tokens, int vectors, Vector* rows) {
  pdl_launch_dependents();
  pdl_wait();
  const u64 to = static_cast<u64>(blockIdx.x) * vectors, from = static_cast<u64>(tokens[blockIdx.x]) * vectors;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) rows[to + i] = x[from + i];
}

// out[t] = sum over j of scores[t, j] * y[places[t, j]], in fp32. blockIdx.x: the token, blockIdx.y: its columns.
extern "C" __global__ void moe_combine(
    const Vector* y, const int* places, const SCORE* scores, int top, int vectors, Vector* out) {
  pdl_wait();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= vectors) return;
  float sums[VECTOR] = {};
  for (int j = 0; j < top; ++j) {
    const u64 choice = static_cast<u64>(blockIdx.x) * top + j;
    const int row = places[choice];
    if (row < 0) continue;
    const float score = score_of(scores, choice);
    const Vector value = y[static_cast<u64>(row) * vectors + column];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[i] += score * half_to_float(value.element[i], BF16);
  }
  Vector result;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) result.element[i] = float_to_half(sums[i]);
  out[static_cast<u64>(blockIdx.x) * vectors + column] = result;
}
