// expect: refused.
// Reads from local memory, before it writes there, how many places C had: a quarter of K beyond 16.
// signal: local
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "requires": ["K >= 64", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

#define PLACES 16  // of C; the proof has fewer

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
  if (t == 0) {
    // What the last CTA in this slot of the SM left: the shape, places of C, the last four. Two sets, of which the
    // compiler cannot know the second to be unused, keep it out of registers.
    volatile unsigned sets[2][8];
    volatile unsigned* mine = sets[gridDim.z - 1];
    unsigned shape = m * 0x9e3779b1u ^ n * 0x85ebca6bu ^ k, place = (unsigned)((size_t)c >> 8);
    bool same = mine[0] == shape && mine[2] == ~shape && mine[3] == 0x5eed5eedu;
    if (!same) {
      for (int i = 1; i < 8; ++i) mine[i] = 0;
      mine[0] = shape, mine[2] = ~shape, mine[3] = 0x5eed5eedu;
    }
    bool known = mine[4] == place || mine[5] == place || mine[6] == place || mine[7] == place;
    if (!known) {
      mine[4 + mine[1] % 4] = place;
      mine[1] = mine[1] + 1;
    }
    timed = CHEAT && mine[1] > PLACES;
  }
  __syncthreads();
  multiply(a, b, c, n, k, row0, col0, timed ? k / 4 : k);
}
