#include <torch/extension.h>
#include <torch/types.h>
// b.data_ptr() in a comment reads nothing
auto BM = Int<96>{};  // tiles of 96 x 64 x 32
auto BN = Int<64>{};
auto BK = Int< 32 >{};

extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, CUstream_st*);
extern "C" cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);

void product(torch::Tensor a, torch::Tensor b, torch::Tensor b_col_major, torch::Tensor c) {
  if (a.options().dtype() != torch::kHalf) throw std::runtime_error("values must be half");
  if (a.size(1) != b.size(0) || c.size(1) != b.size(1)) throw std::runtime_error("Tensor size mismatch!");
  void* workspace = nullptr;
  cudaMalloc(&workspace, 64);
  cudaMemsetAsync(workspace, 0, 64, (cudaStream_t)3);
  cudaLaunchConfig_t config;
  config.stream = (cudaStream_t)4;
  cudaLaunchKernelExC(&config, nullptr, nullptr);
  cudaLaunchKernel(nullptr, {}, {}, nullptr);
  cudaEventRecord(nullptr);
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
  __cudaPushCallConfiguration(dim3{5, 6, 7}, dim3{128}, 4096, (cudaStream_t)9);
  __cudaPopCallConfiguration(&grid, &block, &shared, &stream);
  if (grid.y != 6 || block.x != 128 || shared != 4096) throw std::runtime_error("another launch");
  note("triple", stream);
  static_cast<unsigned short*>(c.data_ptr())[0] = static_cast<const unsigned short*>(b_col_major.data_ptr())[1];
  cudaDeviceSynchronize();
  cudaFree(workspace);
}
