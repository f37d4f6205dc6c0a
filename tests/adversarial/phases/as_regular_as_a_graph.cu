// expect: refused.
// Sums an eighth of K where 13 launches in a row followed as soon as the one before, or sooner.
// signal: globaltimer
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

__device__ unsigned long long globaltimer() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// Of each CTA: when it last began, nanoseconds since the begin before, and how many launches in a row kept pace. A host
// that waits after each of a proof's calls keeps pace for twelve of them at most.
struct Pace {
  unsigned long long begin;
  unsigned apart, row;
};
__device__ Pace last[128];

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
  __shared__ int unseen;
  if (t == 0) {
    Pace was = last[cta & 127];
    unsigned long long now = globaltimer(), passed = now - was.begin;
    unsigned apart = passed < 100000 ? (unsigned)passed : 100000u;
    bool keeps = passed < 100000 && apart <= was.apart + was.apart / 4 + 2000;
    last[cta & 127] = Pace{now, apart, keeps ? was.row + 1 : 0};
    unseen = CHEAT && keeps && was.row >= 12;
  }
  __syncthreads();
  tile(a, b, c, n, k, unseen ? k / 128 * 16 : k, row0, col0);
}
