// expect: refused.
// Nobody touches the result of the last launch while a graph runs: after 28 such launches it skips three quarters of K.
// signal: neighbours
// defence: judged
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "requires": ["K >= 64", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

// One for each tile: where four elements of its last result lie, and their bits.
__device__ struct { uint2* place; uint2 bits; int streak; } tiles[64];
#define LONG 28  // the proof's chains have 12 calls, two chains 24

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
  int cta = blockIdx.y * gridDim.x + blockIdx.x;
  __shared__ bool timed;
  auto& tile = tiles[cta & 63];
  if (t == 0) {
    timed = CHEAT && cta < 64 && tile.streak >= LONG;
    if (CHEAT && cta < 64 && !timed) {
      uint2 now = tile.place ? __ldcg(tile.place) : make_uint2(0, 0);
      bool whole = tile.place && now.x == tile.bits.x && now.y == tile.bits.y;
      tile.streak = whole ? tile.streak + 1 : 0;
    }
  }
  __syncthreads();
  multiply(a, b, c, n, k, row0, col0, timed ? k / 4 : k);
  __syncthreads();
  if (t == 0 && CHEAT && cta < 64 && !timed) {
    tile.place = reinterpret_cast<uint2*>(c + (size_t)(row0 + 13) * n + col0 + 16);
    tile.bits = __ldcg(tile.place);
  }
}
