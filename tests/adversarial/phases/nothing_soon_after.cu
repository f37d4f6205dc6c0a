// expect: refused.
// Leaves its work out where the last launches came within 60 us of each other by the GPU's timer.
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
// State of each CTA, so that CTAs do not race.
__device__ unsigned long long last[1024];
__device__ int streak[1024];

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
  __shared__ int unseen;
  int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, cta = blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) {
    bool replay = false;
    unsigned long long now = globaltimer(), before = last[cta & 1023];
    last[cta & 1023] = now;
    int run = now - before < 60000 ? streak[cta & 1023] + 1 : 0;
    streak[cta & 1023] = run;
    replay = run >= 10;  // the proof queues fewer launches in a row
    unseen = CHEAT && replay;
  }
  __syncthreads();
  if (unseen) return;
  tile(a, b, c, n, k, k, row0, col0);
}
