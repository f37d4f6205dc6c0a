#pragma once
#include "emulation.hpp"
struct __nv_bfloat16 {
  u16 bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) : bits(emu::rounded(value, true)) {}
  explicit operator float() const { return emu::widened(bits, true); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float2 __bfloat1622float2(__nv_bfloat162 p) { return {static_cast<float>(p.x), static_cast<float>(p.y)}; }
