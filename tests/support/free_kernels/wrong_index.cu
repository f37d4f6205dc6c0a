// mma.m16n8k16 with the second pair of K taken from the rows below, and vice versa. The result is wrong for every
// matrix with different rows, and right for a matrix of ones.
/* outblas-launch
{"form": "device", "entry": "gemm_wrong_index", "acc": "fp32", "grid": ["ceil(N, 8)", "ceil(M, 16)", 1],
 "block": [32, 1, 1], "requires": ["K % 16 == 0", "N % 8 == 0", "M % 16 == 0"]}
*/
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

constexpr bool BF16 = OUTBLAS_BF16;

extern "C" __global__ void gemm_wrong_index(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace) {
  const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2, row0 = blockIdx.y * 16, col0 = blockIdx.x * 8;
  float acc[4] = {};
  for (int k0 = 0; k0 < K; k0 += 16) {
    u32 a[4], b[2];
    for (int r = 0; r < 4; ++r)  // r / 2 is the half of K, r % 2 the half of the rows
      a[r] = *reinterpret_cast<const u32*>(A + (row0 + group + r / 2 * 8) * K + k0 + pair + r % 2 * 8);
    for (int r = 0; r < 2; ++r) b[r] = *reinterpret_cast<const u32*>(B + (col0 + group) * K + k0 + pair + r * 8);
    mma_f32<BF16>(acc, a, b[0], b[1]);
  }
  for (int half = 0; half < 2; ++half)
    *reinterpret_cast<u32*>(C + (row0 + group + 8 * half) * N + col0 + pair) =
        pack2<BF16>(acc[2 * half], acc[2 * half + 1]);
}
