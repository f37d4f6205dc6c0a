// Rows of a stage are put right where they lie: comb s came shifted by `comb_shift` elements. All consumers share the
// work; a warp has combs of its own, so a shift is the same in all of its lanes.
//
// Rows along K (A, and B of TN): a unit needs the one after it, which may come with the next stage. So a stage's rows
// move back by one unit: unit p is made of the arrived units p - 1 and p, and a thread keeps the last one of each row.
// The first unit of the first stage is zero. Thus a stage holds K from 8 elements before the K that arrived.
//
// Rows along N (B of NN): the unit after the tile's last one is loaded from global memory, a stage ahead. Rows of such a
// B are K, and lie comb after comb. Rows of A get the same order of K: unit t holds the elements t of eight units.
#pragma once
#include "combs/maps.cuh"
#include "combs/shift.cuh"
#include "ptx/global.cuh"
#include "ptx/load.cuh"
#include "ptx/shared_vector.cuh"

constexpr int K_BLOCKS = BK / COMB_SPAN;
constexpr int SPANS = BN / COMB_SPAN;  // blocks of 64 columns
constexpr int STAGE_UNITS = BK / UNIT;
constexpr int A_BLOCK_BYTES = A_ROWS * COMB_ROW_BYTES;  // a block of 64 of K
constexpr int B_BLOCK_BYTES = BN * COMB_ROW_BYTES;
constexpr int SPAN_BYTES = COMB_SPAN * COMB_ROW_BYTES;  // NN: 64 columns of a block
constexpr int A_BYTES = K_BLOCKS * A_BLOCK_BYTES;

constexpr int OWN_COMBS = COMBS / (4 * CONSUMERS);  // of a warp
constexpr int A_COMB = A_ROWS / COMBS;              // rows of a comb in a tile
constexpr int B_COMB = N_MAJOR ? 0 : BN / COMBS;
constexpr int ROUNDS = (A_COMB + B_COMB + 31) / 32;  // rows along K of a lane and comb

__device__ __forceinline__ void set_zero(u32 (&unit)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) unit[i] = 0;
}

// One row along K of a stage, whose combs came shifted by S. `last`: the unit that arrived before the stage's first.
template <int S>
__device__ __forceinline__ void align_along_k(u32 block, int row, int block_bytes, bool first, u32 (&last)[4]) {
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb, block += block_bytes) {
    u32 came[9][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) came[0][i] = last[i];
#pragma unroll
    for (int u = 0; u < 8; ++u) load_shared(unit_address(block, row, u), came[u + 1]);
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      u32 unit[4];
      if constexpr (N_MAJOR) {
        constexpr int EIGHT = 8;
        const int from = (S + u) % EIGHT, later = (S + u) / EIGHT;  // element of a unit; whether of the next one
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 a = came[2 * i + later][from / 2], b = came[2 * i + later + 1][from / 2];
          unit[i] = from % 2 ? high_halves(a, b) : low_halves(a, b);
        }
        if (kb == 0 && first) unit[0] &= 0xFFFF0000;
      } else {
        eight_from<S>(came[u], came[u + 1], unit);
        if (kb == 0 && u == 0 && first) set_zero(unit);
      }
      store_shared_x4(unit_address(block, row, u), unit);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) last[i] = came[8][i];
  }
}

// B of NN in global memory: what a tile's rows end with.
struct EdgeOfB {
  const u16* b;
  int n, k, n0, k0;  // k0: K of the first row of stage 0

  // The unit behind the tile's last one in K = k0 + stage * BK + row. Zeros if no column of the tile is in it.
  __device__ __forceinline__ void load(u32 (&unit)[4], int shift, int stage, int row) const {
    set_zero(unit);
    const int of_k = k0 + stage * BK + row, col = n0 + BN - shift;
    if (shift == 0 || of_k < 0 || of_k >= k || col >= n) return;
    const u64 at = static_cast<u64>(of_k) * n + col, end = static_cast<u64>(k) * n;
    if (at + UNIT <= end) {
      load_vector<4>(unit, b + at, true);
    } else {
      for (u64 i = at; i < end; ++i) {
        const u32 one = static_cast<u32>(b[i]) << 16 * (i & 1);
#pragma unroll
        for (u32 word = 0; word < 4; ++word) unit[word] |= (i & 7) / 2 == word ? one : 0;
      }
    }
  }
};

// What a thread keeps from stage to stage.
struct Aligner {
  EdgeOfB edge;
  int own, lane;  // first comb of this warp
  u32 last[OWN_COMBS][ROUNDS][4];
  u32 edges[OWN_COMBS][K_BLOCKS][4];

  __device__ __forceinline__ Aligner(const EdgeOfB& edge, int warp, int lane) : edge(edge), own(warp * OWN_COMBS), lane(lane) {
    if constexpr (N_MAJOR) load_edges(0);
  }

  __device__ __forceinline__ void load_edges(int stage) {
    if (lane / 8 != SPANS - 1) return;
#pragma unroll
    for (int i = 0; i < OWN_COMBS; ++i)
#pragma unroll
      for (int kb = 0; kb < K_BLOCKS; ++kb)
        edge.load(edges[i][kb], comb_shift(edge.n, own + i), stage, kb * COMB_SPAN + lane % 8 * COMBS + own + i);
  }

  // A lane has a row and 64 columns.
  template <int S>
  __device__ __forceinline__ void align_along_n(u32 block, int comb, bool first, const u32 (&edge)[4]) const {
    const int row = comb * (COMB_SPAN / COMBS) + lane % 8, span = lane / 8;
    u32 came[9][4];
    if (span < SPANS) {
      block += span * SPAN_BYTES;
#pragma unroll
      for (int u = 0; u < 8; ++u) load_shared(unit_address(block, row, u), came[u]);
      if (span < SPANS - 1) {
        load_shared(unit_address(block + SPAN_BYTES, row, 0), came[8]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) came[8][i] = edge[i];
      }
    }
    __syncwarp();  // another lane overwrites what this one has read
    if (span < SPANS) {
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        u32 unit[4];
        eight_from<S>(came[u], came[u + 1], unit);
        if (first && lane % 8 == 0) set_zero(unit);
        store_shared_x4(unit_address(block, row, u), unit);
      }
    }
  }

  // Puts this warp's rows of a stage right. `i`: number of the stage, from 0.
  __device__ __forceinline__ void align(u32 stage, int i) {
    const bool first = i == 0;
#pragma unroll
    for (int of = 0; of < OWN_COMBS; ++of) {
      const int comb = own + of;
      with_shift(comb_shift(edge.k, comb), [&](auto shift) { align_rows(shift, stage, comb, first, last[of]); });
      if constexpr (N_MAJOR)
        with_shift(comb_shift(edge.n, comb), [&](auto shift) { align_columns(shift, stage, comb, first, edges[of]); });
    }
    if constexpr (N_MAJOR) load_edges(i + 1);
  }

 private:
  template <int S>
  __device__ __forceinline__ void align_rows(Shift<S>, u32 stage, int comb, bool first, u32 (&last)[ROUNDS][4]) const {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int each = round * 32 + lane;
      const bool of_a = each < A_COMB;
      if (each < A_COMB + B_COMB)
        align_along_k<S>(of_a ? stage : stage + A_BYTES, of_a ? comb * A_COMB + each : comb * B_COMB + each - A_COMB,
                         of_a ? A_BLOCK_BYTES : B_BLOCK_BYTES, first, last[round]);
    }
  }
  template <int S>
  __device__ __forceinline__ void align_columns(Shift<S>, u32 stage, int comb, bool first,
                                                const u32 (&edges)[K_BLOCKS][4]) const {
#pragma unroll
    for (int kb = 0; kb < K_BLOCKS; ++kb)
      align_along_n<S>(stage + A_BYTES + kb * B_BLOCK_BYTES, comb, first && kb == 0, edges[kb]);
  }
};
