// gemm: the exported launchers as torch calls them.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/all.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

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
@INCLUDES@

@SYMBOLS@

namespace {

// The launcher of one problem, and the kernel that it launches. Several problems may share a kernel.
struct Launcher {
  int64_t m, n, k;
  std::size_t align_bytes, workspace_bytes, counters_bytes;
  unsigned shared_bytes;
  const void* (*symbol)();
  CUresult (*prepare)(CUfunction);
  CUresult (*launch)(CUfunction, CUstream, CUdeviceptr, CUdeviceptr, CUdeviceptr, CUdeviceptr);

  std::tuple<int64_t, int64_t, int64_t> shape() const { return {m, n, k}; }
};

#define LAUNCHER(name, symbol)                                                                                        \
  {name::M, name::N, name::K, name::ALIGN_BYTES, name::WORKSPACE_BYTES, name::COUNTERS_BYTES, name::SHARED_BYTES, symbol, \
   name::prepare, name::launch}

// In rising order of M, N, K.
const Launcher LAUNCHERS[] = {
@LAUNCHERS@
};

const Launcher& launcher_of(int64_t m, int64_t n, int64_t k) {
  const auto wanted = std::make_tuple(m, n, k);
  const auto found = std::lower_bound(std::begin(LAUNCHERS), std::end(LAUNCHERS), wanted,
                                      [](const Launcher& one, const auto& shape) { return one.shape() < shape; });
  TORCH_CHECK(found != std::end(LAUNCHERS) && found->shape() == wanted, "no kernel for M, N, K = ", m, ", ", n, ", ", k,
              "; has_kernel says which shapes have one");
  return *found;
}

// The kernel of the current device, ready for each problem that shares it. It lives as long as the process.
CUfunction function_of(const Launcher& launcher, int device) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, CUfunction> known;
  const std::lock_guard<std::mutex> lock(mutex);
  CUfunction& function = known[{device, launcher.symbol()}];
  if (!function) {
    const Launcher* largest = &launcher;  // the limit of shared memory belongs to the kernel
    for (const Launcher& one : LAUNCHERS) {
      if (one.symbol == launcher.symbol && one.shared_bytes > largest->shared_bytes) largest = &one;
    }
    cudaFunction_t found = nullptr;
    const cudaError_t status = cudaGetFuncBySymbol(&found, launcher.symbol());
    TORCH_CHECK(status == cudaSuccess, "the kernel cannot be loaded: ", cudaGetErrorString(status));
    TORCH_CHECK(largest->prepare(found) == CUDA_SUCCESS, "the GPU refuses the kernel's shared memory or cluster");
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
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "a and b are of ", a.dim(), " and ", b.dim(), " dimensions, expected 2");
  const int64_t m = a.size(0), n = b.size(@N_OF_B@), k = a.size(1);
  const Launcher& launcher = launcher_of(m, n, k);
  check(a, "a", m, k, a);
  check(b, "b", @B_SHAPE@, a);
  check(out, "out", m, n, a);
  const c10::cuda::CUDAGuard guard(a.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  at::Tensor workspace;
  CUdeviceptr space = 0;
  if (launcher.workspace_bytes != 0) {  // of torch's allocator, so that streams never share one
    workspace = at::empty({static_cast<int64_t>(launcher.workspace_bytes)}, a.options().dtype(at::kByte));
    workspace.narrow(0, 0, launcher.counters_bytes).zero_();
    space = address(workspace);
  }
  const CUresult status = launcher.launch(function_of(launcher, a.get_device()), stream.stream(), address(a),
                                          address(b), address(out), space);
  TORCH_CHECK(status == CUDA_SUCCESS, "the launch failed with CUresult ", static_cast<int>(status),
              "; operands begin at multiples of ", launcher.align_bytes, " bytes");
}
