// gemm: the exported launcher as torch calls it.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/all.h>

#include <array>
#include <mutex>

namespace {

// libcuda is not linked to: its functions are found when they are first called.
template <class Function>
Function driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = library ? dlsym(library, name) : nullptr;
  TORCH_CHECK(found, "the CUDA driver has no ", name);
  return reinterpret_cast<Function>(found);
}

}  // namespace

#define OUTBLAS_DRIVER(name) driver<decltype(&name)>(#name)
#include "@NAME@.h"

const void* @NAME@_kernel();

namespace {

namespace exported = @NAME@;

// The kernel of the current device, ready to be launched. It lives as long as the process.
CUfunction function_of(int device) {
  static std::mutex mutex;
  static std::array<CUfunction, 64> known{};
  const std::lock_guard<std::mutex> lock(mutex);
  CUfunction& function = known.at(device);
  if (!function) {
    cudaFunction_t found = nullptr;
    const cudaError_t status = cudaGetFuncBySymbol(&found, @NAME@_kernel());
    TORCH_CHECK(status == cudaSuccess, "the kernel cannot be loaded: ", cudaGetErrorString(status));
    TORCH_CHECK(exported::prepare(found) == CUDA_SUCCESS, "the GPU refuses the kernel's shared memory or cluster");
    function = found;
  }
  return function;
}

void check(const at::Tensor& t, const char* name, int64_t rows, int64_t cols, const at::Tensor& like) {
  TORCH_CHECK(t.device() == like.device() && t.is_cuda(), name, " is on ", t.device(), ", expected one CUDA device");
  TORCH_CHECK(t.scalar_type() == @DTYPE@, name, " is of ", t.scalar_type(), ", expected ", @DTYPE@);
  TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == cols, name, " is of shape ", t.sizes(), ", expected [",
              rows, ", ", cols, "]");
  TORCH_CHECK(t.is_contiguous(), name, " is not contiguous");
}

CUdeviceptr address(const at::Tensor& t) { return reinterpret_cast<CUdeviceptr>(t.data_ptr()); }

}  // namespace

void gemm(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  check(a, "a", exported::M, exported::K, a);
  check(b, "b", @B_ROWS@, @B_COLS@, a);
  check(out, "out", exported::M, exported::N, a);
  const c10::cuda::CUDAGuard guard(a.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor workspace;
  CUdeviceptr space = 0;
  if (exported::WORKSPACE_BYTES != 0) {  // of torch's allocator, so that streams never share one
    workspace = at::empty({static_cast<int64_t>(exported::WORKSPACE_BYTES)}, a.options().dtype(at::kByte));
    workspace.narrow(0, 0, exported::COUNTERS_BYTES).zero_();
    space = address(workspace);
  }
  const CUresult status =
      exported::launch(function_of(a.get_device()), stream.stream(), address(a), address(b), address(out), space);
  TORCH_CHECK(status == CUDA_SUCCESS, "the launch failed with CUresult ", static_cast<int>(status),
              "; operands begin at multiples of ", exported::ALIGN_BYTES, " bytes");
}
