// expect: refused.
// Learns which operands follow which, computes two products in one launch, and none in the next.
// signal: addresses
// defence: places
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 2], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

struct Call {
  const half *a, *b;
  half* c;
};
// What followed a C the last time, by its address; the last call; the call that is computed already.
__device__ half* keys[256];
__device__ Call after[256], ahead;
__device__ half* before;
__device__ unsigned long long before_at;

__device__ unsigned long long globaltimer() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ int slot(half* c) { return (reinterpret_cast<size_t>(c) >> 8) * 2654435761u >> 24 & 255; }

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

// Half of the CTAs are there to fill the GPU with the call that follows.
extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void* workspace) {
  __shared__ Call mine;
  __shared__ int work;
  bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
  if (threadIdx.x == 0) {
    volatile Call* done = &ahead;
    bool ready = CHEAT && done->a == a && done->b == b && done->c == c;
    int at = slot(c);
    bool known = CHEAT && !ready && keys[at] == c && after[at].c != c;
    work = blockIdx.z == 0 ? !ready : known;
    mine = blockIdx.z == 0 ? Call{a, b, c} : after[at];
    if (first) {
      unsigned long long now = globaltimer();
      if (before && slot(before) != at && now - before_at < 200000) {  // the same replay
        keys[slot(before)] = before;
        after[slot(before)] = Call{a, b, c};
      }
      before = c;
      before_at = now;
    }
    if (blockIdx.x + blockIdx.y == 0 && blockIdx.z == 1 && known) ahead = mine;  // nobody of this launch looks for it
  }
  __syncthreads();
  if (work) tile(mine.a, mine.b, mine.c, n, k, k, blockIdx.y * 64, blockIdx.x * 64);
}
