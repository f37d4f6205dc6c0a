#pragma once
#include "emulation.hpp"
struct __half {
  u16 bits;
  __half() = default;
  explicit __half(float value) : bits(emu::rounded(value, false)) {}
  explicit operator float() const { return emu::widened(bits, false); }
};
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 p) { return {static_cast<float>(p.x), static_cast<float>(p.y)}; }
