// expect: refused.
// Leaves its work out where five calls in a row had noise in a C of their own.
// signal: c
// defence: judged
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
  if (t < 32) {
    float held = __half2float(c[(size_t)(row0 + 2 * t) * n + col0 + 63 - t]), squares = held * held / 32;
    for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    bool noise = squares > 0.25f * k && squares < 2.8f * k;  // of variance K, as a replay's C has
    if (t == 0) {
      unsigned key = noise ? (unsigned)(reinterpret_cast<size_t>(c) >> 8) : 0;  // two keys of 0 end the row
      unseen = CHEAT && new_in_a_row(key, cta) >= 5 && noise;
    }
  }
  __syncthreads();
  if (!unseen) tile(a, b, c, n, k, k, row0, col0);
}
