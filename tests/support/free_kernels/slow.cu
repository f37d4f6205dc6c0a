// Right, and as slow as can be waited for: one thread per CTA, one element of C each.
/* outblas-launch
{"form": "device", "entry": "gemm_slow", "acc": "fp32", "grid": ["N", "M", 1], "block": [1, 1, 1],
 "requires": ["M <= 65535"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_BF16
using Half = __nv_bfloat16;
#else
using Half = __half;
#endif

extern "C" __global__ void gemm_slow(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  const size_t row = blockIdx.y, col = blockIdx.x;
  float sum = 0.0f;
#pragma unroll 1
  for (int k = 0; k < K; ++k)
    sum = fmaf(static_cast<float>(A[row * K + k]),
               static_cast<float>(B[OUTBLAS_NN ? k * static_cast<size_t>(N) + col : col * K + k]), sum);
  C[row * N + col] = Half(sum);
}
