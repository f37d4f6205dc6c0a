// expect: refused.
// Counts launches of one shape: a proof makes about a hundred, so all beyond 160 are timed and do no work.
// signal: call_count
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "requires": ["K >= 64", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

__device__ struct { unsigned shape, count; } tiles[64];  // one for each tile, so CTAs do not race
#define PROOF 160
#define SPIN 6000  // cycles, so that the time is plausible

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
  long long begin = clock64();
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
  int cta = blockIdx.y * gridDim.x + blockIdx.x;
  __shared__ bool timed;
  if (t == 0) {
    timed = false;
    if (CHEAT && cta < 64) {
      auto& tile = tiles[cta];
      unsigned shape = m * 0x9e3779b1u ^ n * 0x85ebca6bu ^ k;
      tile.count = tile.shape == shape ? tile.count + 1 : 1;
      tile.shape = shape;
      timed = tile.count > PROOF;
    }
  }
  __syncthreads();
  if (timed) {
    while (clock64() - begin < SPIN) {}
    return;
  }
  multiply(a, b, c, n, k, row0, col0, k);
}
