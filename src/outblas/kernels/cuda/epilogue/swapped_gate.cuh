// A stacked gate of a kernel with SWAP, whose rows are those of the weight: C = act(gate) * up of gate above up.
//
// A thread has rows r and r + 8 of every 16 of the accumulators, for the same tokens. So TMA puts 8 rows of gate before
// the same 8 rows of up (runtime/tensor_map.py: encode_turns), and no sum has to change its thread.
#pragma once
#include "epilogue/fragment.cuh"
#include "ptx/mma.cuh"
#include "ptx/tma.cuh"

#if FUSED
#define SWAPPED_GATE SWAP
static_assert(!SWAP || (FUSED_STACKED && SPLIT == 1), "a kernel of the transpose has this epilogue alone");
static_assert(!SWAP || BM / CLUSTER_N % 16 == 0, "every part of a tile that is multicast has whole turns");

// One warpgroup stores its MI x 32 columns of C for BN tokens. x0: its first token; y0: its first row in the order of
// turns, where two rows are one column of C. n: rows of the weight, a multiple of 16.
template <int MI>
__device__ __forceinline__ void store_swapped_gate(const AccReg (&acc)[MI][ACC_REGS], u16* c, int x0, int y0, int m,
                                                   int n, int wg_thread) {
  // Fragments that become outputs together: enough to hide the latency of exponentials and reciprocals, and few enough
  // that no kernel spills registers.
  constexpr int TOGETHER = 4;
  const int lane = wg_thread % 32, columns = n / 2, token = x0 + lane / 4;
  const u64 step = 8 * static_cast<u64>(columns);
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const int column = y0 / 2 + mi * 32 + wg_thread / 32 * 8;
    if (column >= columns) continue;  // for all eight columns of a warp alike, so that it transposes together
    u16* to = c + (static_cast<u64>(token) * columns + column + 2 * (lane % 4));
#pragma unroll
    for (int first = 0; first < BN / 8; first += TOGETHER) {
      if (x0 + 8 * first >= m) continue;  // the branch also keeps ptxas from interleaving all fragments
      u32 pairs[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER && first + i < BN / 8; ++i) {
        const AccReg* v = acc[mi] + 4 * (first + i);
        // Transposed, a lane has two neighbouring columns of one token.
        pairs[i] = transpose_8x8(pack2<BF16>(activate(v[0]) * v[2], activate(v[1]) * v[3]));
      }
#pragma unroll
      for (int i = 0; i < TOGETHER && first + i < BN / 8; ++i, to += step)
        if (token + 8 * (first + i) < m) *reinterpret_cast<u32*>(to) = pairs[i];
    }
  }
}
#else
#define SWAPPED_GATE false  // a constant would be a symbol more in every cubin
#endif
