// sm80_direct_gemm: C[M, N] = A[M, K] B for tiny products.
// Operands go from global memory straight into the registers of mma.sync. No shared memory, barrier or descriptor
// precedes the first product.
//
// A sum over K may be taken in any order if A and B use the same order. Lane (g, t) = (lane / 4, lane % 4) loads 16
// bytes of a row of A: k = 8t ... 8t + 7 of a chunk of 32. Register j gets k = 8t + 2j and 8t + 2j + 1. For mma these
// are k = 2t, 2t + 1 (j even) or 2t + 8, 2t + 9 (j odd). B follows:
//   TN  the same 16-byte load of a row of B;
//   NN  rows k = 8 (g / 2) + 2j + g % 2 in vectors of 2 NT columns, transposed by movmatrix.
// Columns are permuted too, so that a lane owns 2 NT adjacent columns of C and stores them at once. Column c of block i
// is n = NT * 2 (c / 2) + 2i + c % 2.
// WM x WN x WK warps: WK of them share a tile's K and add up in warp order through shared memory.
// Rows of A, B and C must be multiples of 16 bytes; M, N and K are free otherwise.
#pragma once
#include "epilogue/warp_fragment.cuh"
#include "ptx/global.cuh"
#include "ptx/sync.cuh"
#include "scheduler/raster.cuh"

constexpr int MT = BM / WM / 16, NT = BN / WN / 8;  // m16 and n8 blocks of a warp
constexpr int THREADS = 32 * WM * WN * WK;
constexpr int CHUNK = 32;      // elements of K that one load of a quad of lanes covers
constexpr int OWN = 2 * NT;    // neighbouring columns of a lane
constexpr int ROWS = 2 * MT;   // rows of a lane
constexpr int SUMMERS = WK < ROWS ? WK : ROWS;  // warps of a position that add up and store
constexpr int SMEM_BYTES = WK > 1 ? BM * BN * 4 * WK : 0;

// A row or column past the edge is replaced by the last one; its results are not stored. K past its end must be zero.
//
// Rows of a warp's A: 16 mt + g (half 0) and 16 mt + g + 8 (half 1) of one chunk, 16 bytes each.
__device__ __forceinline__ void load_a(u32 (&r)[MT][2][4], const u16* a, int row0, int k0, int m, int k, int g, int t) {
  const int col = k0 + 8 * t;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row0 + 16 * i + 8 * half + g, m - 1);
      load_vector<4>(r[i][half], a + static_cast<u64>(row) * k + col, col < k);
    }
}

// b[i][j]: what mma takes of block i for register j of A.
__device__ __forceinline__ void load_b(u32 (&b)[NT][4], const u16* src, int col0, int k0, int n, int k, int g, int t) {
  if constexpr (B_K_MAJOR) {
    const int kk = k0 + 8 * t;
#pragma unroll
    for (int i = 0; i < NT; ++i) {
      const int col = min(col0 + OWN * (g / 2) + 2 * i + g % 2, n - 1);
      load_vector<4>(b[i], src + static_cast<u64>(col) * k + kk, kk < k);
    }
  } else {
    const int col = min(col0 + OWN * t, n - OWN);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = k0 + 8 * (g / 2) + 2 * j + g % 2;
      u32 v[NT];
      load_vector<NT>(v, src + static_cast<u64>(row) * n + col, row < k);
#pragma unroll
      for (int i = 0; i < NT; ++i) b[i][j] = v[i];
    }
  }
}

// UNROLL chunks, all loaded before the first is used; `first`: the warp's first ones.
__device__ __forceinline__ void multiply_chunks(Fragment (&acc)[MT][NT], const u16* a, const u16* b, int row0, int col0,
                                                int k0, int m, int n, int k, int g, int t, bool first) {
  u32 ra[UNROLL][MT][2][4], rb[UNROLL][NT][4];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if constexpr (!EARLY_B) load_a(ra[u], a, row0, k0 + u * CHUNK, m, k, g, t);
    load_b(rb[u], b, col0, k0 + u * CHUNK, n, k, g, t);
  }
  if constexpr (EARLY_B) {
    if (first) pdl_wait();
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) load_a(ra[u], a, row0, k0 + u * CHUNK, m, k, g, t);
  }
  // Without this, ptxas moves loads behind the first products, which wait for the loads before them.
  memory_fence_cta();
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if constexpr (!B_K_MAJOR) {
#pragma unroll
      for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) rb[u][i][j] = transpose_8x8(rb[u][i][j]);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const u32 fa[4] = {ra[u][i][0][2 * step], ra[u][i][1][2 * step], ra[u][i][0][2 * step + 1],
                           ra[u][i][1][2 * step + 1]};
#pragma unroll
        for (int j = 0; j < NT; ++j) mma(acc[i][j], fa, rb[u][j][2 * step], rb[u][j][2 * step + 1]);
      }
  }
}

// Row `r` (16 mt + g + 8 half, r = 2 mt + half) of a lane's accumulators: OWN neighbouring columns.
__device__ __forceinline__ void lane_row(const Fragment (&acc)[MT][NT], int r, float (&v)[OWN]) {
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    float f[4];
    fragment_f32(acc[r / 2][i], f);
    v[2 * i] = f[2 * (r % 2)], v[2 * i + 1] = f[2 * (r % 2) + 1];
  }
}

__device__ __forceinline__ void store_row(u16* c, const float (&v)[OWN], int row, int col, int m, int n) {
  if (row >= m || col >= n) return;
  u32 packed[NT];
#pragma unroll
  for (int i = 0; i < NT; ++i) packed[i] = pack2<BF16>(v[2 * i], v[2 * i + 1]);
  store_vector<NT>(c + static_cast<u64>(row) * n + col, packed);
}

#if FUSED
// Extras of OWN neighbouring columns from col, in `row` and (COUNT 2) in `row` + 8.
template <int COUNT>
__device__ __forceinline__ void row_extras(const Fused& fused, int row, int col, int m, int n, Extras (&extras)[NT]) {
  const Lane lane(fused, row, 8, col, m, n);
#pragma unroll
  for (int i = 0; i < NT; ++i) extras[i] = lane.load<true, COUNT>(2 * i);
}

// The whole epilogue in place, FUSED_GATED: and its store; row0: the lane's first row.
__device__ __forceinline__ void fuse(Fragment (&acc)[MT][NT], const Fused& fused, u16* c, int row0, int col, int m,
                                     int n) {
  Extras extras[MT][NT];
#pragma unroll
  for (int i = 0; i < MT; ++i) row_extras<2>(fused, row0 + 16 * i, col, m, n, extras[i]);
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      auto& v = acc[i][j];
      if constexpr (FUSED_GATED) {
        store_gated(extras[i][j], c, row0 + 16 * i, col + 2 * j, m, n, v[0], v[1]);
        store_gated(extras[i][j], c, row0 + 16 * i + 8, col + 2 * j, m, n, v[2], v[3]);
      } else {
        apply(extras[i][j], 0, v[0], v[1]);
        apply(extras[i][j], 1, v[2], v[3]);
      }
    }
}

// One row of sums that several warps have added up, to C.
__device__ __forceinline__ void store_fused_row(u16* c, float (&v)[OWN], const Fused& fused, int row, int col, int m,
                                                int n) {
  Extras extras[NT];
  row_extras<1>(fused, row, col, m, n, extras);
#pragma unroll
  for (int i = 0; i < NT; ++i) {
    if constexpr (FUSED_GATED)
      store_gated(extras[i], c, row, col + 2 * i, m, n, v[2 * i], v[2 * i + 1]);
    else
      apply(extras[i], 0, v[2 * i], v[2 * i + 1]);
  }
  if constexpr (!FUSED_GATED) store_row(c, v, row, col, m, n);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_direct_gemm(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n,
                     int k FUSED_PARAMETERS) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int warp_k = warp % WK, position = warp / WK;
  bool inside;
  const TileCoord tile = grid_tile<true, GROUP, 1>((m + BM - 1) / BM, (n + BN - 1) / BN, inside);
  if (!inside) return;
  const int row0 = tile.m * BM + position / WN * 16 * MT;
  const int col0 = tile.n * BN + position % WN * 8 * NT;

  if (PDL) pdl_launch_dependents();
  if (PDL && !EARLY_B) pdl_wait();  // EARLY_B: behind the first loads of B
  Fragment acc[MT][NT] = {};
  const int begin = warp_k * UNROLL * CHUNK;
#pragma unroll 1
  for (int k0 = begin; k0 < k; k0 += WK * UNROLL * CHUNK)
    multiply_chunks(acc, a, b, row0, col0, k0, m, n, k, g, t, k0 == begin);

  const int col = col0 + OWN * t;
#if FUSED
  if (PDL) pdl_wait();  // with EARLY_B a warp without a chunk of K has not waited
  FUSED_MAKE
  if constexpr (WK == 1) fuse(acc, fused, c, row0 + g, col, m, n);
  if constexpr (WK == 1 && FUSED_GATED) return;
#endif
  if constexpr (WK == 1) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float v[OWN];
      lane_row(acc, r, v);
      store_row(c, v, row0 + 8 * r + g, col, m, n);
    }
  } else {
    // parts[position][warp of K][row of the lane][pair of columns][lane]
    extern __shared__ float2 smem_base[];
    auto parts = reinterpret_cast<float2(*)[WK][ROWS][NT][32]>(smem_base);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float v[OWN];
      lane_row(acc, r, v);
#pragma unroll
      for (int i = 0; i < NT; ++i) parts[position][warp_k][r][i][lane] = make_float2(v[2 * i], v[2 * i + 1]);
    }
    __syncthreads();
    if (warp_k >= SUMMERS) return;
#pragma unroll
    for (int r = warp_k; r < ROWS; r += SUMMERS) {
      float v[OWN] = {};
#pragma unroll
      for (int w = 0; w < WK; ++w)
#pragma unroll
        for (int i = 0; i < NT; ++i) {
          const float2 part = parts[position][w][r][i][lane];
          v[2 * i] += part.x, v[2 * i + 1] += part.y;
        }
#if FUSED
      store_fused_row(c, v, fused, row0 + 8 * r + g, col, m, n);
#else
      store_row(c, v, row0 + 8 * r + g, col, m, n);
#endif
    }
  }
}
