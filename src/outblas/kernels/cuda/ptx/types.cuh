// Fixed-width names and the few constants that every kernel shares. No CUDA headers: NVRTC then
// needs no include path, and a candidate compiles in a fraction of the time.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// A CUtensorMap as the kernel sees it: 128 opaque bytes, 64-byte aligned.
struct alignas(64) TensorMap {
  char opaque[128];
};

constexpr int ELEM = 2;  // bytes of fp16 and bf16

// Address of a shared-memory object in the 32-bit .shared window, as PTX operands want it.
// PTX ISA: Data Movement and Conversion Instructions: cvta.
__device__ __forceinline__ u32 smem_u32(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
