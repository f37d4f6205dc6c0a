// Rows of a stage are put right where they lie: comb s came shifted by `comb_shift` elements. All consumers share the
// work; a thread has a row of A, or of B, or 64 columns of it.
//
// Rows along K (A, and B of TN): a unit needs the one after it, which may come with the next stage. So a stage's rows
// move back by one unit. Unit p is made of the arrived units p - 1 and p, and a thread keeps the last one of each row.
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

// What threads share: the rows of A, then in TN those of B. In NN a warp has all columns of some rows of B, since a
// thread reads what its neighbour overwrites. So B's share begins at a whole warp.
constexpr int SPAN_LANES = SPANS == 3 ? 4 : SPANS, WARP_ROWS = 32 / SPAN_LANES;
constexpr int A_THREADS = N_MAJOR ? (A_ROWS + 31) / 32 * 32 : A_ROWS;
constexpr int B_THREADS = N_MAJOR ? K_BLOCKS * COMB_SPAN * SPAN_LANES : BN;
constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int ROUNDS = (A_THREADS + B_THREADS + CONSUMER_THREADS - 1) / CONSUMER_THREADS;

template <int FIRST, int COUNT, int WORDS>
__device__ __forceinline__ void load_units(u32 (&words)[WORDS], u32 block, int row) {
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    u32 unit[4];
    load_shared(unit_address(block, row, u), unit);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * (FIRST + u) + i] = unit[i];
  }
}
__device__ __forceinline__ void store_units(const u32 (&words)[32], u32 block, int row) {
#pragma unroll
  for (int u = 0; u < 8; ++u) {
    const u32 unit[4] = {words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3]};
    store_shared_x4(unit_address(block, row, u), unit);
  }
}

// Element t of unit j becomes element j of unit t.
__device__ __forceinline__ void order_by_combs(u32 (&words)[32]) {
  u32 ordered[32];
#pragma unroll
  for (int t = 0; t < 8; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 first = words[8 * i + t / 2], second = words[8 * i + 4 + t / 2];
      ordered[4 * t + i] = t % 2 ? high_halves(first, second) : low_halves(first, second);
    }
#pragma unroll
  for (int i = 0; i < 32; ++i) words[i] = ordered[i];
}

// B of NN in global memory: the ends of a tile's rows.
struct EdgeOfB {
  const u16* b;
  int n, k, n0, k0;  // k0: K of the first row of stage 0

  // The unit behind the tile's last one in row `of_k`. Zeros if no column of the tile is in it.
  __device__ __forceinline__ void load(u32 (&unit)[4], int shift, int of_k) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) unit[i] = 0;
    const int col = n0 + BN - shift;
    if (shift == 0 || of_k < 0 || of_k >= k || col >= n) return;
    const u64 at = static_cast<u64>(of_k) * n + col, end = static_cast<u64>(k) * n;
    if (at + UNIT <= end) {
      load_vector<4>(unit, b + at, true);
    } else {
#pragma unroll
      for (int i = 0; i < UNIT - 1; ++i)
        if (at + i < end) unit[i / 2] |= static_cast<u32>(b[at + i]) << 16 * (i % 2);
    }
  }
};

// A thread's part of each stage, and what it keeps from stage to stage.
struct Aligner {
  EdgeOfB edge;
  int thread;           // of the consumers
  u32 kept[ROUNDS][4];  // along K: the unit that arrived last; along N: the unit behind the tile

  // Columns of a row of B in NN: of which round, if any.
  struct Columns {
    int kb, row, span;
    __device__ __forceinline__ explicit Columns(int at)
        : kb(at / (COMB_SPAN * SPAN_LANES)),
          row(at / 32 % (COMB_SPAN / WARP_ROWS) * WARP_ROWS + at % WARP_ROWS),
          span(at % 32 / WARP_ROWS) {}
    __device__ __forceinline__ int comb() const { return row / (COMB_SPAN / COMBS); }
  };
  __device__ __forceinline__ int place(int round) const { return thread + round * CONSUMER_THREADS; }

  // NN: the units behind the tile, for a stage to come.
  __device__ __forceinline__ void load_edges(int stage) {
    if constexpr (!N_MAJOR) return;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int at = place(round) - A_THREADS;
      const Columns columns(at);
      if (at < 0 || at >= B_THREADS || columns.span != SPANS - 1) continue;
      const int of_k = columns.kb * COMB_SPAN + columns.row % COMBS * COMBS + columns.comb();
      edge.load(kept[round], comb_shift(edge.n, columns.comb()), edge.k0 + stage * BK + of_k);
    }
  }

  // Puts this thread's part of a stage right.
  __device__ __forceinline__ void align(u32 stage, bool first) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int at = place(round), of_b = at - A_THREADS;
      if (at < A_ROWS) {
        align_along_k(stage, A_BLOCK_BYTES, at, at / (A_ROWS / COMBS), first, kept[round]);
      } else if constexpr (!N_MAJOR) {
        if (of_b < BN) align_along_k(stage + A_BYTES, B_BLOCK_BYTES, of_b, of_b / (BN / COMBS), first, kept[round]);
      } else if (of_b >= 0 && of_b < B_THREADS) {
        align_along_n(stage + A_BYTES, Columns(of_b), first, kept[round]);
      }
    }
  }

 private:
  __device__ __forceinline__ void align_along_k(u32 block, int block_bytes, int row, int comb, bool first,
                                                u32 (&last)[4]) const {
    const int shift = comb_shift(edge.k, comb);
#pragma unroll 1
    for (int kb = 0; kb < K_BLOCKS; ++kb, block += block_bytes) {
      u32 came[36], words[32];
      load_units<1, 8>(came, block, row);
#pragma unroll
      for (int i = 0; i < 4; ++i) came[i] = last[i], last[i] = came[32 + i];
      shifted(came, shift, words);
      if (first && kb == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = 0;
      }
      if constexpr (N_MAJOR) order_by_combs(words);
      store_units(words, block, row);
    }
  }
  __device__ __forceinline__ void align_along_n(u32 block, const Columns& columns, bool first, const u32 (&edge_unit)[4]) const {
    u32 came[36], words[32];
    block += columns.kb * B_BLOCK_BYTES + columns.span * SPAN_BYTES;
    if (columns.span < SPANS) load_units<0, 8>(came, block, columns.row);
    if (columns.span < SPANS - 1) {
      load_units<8, 1>(came, block + SPAN_BYTES, columns.row);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) came[32 + i] = edge_unit[i];
    }
    __syncwarp();  // another lane overwrites what this one has read
    if (columns.span >= SPANS) return;
    shifted(came, comb_shift(edge.n, columns.comb()), words);
    if (first && columns.kb == 0 && columns.row % COMBS == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) words[i] = 0;
    }
    store_units(words, block, columns.row);
  }
};
