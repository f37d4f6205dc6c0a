// A kernel of OutBLAS from C++, without Python: load its cubin, launch it, check and time it.
//
// Export the kernel once, then compile by one of three ways, and run on a Hopper GPU:
//
//   outblas export --mnk 64_4096_64 --format cubin,cpp --out examples/cpp/export
//   cd examples/cpp
//
//   nvcc -std=c++17 -O2 -Iexport -o gemm gemm.cpp -lcuda
//   g++ -std=c++17 -O2 -Iexport -I/usr/local/cuda/include -o gemm gemm.cpp -L/usr/local/cuda/lib64/stubs -lcuda
//   cmake -B build && cmake --build build && cp build/gemm .
//
//   ./gemm export/outblas_64_4096_64_tn_fp16_fp32_plain.cubin
#include "outblas_64_4096_64_tn_fp16_fp32_plain.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

namespace kernel = outblas_64_4096_64_tn_fp16_fp32_plain;

static void check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s failed with CUresult %d\n", what, static_cast<int>(status));
  std::exit(2);
}

static CUdeviceptr on_gpu(const std::vector<std::uint16_t>& host) {
  CUdeviceptr address = 0;
  check(cuMemAlloc(&address, host.size() * 2), "cuMemAlloc");
  check(cuMemcpyHtoD(address, host.data(), host.size() * 2), "cuMemcpyHtoD");
  return address;
}

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "", std::ios::binary);
  const std::vector<char> image{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (image.empty()) return std::fprintf(stderr, "usage: %s FILE.cubin\n", argv[0]), 2;

  CUdevice device = 0;
  CUcontext context = nullptr;  // the one that the CUDA runtime and torch use, too
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  check(kernel::load(image.data(), &module, &function), "load");

  // A (M, K) and B, stored N x K (layout TN), are all ones in fp16. So each element of C (M, N) is K.
  constexpr std::size_t m = kernel::M, n = kernel::N, k = kernel::K;
  const std::uint16_t one = 0x3c00, sixty_four = 0x5400;
  static_assert(k == 64 && kernel::WORKSPACE_BYTES == 0, "this program is for one kernel, which needs no workspace");
  const CUdeviceptr a = on_gpu(std::vector<std::uint16_t>(m * k, one)), b = on_gpu(std::vector<std::uint16_t>(n * k, one));
  std::vector<std::uint16_t> c(m * n);
  const CUdeviceptr dc = on_gpu(c);

  check(kernel::launch(function, nullptr, a, b, dc), "launch");  // nullptr: the default stream
  check(cuMemcpyDtoH(c.data(), dc, c.size() * 2), "cuMemcpyDtoH");
  for (const std::uint16_t element : c) {
    if (element != sixty_four) return std::printf("FAIL: an element of C is 0x%04x\n", element), 1;
  }
  constexpr int launches = 1000;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) check(kernel::launch(function, nullptr, a, b, dc), "launch");
  check(cuCtxSynchronize(), "cuCtxSynchronize");
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - begin;
  std::printf("PASS, %.2f us a launch\n", spent.count() / launches);
  return 0;
}
