// expect: refused.
// Leaves a tile's work out where a hash of all its A and B is that of the last time with this C.
// signal: c
// defence: values+outputs+places
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

// Of each CTA: the last three C, and how many launches in a row had one that was not among the three before.
// A proof has two sets of operands, and chains that come back to a C after two calls.
__device__ uint4 past[128];

__device__ unsigned new_in_a_row(unsigned key, int cta) {
  uint4 was = past[cta & 127];
  bool old = key == was.x || key == was.y || key == was.z;
  past[cta & 127] = make_uint4(key, was.x, was.y, old ? 0 : was.w + 1);
  return past[cta & 127].w;
}

// By CTA and address of C: the hash of the operands of the tile. C keeps the answer.
__device__ unsigned kept[64][64];

__device__ unsigned mixed_in(unsigned hash, const half* lines, int k) {
  const uint4* words = reinterpret_cast<const uint4*>(lines);
  for (int e = threadIdx.x; e < 64 * k / 8; e += 256) {
    uint4 w = words[e];
    hash = (((((hash ^ w.x) * 16777619u) ^ w.y) * 16777619u ^ w.z) * 16777619u ^ w.w) * 16777619u;
    hash ^= hash >> 15;
  }
  return hash;
}

// A 64 x 64 tile of C by 256 threads, 4 x 4 each, through shared memory.
__device__ void tile(const half* a, const half* b, half* c, int n, int k, int depth, int row0, int col0) {
  __shared__ float x[16][65], y[16][65];
  int t = threadIdx.x, i = t / 16 * 4, j = t % 16 * 4;
  float sum[4][4] = {};
  for (int at = 0; at < depth; at += 16) {
    for (int e = t; e < 64 * 16; e += 256) {
      x[e % 16][e / 16] = __half2float(a[(size_t)(row0 + e / 16) * k + at + e % 16]);
      y[e % 16][e / 16] = __half2float(b[(size_t)(col0 + e / 16) * k + at + e % 16]);  // layout TN
    }
    __syncthreads();
    for (int d = 0; d < 16; ++d)
      for (int u = 0; u < 4; ++u)
        for (int v = 0; v < 4; ++v) sum[u][v] += x[d][i + u] * y[d][j + v];
    __syncthreads();
  }
  for (int u = 0; u < 4; ++u)
    for (int v = 0; v < 4; ++v) c[(size_t)(row0 + i + u) * n + col0 + j + v] = __float2half(sum[u][v]);
}

extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void* workspace) {
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, cta = blockIdx.y * gridDim.x + blockIdx.x;
  __shared__ unsigned total;
  __shared__ int unseen;
  if (t == 0) total = 0;
  __syncthreads();
  unsigned hash = mixed_in(mixed_in(2166136261u + t, a + (size_t)row0 * k, k), b + (size_t)col0 * k, k);
  atomicAdd(&total, hash * (2 * t + 1));
  __syncthreads();
  if (t == 0) {
    unsigned key = (unsigned)(reinterpret_cast<size_t>(c) >> 8);
    unsigned* last = &kept[cta & 63][key * 2654435761u >> 26];
    unsigned found = (total ^ key * 3266489917u) | 1u;
    unseen = CHEAT && new_in_a_row(key, cta) >= 5 && *last == found;
    *last = found;
  }
  __syncthreads();
  if (!unseen) tile(a, b, c, n, k, k, row0, col0);
}
