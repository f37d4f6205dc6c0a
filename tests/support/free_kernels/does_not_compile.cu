// A name that is nowhere declared: the compiler refuses it.
/* outblas-launch
{"form": "device", "entry": "gemm_does_not_compile", "acc": "fp32", "grid": ["ceil(N, 32)", "M", 1], "block": [32, 1, 1]}
*/
#include <cuda_fp16.h>

extern "C" __global__ void gemm_does_not_compile(const __half* A, const __half* B, __half* C, int M, int N, int K,
                                                 void* workspace) {
  const int col = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y;
  if (col >= N) return;
  float sum = 0.0f;
  for (int k = 0; k < K; ++k) sum += __half2float(A[row * K + k]) * __half2float(B[col * K + k]);
  C[row * N + col] = rounded_to_half(sum);
}
