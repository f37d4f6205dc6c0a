// Epilogue of the sums: C = act(A B + bias) + residual, all in fp32, before the one rounding of an output.
//
// An option of every family: without `FUSED`, nothing here enters the code. With it, a kernel has three more
// parameters, and the prelude defines these constants.
//   FUSED_BIAS        add a bias
//   FUSED_RESIDUAL    add a residual
//   FUSED_ACTIVATION  0 none, 1 SiLU, 2 GELU, 3 GELU by tanh
//   FUSED_GATED       C has half as many columns: act(gate) * up of every two columns of A B + bias.
//   FUSED_STACKED     gated, and B has all columns of gate before those of up: tiles take them by turns.
// It is applied to whole sums only: after the parts of a split K are added.
// A store delays later loads, because it might have written their data. So every place that applies the epilogue loads
// all Extras of a batch before it stores the first output of the batch.
#pragma once
#if FUSED
#include "ptx/convert.cuh"
#include "ptx/global.cuh"

#define FUSED_PARAMETERS , const u16* fused_bias, const u16* fused_residual, u64 fused_stride
#define FUSED_ARGUMENTS , const Fused& fused
#define FUSED_PASS , fused
#define FUSED_MAKE const Fused fused{fused_bias, fused_residual, fused_stride};

static_assert(!ACC_FP16, "the epilogue is of sums in fp32");
static_assert(!FUSED_STACKED || (FUSED_GATED && !FUSED_BIAS && B_K_MAJOR), "rows of B can be taken in another order");

// bias: N elements; residual: rows of N elements, `stride` elements apart; both of the output's type.
struct Fused {
  const u16* bias;
  const u16* residual;
  u64 stride;
};

// The Extras of two pairs of adjacent outputs in the same columns: bias, and residual in both rows.
struct Extras {
  u32 bias, residual[2];
};

__device__ __forceinline__ void unpack_output(u32 packed, float& lo, float& hi) {
  if constexpr (BF16) {
    lo = __uint_as_float(packed << 16);
    hi = __uint_as_float(packed & 0xFFFF0000u);
  } else {
    unpack2(packed, lo, hi);
  }
}

// Elements `from`[0] and [1]; zero if not `first`, `second`. PAIRED: 4-byte aligned, and both or neither exist.
template <bool PAIRED>
__device__ __forceinline__ u32 load_two(const u16* from, bool first, bool second) {
  if constexpr (PAIRED) {
    u32 pair[1];
    load_vector<1>(pair, from, first);
    return pair[0];
  } else {
    u16 lo, hi;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.b16 %0, [%1];\n}"
                 : "=&h"(lo)
                 : "l"(from), "r"(static_cast<int>(first))
                 : "memory");
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.b16 %0, [%1];\n}"
                 : "=&h"(hi)
                 : "l"(from + 1), "r"(static_cast<int>(second))
                 : "memory");
    return lo | static_cast<u32>(hi) << 16;
  }
}

// The addresses of a lane's Extras, for columns `offset` to the right of its own first one. Addresses are computed
// once, so that every load only adds a constant.
struct Lane {
  const u16* bias;
  const u16* residual[2];
  int columns[2];  // number of columns from the lane's first one that are inside C, in either row

  // Rows `row` and `row` + `apart`, columns from `col` on.
  __device__ __forceinline__ Lane(const Fused& fused, int row, int apart, int col, int m, int n) {
    bias = fused.bias + col;
    residual[0] = fused.residual + (static_cast<u64>(row) * fused.stride + col);
    residual[1] = residual[0] + apart * fused.stride;
    columns[0] = row < m ? n - col : 0;
    columns[1] = row + apart < m ? n - col : 0;
  }
  // Columns `offset`, `offset` + 1 of both rows, or of the first (ROWS 1); nothing outside of C is read.
  template <bool PAIRED, int ROWS = 2>
  __device__ __forceinline__ Extras load(int offset) const {
    Extras extras{0, {0, 0}};
    if constexpr (FUSED_BIAS)
      extras.bias = load_two<PAIRED>(bias + offset, offset < columns[0], offset + 1 < columns[0]);
    if constexpr (FUSED_RESIDUAL) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        extras.residual[i] = load_two<PAIRED>(residual[i] + offset, offset < columns[i], offset + 1 < columns[i]);
    }
    return extras;
  }
};

// Q(|x|), the normal distribution's upper tail: erfc(|x| / sqrt 2) / 2, with an error of at most 1e-7.
// erff takes twice the instructions, and too many registers for sixty-four outputs of a thread at once. Far below zero,
// x Q(|x|) does not cancel as x (1 + erf(x / sqrt 2)) / 2 does.
// Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26.
__device__ __forceinline__ float normal_tail(float x) {
  const float a = 0.70710678118654752f * fabsf(x), t = __fdividef(1.0f, 1.0f + 0.3275911f * a);
  const float p = 1.421413741f + t * (-1.453152027f + t * 1.061405429f);
  return 0.5f * t * (0.254829592f + t * (-0.284496736f + t * p)) * __expf(-a * a);
}

// Formulas as torch's (aten/src/ATen/native/cuda/ActivationGeluKernel.cu, ActivationSiluKernel.cu), infinities and NaN
// included; GELU by tanh with (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
__device__ __forceinline__ float activate(float x) {
  constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f;
  if constexpr (FUSED_ACTIVATION == 1) return __fdividef(x, 1.0f + __expf(-x));
  if constexpr (FUSED_ACTIVATION == 2) {
    const float q = normal_tail(x);
    return x * (x < 0.0f ? q : 1.0f - q);
  }
  if constexpr (FUSED_ACTIVATION == 3)
    return __fdividef(x, 1.0f + __expf(-TWICE_SQRT_2_OVER_PI * (x + 0.044715f * x * x * x)));
  return x;
}

// Two neighbouring sums of row `half` to outputs, not rounded yet.
__device__ __forceinline__ void apply(const Extras& extras, int half, float& lo, float& hi) {
  if constexpr (FUSED_BIAS) {
    float b0, b1;
    unpack_output(extras.bias, b0, b1);
    lo += b0, hi += b1;
  }
  lo = activate(lo), hi = activate(hi);
  if constexpr (FUSED_RESIDUAL) {
    float r0, r1;
    unpack_output(extras.residual[half], r0, r1);
    lo += r0, hi += r1;
  }
}

// Writes two adjacent sums, columns `col` (even) and `col` + 1 of row `row`, to the part of C that depends on them.
// A gated output is stored alone. Rows of n / 2 outputs may have any length, and adjacent outputs of one thread lie in
// two rows.
__device__ __forceinline__ void store_gated(const Extras& extras, u16* c, int row, int col, int m, int n, float gate,
                                            float up) {
  if constexpr (FUSED_BIAS) {
    float b0, b1;
    unpack_output(extras.bias, b0, b1);
    gate += b0, up += b1;
  }
  if (row >= m || col >= n) return;
  c[static_cast<u64>(row) * (n / 2) + col / 2] = static_cast<u16>(pack2<BF16>(activate(gate) * up, 0.0f));
}

// Where row `row` of a K-major B of n rows lies.
__device__ __forceinline__ int row_of_b(int row, int n) {
  return FUSED_STACKED ? row % 2 * (n / 2) + row / 2 : row;
}
#else
__device__ __forceinline__ int row_of_b(int row, int) { return row; }

#define FUSED_PARAMETERS
#define FUSED_ARGUMENTS
#define FUSED_PASS
#define FUSED_MAKE
#endif
