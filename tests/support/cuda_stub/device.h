// CUDA C++ for a host compiler: one thread at a time, without PTX. Code that needs PTX has a substitute in ptx/ here,
// which the test uses in place of the package's file. Kernels themselves are never called.
#pragma once
#include <cmath>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __global__ inline __attribute__((gnu_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes)
// `asm volatile(...)` and `asm(...)`: an empty one.
#define volatile(...) ("")
#define asm(...) static_cast<void>(0)

struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void __syncthreads() {}
inline void __syncwarp() {}
inline unsigned long long __cvta_generic_to_shared(const void*) { return 0; }
inline float __uint_as_float(unsigned bits) {
  float value;
  return std::memcpy(&value, &bits, 4), value;
}
using std::exp;
using std::fabs;
