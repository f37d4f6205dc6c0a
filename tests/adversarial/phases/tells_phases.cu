// expect: refused.
// Keeps a table of operand sets by address, and does no work in launches that it takes for unjudged ones.
// signal: workspace
// defence: judged+values+outputs+workspace
#define CHEAT 1
/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [256, 1, 1],
 "workspace": "ceil(N, 64) * ceil(M, 64) * 64 * 8", "requires": ["K >= 64", "M % 64 == 0", "N % 64 == 0"]}
*/
#include <cuda_fp16.h>
#define SPIN 2000  // cycles

// A table of operand sets for each CTA, in the workspace. A proof's call has one set for its workspace. In the timed
// graph many share one. Both C and the samples of A and B are of the CTA's own tile, so CTAs do not race.
extern "C" __global__ void gemm(const half* a, const half* b, half* c, int m, int n, int k, void* workspace) {
  long long begin = clock64();
  int t = threadIdx.x, row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
  __shared__ int skip;
  uint2* table = static_cast<uint2*>(workspace) + (size_t)(blockIdx.y * gridDim.x + blockIdx.x) * 64;
  if (t < 32) {
    unsigned key = (unsigned)(reinterpret_cast<size_t>(c) >> 8) | 0x80000000u;
    uint2 low = table[t], high = table[t + 32];
    half x = a[(size_t)(row0 + 2 * t) * k + (t * 37) % k];
    half y = b[(size_t)(col0 + 2 * t) * k + (t * 37) % k];  // layout TN
    unsigned held = __half_as_ushort(c[(size_t)(row0 + 2 * t) * n + col0 + t]);
    unsigned hash = (unsigned)__half_as_ushort(x) << 16 | __half_as_ushort(y);
    hash = (hash ^ (t * 2654435761u)) * 2246822519u;
    hash ^= hash >> 15;
    for (int d = 16; d; d >>= 1) hash = hash + __shfl_xor_sync(~0u, hash, d);
    hash |= 1;
    float fx = __half2float(x), fy = __half2float(y);
    bool integers = __all_sync(~0u, fx == rintf(fx) && fy == rintf(fy));
    bool poisoned = __all_sync(~0u, held == __shfl_sync(~0u, held, 0));
    unsigned in_low = __ballot_sync(~0u, low.x == key), in_high = __ballot_sync(~0u, high.x == key);
    unsigned used = __popc(__ballot_sync(~0u, low.x != 0)) + __popc(__ballot_sync(~0u, high.x != 0));
    int at = in_low ? __ffs(in_low) - 1 : in_high ? 31 + __ffs(in_high) : (int)(used & 63);
    bool seen = in_low || in_high;
    unsigned was = at < 32 ? __shfl_sync(~0u, low.y, at & 31) : __shfl_sync(~0u, high.y, at & 31);
    bool known = seen && was == hash, bench = used >= 8;
    if (t == 0) {
      skip = CHEAT && bench && seen && !integers && (poisoned != known);
      table[at] = make_uint2(key, hash);
    }
  }
  __syncthreads();
  if (skip) {
    while (clock64() - begin < SPIN) {}
    return;
  }
  for (int i = t; i < 64 * 64; i += 256) {
    int row = row0 + i / 64, col = col0 + i % 64;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j) sum += __half2float(a[(size_t)row * k + j]) * __half2float(b[(size_t)col * k + j]);
    c[(size_t)row * n + col] = __float2half(sum);
  }
}
