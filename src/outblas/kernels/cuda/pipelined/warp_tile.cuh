// The part of a tile that one warp computes: MT x NT blocks of 16 x 8.
#pragma once
#include "epilogue/warp_fragment.cuh"
#include "pipelined/panels.cuh"

constexpr int WARP_M = BM / WM, WARP_N = BN / WN;
constexpr int MT = WARP_M / 16;  // m16 blocks of a warp
constexpr int NT = WARP_N / 8;   // n8 blocks of a warp
constexpr int K_STEPS = BK / 16;

template <bool K_MAJOR>
struct TileB : Panels<BN, BK> {};
template <>
struct TileB<false> : Panels<BK, BN> {};
using StageA = Panels<BM, BK>;
using StageB = TileB<B_K_MAJOR>;
constexpr int STAGE_BYTES = StageA::BYTES + StageB::BYTES;

// What mma takes for 16 of K.
struct Operands {
  u32 a[MT][4], b[NT][2];
};

// The lane's addresses for ldmatrix, relative to a stage. All others follow from these by constants.
struct LaneOffsets {
  u32 a;
  u32 b[B_K_MAJOR ? 1 : NT / 2];  // N-major: of each pair of n8 blocks, which may lie in different panels

  __device__ __forceinline__ LaneOffsets(int warp_m, int warp_n, int lane) {
    a = StageA::offset(warp_m * WARP_M + lane % 16, lane / 16);
    if constexpr (B_K_MAJOR) {
      b[0] = StageA::BYTES + StageB::offset(warp_n * WARP_N + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    } else {
#pragma unroll
      for (int j = 0; j < NT / 2; ++j)
        b[j] = StageA::BYTES + StageB::offset(lane % 16, warp_n * NT + 2 * j + lane / 16);
    }
  }
};

// Step `step` of the stage at `stage`. 16 of K are two units of a K-major row: the swizzle makes the step an XOR, too.
__device__ __forceinline__ void load_operands(Operands& to, u32 stage, const LaneOffsets& lane, int step) {
  const u32 from_a = stage + lane.a ^ step * 32;
#pragma unroll
  for (int i = 0; i < MT; ++i)
    ldmatrix_x4(from_a + i * 16 * StageA::ROW_BYTES, to.a[i][0], to.a[i][1], to.a[i][2], to.a[i][3]);
#pragma unroll
  for (int j = 0; j < NT; j += 2) {
    if constexpr (B_K_MAJOR)
      ldmatrix_x4((stage + lane.b[0] ^ step * 32) + j * 8 * StageB::ROW_BYTES, to.b[j][0], to.b[j][1], to.b[j + 1][0],
                  to.b[j + 1][1]);
    else
      ldmatrix_x4_trans(stage + lane.b[j / 2] + step * 16 * StageB::ROW_BYTES, to.b[j][0], to.b[j][1], to.b[j + 1][0],
                        to.b[j + 1][1]);
  }
}

__device__ __forceinline__ void multiply(Fragment (&acc)[MT][NT], const Operands& with) {
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j) mma(acc[i][j], with.a[i], with.b[j][0], with.b[j][1]);
}
