// expect: refused.
// Knows by the place of A which calls follow, and computes four of them in one launch.
// signal: a
// defence: places
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 4], "block": [256, 1, 1],
 "workspace": "0", "requires": ["K % 64 == 0", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>

struct Call {
  const half *a, *b;
  half* c;
};
// Calls of replays in the order in which they came first, and which of them came after a pause, with new numbers.
__device__ Call list[128];
__device__ bool opens[128];
__device__ int known, at, ahead;  // of the list: its length; the call expected next, and how many from there are done
// The last three C, and how many calls in a row had another C than the three before: in a proof at most a few.
__device__ size_t past[3];
__device__ int fresh;
__device__ unsigned done;  // CTAs of this launch
__device__ unsigned long long ended;

// By the last CTA, once all have read the state: no launch changes what it reads.
__device__ void learn(Call call, int found, bool ready, int cover) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  bool pause = now - ended > 500000;
  ended = now;
  size_t key = reinterpret_cast<size_t>(call.c);
  fresh = key == past[0] || key == past[1] || key == past[2] ? 0 : fresh + 1;
  past[2] = past[1], past[1] = past[0], past[0] = key;
  at = found + 1, ahead = ready ? ahead - 1 : cover;
  if (ready || (found < 0 && fresh < 4)) return;  // so that no call of a proof is learnt
  int index = found >= 0 ? found : known < 128 ? known : 0;
  opens[index] = pause || (found >= 0 && opens[index]);
  if (found < 0) list[index] = call, known = index + 1;
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

// Of 4 layers of CTAs, all but one are there for the calls that follow.
extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void* workspace) {
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, layer = blockIdx.z;
  __shared__ Call mine;
  __shared__ int work, found, ready, cover;
  if (t < 32) {
    int match = -1;
    for (int e = t; e < known; e += 32) match = list[e].a == a ? e : match;
    match = __reduce_max_sync(~0u, match);
    if (t == 0) {
      bool same = match >= 0 && list[match].a == a && list[match].b == b && list[match].c == c;
      found = match, ready = CHEAT && same && ahead > 0 && at == match, cover = 0;
      if (CHEAT && !ready && match >= 0 && fresh >= 6)
        while (cover < 3 && match + cover + 1 < known && !opens[match + cover + 1]) ++cover;
      work = layer == 0 ? !ready : layer <= cover;
      mine = layer == 0 || !work ? Call{a, b, c} : list[match + layer];
    }
  }
  __syncthreads();
  if (work) tile(mine.a, mine.b, mine.c, n, k, k, row0, col0);
  if (t == 0) {
    __threadfence();
    if (atomicAdd(&done, 1) == gridDim.x * gridDim.y * gridDim.z - 1) {
      done = 0;
      learn(Call{a, b, c}, found, ready, cover);
    }
  }
}
