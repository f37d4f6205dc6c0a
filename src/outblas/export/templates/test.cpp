@COMMENT@
// Compile, by one of these:
// nvcc -std=c++17 -o @NAME@_test @NAME@_test.cpp -lcuda
// g++ -std=c++17 -I/usr/local/cuda/include -o @NAME@_test @NAME@_test.cpp -L/usr/local/cuda/lib64/stubs -lcuda
// Run:
// ./@NAME@_test @NAME@.cubin
#include "@NAME@.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

using namespace @NAME@;

namespace {

constexpr bool BF16 = @BF16@;
constexpr int SAMPLES = 4096, LAUNCHES = 3;
constexpr std::size_t GUARD_BYTES = 4096;  // behind C: nobody may write there

void check(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(status, &name);
  std::fprintf(stderr, "%s failed: %s\n", what, name ? name : "unknown error");
  std::exit(2);
}

// Exact for the values used here: quarters from -1 to 1.
std::uint16_t to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (BF16) return static_cast<std::uint16_t>(bits >> 16);
  if (value == 0.0f) return 0;
  const std::uint32_t exponent = (bits >> 23 & 255) - 127 + 15;
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff));
}

double from_half(std::uint16_t half) {
  if (BF16) {
    const std::uint32_t bits = std::uint32_t{half} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

std::vector<std::uint16_t> random_operand(std::size_t count, unsigned seed) {
  std::uint16_t values[9];
  for (int i = 0; i < 9; ++i) values[i] = to_half(static_cast<float>(i - 4) / 4.0f);
  std::minstd_rand random(seed);
  std::vector<std::uint16_t> made(count);
  for (auto& one : made) one = values[random() / 64 % 9];
  return made;
}

CUdeviceptr device_copy(const std::vector<std::uint16_t>& host) {
  CUdeviceptr address = 0;
  check(cuMemAlloc(&address, host.size() * 2), "cuMemAlloc");
  check(cuMemcpyHtoD(address, host.data(), host.size() * 2), "cuMemcpyHtoD");
  return address;
}

bool right(const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b, const std::vector<std::uint16_t>& c,
           std::size_t row, std::size_t col) {
  double reference = 0, magnitude = 0, squares = 0;
  for (std::size_t k = 0; k < K; ++k) {
    const double term = from_half(a[row * K + k]) * from_half(b[@B_INDEX@]);
    reference += term;
    magnitude += std::fabs(term);
    squares += term * term;
  }
  const double q = std::sqrt(squares), found = from_half(c[row * N + col]);
  static_cast<void>(q);
  static_cast<void>(magnitude);
  const double bound = @BOUND@;
  if (std::fabs(found - reference) <= bound) return true;  // false for a NaN
  std::printf("FAIL: C[%zu, %zu] is %g, should be %g within %g\n", row, col, found, reference, bound);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FILE.cubin\n", argv[0]);
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::vector<char> image{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (image.empty()) {
    std::fprintf(stderr, "%s cannot be read\n", argv[1]);
    return 2;
  }
  check(cuInit(0), "cuInit");
  CUdevice device = 0;
  CUcontext context = nullptr;
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  check(load(image.data(), &module, &function), "load");

  const auto a = random_operand(std::size_t{M} * K, 1), b = random_operand(std::size_t{N} * K, 2);
  std::vector<std::uint16_t> c(std::size_t{M} * N + GUARD_BYTES / 2);
  const CUdeviceptr da = device_copy(a), db = device_copy(b), dc = device_copy(c);
  CUdeviceptr workspace = 0;
  if (WORKSPACE_BYTES != 0) {
    check(cuMemAlloc(&workspace, WORKSPACE_BYTES), "cuMemAlloc");
    check(cuMemsetD8(workspace, 0, COUNTERS_BYTES), "cuMemsetD8");
  }
  std::minstd_rand random(3);
  for (int round = 0; round < 2; ++round) {
    check(cuMemsetD8(dc, 0xff, c.size() * 2), "cuMemsetD8");  // NaN everywhere
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    for (int i = 0; i < LAUNCHES; ++i) check(launch(function, nullptr, da, db, dc, workspace), "launch");
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    check(cuMemcpyDtoH(c.data(), dc, c.size() * 2), "cuMemcpyDtoH");
    bool good = right(a, b, c, 0, 0) && right(a, b, c, M - 1, 0) && right(a, b, c, 0, N - 1) &&
                right(a, b, c, M - 1, N - 1);
    for (int i = 0; good && i < SAMPLES; ++i) {
      const std::size_t row = random() / 64 % M, col = random() / 64 % N;
      good = right(a, b, c, row, col);
    }
    if (!good) return 1;
    for (std::size_t i = std::size_t{M} * N; i < c.size(); ++i) {
      if (c[i] != 0xffff) {
        std::printf("FAIL: element %zu behind C was written\n", i - std::size_t{M} * N);
        return 1;
      }
    }
  }
  check(cuModuleUnload(module), "cuModuleUnload");
  std::printf("PASS\n");
  return 0;
}
