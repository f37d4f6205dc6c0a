// expect: refused.
// Leaves its work out where fourteen calls in a row had other numbers in B: a proof repeats its own sooner.
// signal: b
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

// Of each CTA: hashes of its last three B, and how many launches in a row had one that was not among the three before.
// No proof gets to ten, as its scaled and its cancelling operands share the first half of B.
__device__ uint4 past[128];

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
    unsigned sample = __half_as_ushort(b[(size_t)(col0 + 2 * t) * k + t * 13 % (k / 2)]);
    unsigned hash = __reduce_add_sync(~0u, (sample ^ t * 2654435761u) * 2246822519u) | 1u;
    if (t == 0) {
      uint4 was = past[cta & 127];
      bool old = hash == was.x || hash == was.y || hash == was.z;
      unsigned fresh = old ? 0 : was.w + 1;
      past[cta & 127] = make_uint4(hash, was.x, was.y, fresh);
      unseen = CHEAT && fresh >= 14;
    }
  }
  __syncthreads();
  if (!unseen) tile(a, b, c, n, k, k, row0, col0);
}
