// A driver for the host; the stub's header precedes it. Memory is malloc's. A launch of (a, b, c, m, n, k) computes the
// product. The environment says how: with B_NK, B is stored N x K. With WRONG, one element of C is wrong. With PAST, one
// element past C is written.
#include <cuda.h>

#include <cstdlib>
#include <cstring>

static bool told(const char* name) { return std::getenv(name) != nullptr; }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** name) { return *name = "error", CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule*, const void*) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction*, CUmodule, const char*) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* address, std::size_t bytes) {
  *address = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t bytes) {
  return std::memcpy(reinterpret_cast<void*>(to), from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t bytes) {
  return std::memcpy(to, reinterpret_cast<void*>(from), bytes), CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, std::size_t count) {
  return std::memset(reinterpret_cast<void*>(to), value, count), CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void** parameters, void**) {
  const auto operand = [&](int i) { return reinterpret_cast<_Float16*>(*static_cast<CUdeviceptr*>(parameters[i])); };
  const auto extent = [&](int i) { return static_cast<std::size_t>(*static_cast<int*>(parameters[i])); };
  const _Float16 *a = operand(0), *b = operand(1);
  _Float16* c = operand(2);
  const std::size_t m = extent(3), n = extent(4), k = extent(5);
  const bool b_nk = told("B_NK");
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::size_t x = 0; x < k; ++x) {
        sum += static_cast<float>(a[i * k + x]) * static_cast<float>(b_nk ? b[j * k + x] : b[x * n + j]);
      }
      c[i * n + j] = static_cast<_Float16>(sum);
    }
  }
  if (told("WRONG")) c[m * n - 1] = static_cast<_Float16>(static_cast<float>(c[m * n - 1]) + 1.0f);
  if (told("PAST")) c[m * n] = 0;
  return CUDA_SUCCESS;
}
