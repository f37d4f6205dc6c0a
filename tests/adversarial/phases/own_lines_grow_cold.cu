// expect: refused.
// Each preparation of a replay throws its own lines out of L2: a quarter of K after two, 24 to 100 launches apart.
// signal: l2_latency
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "requires": ["K >= 64", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

// Word 0: replays that were found. 1: launches since the lines were cold. From 128 on: lines that only probes read.
__device__ __align__(512) unsigned kept[1024];

__device__ unsigned load(const void* p) {  // past L1
  unsigned value;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// C's tile at (row0, col0), of the first `last` terms.
__device__ void multiply(const half* a, const half* b, half* c, int n, int k, int row0, int col0, int last) {
  __shared__ float x[32][68], y[32][68];  // 68: rows begin at multiples of 16 bytes
  int t = threadIdx.x, r = t / 16 * 4, s = t % 16 * 4;
  float sum[4][4] = {};
  for (int p = 0; p < last; p += 32) {
    for (int i = t; i < 64 * 32; i += 256) {
      int line = i / 32, at = p + i % 32;
      x[i % 32][line] = at < last ? __half2float(a[(size_t)(row0 + line) * k + at]) : 0.0f;
      y[i % 32][line] = at < last ? __half2float(b[(size_t)(col0 + line) * k + at]) : 0.0f;  // layout TN
    }
    __syncthreads();
    for (int j = 0; j < 32; ++j)
      for (int u = 0; u < 4; ++u)
        for (int v = 0; v < 4; ++v) sum[u][v] += x[j][r + u] * y[j][s + v];
    __syncthreads();
  }
  for (int u = 0; u < 4; ++u)
    for (int v = 0; v < 4; ++v) c[(size_t)(row0 + r + u) * n + col0 + s + v] = __float2half(sum[u][v]);
}

extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void*) {
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
  __shared__ bool timed;
  __shared__ volatile unsigned sink;
  if (t == 0) {
    timed = CHEAT && load(kept) >= 2;
    if (row0 + col0 == 0) {
      sink = load(kept + 128);  // so that the page is in the TLB
      long long passes[2];  // the second one reads L2; DRAM takes about twice as long
      for (long long& pass : passes) {
        pass = -clock64();
        for (int i = 2; i < 6; ++i) sink = load(kept + 128 * i);  // the store waits for the value
        pass += clock64();
      }
      bool cold = 4 * passes[0] > 5 * passes[1];
      unsigned since = kept[1] + 1;  // the proof's launches are cold after a module was loaded, or never
      if (cold && since >= 24 && since <= 100) ++kept[0];
      kept[1] = cold ? 0 : since;
    }
  }
  __syncthreads();
  multiply(a, b, c, n, k, row0, col0, timed ? k / 4 : k);
}
