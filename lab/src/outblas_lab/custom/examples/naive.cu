// One thread per element of C, straight from global memory. Slow, and the shortest text that is right for every shape.
/* outblas-launch
{"form": "device", "entry": "gemm_naive", "acc": "fp32", "grid": ["ceil(N, 32)", "ceil(M, 8)", 1], "block": [32, 8, 1],
 "requires": ["ceil(M, 8) <= 65535"]}
*/
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if OUTBLAS_BF16
using Half = __nv_bfloat16;
#else
using Half = __half;
#endif

extern "C" __global__ void __launch_bounds__(256)
    gemm_naive(const Half* A, const Half* B, Half* C, int M, int N, int K, void* workspace) {
  const int row = blockIdx.y * 8 + threadIdx.y, col = blockIdx.x * 32 + threadIdx.x;
  if (row >= M || col >= N) return;
  const Half* a = A + static_cast<size_t>(row) * K;
  const Half* b = OUTBLAS_NN ? B + col : B + static_cast<size_t>(col) * K;
  const size_t step = OUTBLAS_NN ? N : 1;  // elements of B from one k to the next
  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum = fmaf(static_cast<float>(a[k]), static_cast<float>(b[k * step]), sum);
  C[static_cast<size_t>(row) * N + col] = Half(sum);
}
