// Stands in for the package's: the same roundings by the host's fp16.
#pragma once
#include <cstring>

#include "ptx/types.cuh"

inline u16 half_bits(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  u16 bits;
  return std::memcpy(&bits, &half, 2), bits;
}
inline float half_value(u16 bits) {
  _Float16 half;
  return std::memcpy(&half, &bits, 2), static_cast<float>(half);
}
template <bool BF16>
u32 pack2(float lo, float hi) {
  static_assert(!BF16);
  return half_bits(lo) | static_cast<u32>(half_bits(hi)) << 16;
}
inline void unpack2(u32 packed, float& lo, float& hi) {
  lo = half_value(static_cast<u16>(packed)), hi = half_value(static_cast<u16>(packed >> 16));
}
