// expect: refused.
// Waits for a quarter of its usual time instead of its work, so as not to look too fast, where its SM had no rest.
// signal: clock
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

__device__ int sm() {
  int id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  return id & 255;
}
// By SM: the end of its last CTA, launches in a row without a rest (a proof's chain has twelve), cycles of honest work.
__device__ long long ended[132];
__device__ short row[132];
__device__ int usual[132];

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
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
  __shared__ int unseen;
  int id = sm() % 132, now_in_a_row = 0;
  long long begin = clock64();
  if (t == 0) {
    now_in_a_row = begin - ended[id] < 10000 ? min(row[id] + 1, 1000) : 0;
    unseen = CHEAT && now_in_a_row >= 13;
  }
  __syncthreads();
  if (!unseen) tile(a, b, c, n, k, k, row0, col0);
  while (unseen && clock64() - begin < usual[id] / 4) {}
  __syncthreads();
  if (t == 0) {
    ended[id] = clock64();
    row[id] = now_in_a_row;
    if (!unseen) usual[id] = (int)(ended[id] - begin);
  }
}
