// sm80_mma_gemm: C[M, N] = A[M, K] B by cp.async multistage, ldmatrix and mma.sync.
//
// WM x WN x WK warps: WK > 1 splits every stage's K inside the CTA (tiny tiles with a long K).
// SPLIT > 1 (sm_90) splits K over a cluster and reduces through distributed shared memory.
// VEC elements per global load: 8, 4, 2 by cp.async of 16, 8, 4 bytes, 1 by scalar loads, so rows of
// any alignment are served. M, N and K are free. The knobs are constants that the generated prelude
// defines (source.py).
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "scheduler/raster.cuh"

constexpr int WARPS = WM * WN * WK;
constexpr int THREADS = 32 * WARPS;
constexpr int MT = BM / WM / 16;  // m16 blocks of a warp
constexpr int NT = BN / WN / 8;   // n8 blocks of a warp
constexpr int K_STEPS = BK / 16 / WK;
constexpr int UNITS = MT * NT;  // 16x8 fragments of a warp

constexpr int A_BYTES = BM * BK * ELEM;
constexpr int B_BYTES = BN * BK * ELEM;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int FRAGMENT_BYTES = 32 * 16;  // 4 fp32 of each lane

// After the K loop: fragments are dealt to WARP_OWNERS of the WK warps of a position, then to OWNERS
// CTAs.
constexpr int WARP_OWNED = UNITS / WARP_OWNERS;
constexpr int CTA_OWNED = WARP_OWNED / OWNERS;
constexpr int EXCHANGE_BYTES = BM * BN * 4 * (WK - 1);
constexpr int STAGES_BYTES = STAGES * STAGE_BYTES;
constexpr int INBOX_OFFSET = STAGES_BYTES > EXCHANGE_BYTES ? STAGES_BYTES : EXCHANGE_BYTES;
constexpr int SLOT_BYTES = WM * WN * WARP_OWNERS * CTA_OWNED * FRAGMENT_BYTES;
constexpr int INBOX_BYTES = (SPLIT - 1) * SLOT_BYTES;
constexpr int BAR_OFFSET = INBOX_OFFSET + INBOX_BYTES;
constexpr int SMEM_BYTES = BAR_OFFSET + 8;

#if ACC_FP16
using Fragment = u32[2];
#else
using Fragment = float[4];
#endif

// Byte offset of 16-byte unit `u` of row `row` in a tile of UNITS_PER_ROW units: XOR swizzle, so that
// the eight rows of an ldmatrix tile fall into different banks.
template <int UNITS_PER_ROW>
__device__ __forceinline__ u32 tile_offset(int row, int u) {
  if constexpr (UNITS_PER_ROW >= 8) u ^= row & 7;
  if constexpr (UNITS_PER_ROW == 4) u ^= (row >> 1) & 3;
  if constexpr (UNITS_PER_ROW == 2) u ^= (row >> 2) & 1;
  return (row * UNITS_PER_ROW + u) * 16;
}

// ROWS x COLS elements from a row-major matrix of `rows` x `cols` at (row0, col0), zeros outside.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_tile(u32 smem, const u16* __restrict__ src, int row0, int col0, int rows, int cols) {
  constexpr int PER_ROW = COLS / VEC, TOTAL = ROWS * PER_ROW;
#pragma unroll
  for (int base = 0; base < TOTAL; base += THREADS) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (TOTAL % THREADS != 0 && i >= TOTAL) break;
    const int r = i / PER_ROW, col = i % PER_ROW * VEC;
    const bool valid = row0 + r < rows && col0 + col < cols;
    const u16* from = src + (valid ? static_cast<u64>(row0 + r) * cols + col0 + col : 0);
    const u32 to = smem + tile_offset<COLS / 8>(r, col / 8) + col % 8 * ELEM;
    if constexpr (VEC > 1) {
      cp_async<VEC * ELEM>(to, from, valid);
    } else {
      const u16 value = valid ? *from : u16{0};
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
    }
  }
}

__device__ __forceinline__ void load_stage(u32 smem, const u16* a, const u16* b, TileCoord at, int k0, int m, int n, int k) {
  load_tile<BM, BK>(smem, a, at.m, k0, m, k);
  if constexpr (B_K_MAJOR)
    load_tile<BN, BK>(smem + A_BYTES, b, at.n, k0, n, k);
  else
    load_tile<BK, BN>(smem + A_BYTES, b, k0, at.n, k, n);
}

__device__ __forceinline__ void mma(Fragment& d, const u32 (&a)[4], u32 b0, u32 b1) {
#if ACC_FP16
  mma_f16(d, a, b0, b1);
#else
  mma_f32<BF16>(d, a, b0, b1);
#endif
}

// This warp's share of one stage: K_STEPS steps of 16.
__device__ __forceinline__ void multiply_stage(Fragment (&acc)[MT][NT], u32 stage, int warp_m, int warp_n, int warp_k,
                                               int lane) {
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    const int k_unit = (warp_k * K_STEPS + step) * 2;
    u32 a[MT][4], b[NT][2];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const int row = (warp_m * MT + i) * 16 + lane % 16;
      ldmatrix_x4(stage + tile_offset<BK / 8>(row, k_unit + lane / 16), a[i][0], a[i][1], a[i][2], a[i][3]);
    }
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
      if constexpr (B_K_MAJOR) {
        const int row = (warp_n * NT + j) * 8 + lane % 8 + lane / 16 * 8;
        ldmatrix_x4(stage + A_BYTES + tile_offset<BK / 8>(row, k_unit + lane / 8 % 2), b[j][0], b[j][1], b[j + 1][0],
                    b[j + 1][1]);
      } else {
        const int row = k_unit * 8 + lane % 16;
        ldmatrix_x4_trans(stage + A_BYTES + tile_offset<BN / 8>(row, warp_n * NT + j + lane / 16), b[j][0], b[j][1],
                          b[j + 1][0], b[j + 1][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j) mma(acc[i][j], a[i], b[j][0], b[j][1]);
  }
}

__device__ __forceinline__ void fragment_f32(const Fragment& d, float (&v)[4]) {
#if ACC_FP16
  unpack2(d[0], v[0], v[1]);
  unpack2(d[1], v[2], v[3]);
#else
  for (int e = 0; e < 4; ++e) v[e] = d[e];
#endif
}

__device__ __forceinline__ void add_from_shared(u32 addr, float (&v)[4]) {
  float o[4];
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(o[0]), "=f"(o[1]), "=f"(o[2]), "=f"(o[3])
               : "r"(addr)
               : "memory");
  for (int e = 0; e < 4; ++e) v[e] += o[e];
}

// Sums the WK parts of a position: warp g < WARP_OWNERS keeps units [g * WARP_OWNED, ...), in a fixed
// order; the others are done.
__device__ __forceinline__ void reduce_warps(const Fragment (&acc)[MT][NT], float (&own)[WARP_OWNED][4], u32 smem,
                                             int position, int warp_k, int lane) {
  if constexpr (WK > 1) __syncthreads();  // the exchange reuses the stages
#pragma unroll
  for (int g = 0; g < WARP_OWNERS; ++g) {
    const int slot = warp_k < g ? warp_k : warp_k - 1;
#pragma unroll
    for (int i = 0; i < WARP_OWNED; ++i) {
      const int unit = g * WARP_OWNED + i;
      float v[4];
      fragment_f32(acc[unit / NT][unit % NT], v);
      if (g == warp_k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) own[i][e] = v[e];
      } else {
        const u32 to = smem + (((position * WARP_OWNERS + g) * (WK - 1) + slot) * WARP_OWNED + i) * FRAGMENT_BYTES + lane * 16;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
      }
    }
  }
  if constexpr (WK > 1) {
    __syncthreads();
#pragma unroll
    for (int slot = 0; slot < WK - 1; ++slot)
#pragma unroll
      for (int i = 0; i < WARP_OWNED; ++i)
        if (warp_k < WARP_OWNERS)
          add_from_shared(
              smem + (((position * WARP_OWNERS + warp_k) * (WK - 1) + slot) * WARP_OWNED + i) * FRAGMENT_BYTES + lane * 16,
              own[i]);
  }
}

// Pushes this warp's sums to the owning CTAs of the cluster; an owner adds what the others sent.
__device__ __forceinline__ bool reduce_cluster(float (&own)[WARP_OWNED][4], float (&mine)[CTA_OWNED][4], u32 smem,
                                               int rank, int sender, int lane) {
#pragma unroll
  for (int owner = 0; owner < OWNERS; ++owner) {
    const int slot = rank < owner ? rank : rank - 1;
#pragma unroll
    for (int i = 0; i < CTA_OWNED; ++i) {
      const float(&v)[4] = own[owner * CTA_OWNED + i];
      if (owner == rank) {
#pragma unroll
        for (int e = 0; e < 4; ++e) mine[i][e] = v[e];
      } else {
        const u32 to = smem + INBOX_OFFSET + slot * SLOT_BYTES + (sender * CTA_OWNED + i) * FRAGMENT_BYTES + lane * 16;
        st_async_v4(map_to_cta(to, owner), map_to_cta(smem + BAR_OFFSET, owner), v[0], v[1], v[2], v[3]);
      }
    }
  }
  if (rank >= OWNERS) return false;
  mbar_wait_cluster(smem + BAR_OFFSET, 0);
#pragma unroll
  for (int slot = 0; slot < SPLIT - 1; ++slot)
#pragma unroll
    for (int i = 0; i < CTA_OWNED; ++i)
      add_from_shared(smem + INBOX_OFFSET + slot * SLOT_BYTES + (sender * CTA_OWNED + i) * FRAGMENT_BYTES + lane * 16,
                      mine[i]);
  return true;
}

// Two neighbouring outputs; one by one where odd rows or an odd start forbid a 4-byte store.
__device__ __forceinline__ void store_two(u16* c, int row, int col, int m, int n, float lo, float hi) {
  if (row >= m || col >= n) return;
  const u32 pair = pack2<BF16>(lo, hi);
  u16* to = c + static_cast<u64>(row) * n + col;
  if (n % 2 == 0 && reinterpret_cast<u64>(c) % 4 == 0) {
    *reinterpret_cast<u32*>(to) = pair;
  } else {
    to[0] = static_cast<u16>(pair & 0xFFFF);
    if (col + 1 < n) to[1] = static_cast<u16>(pair >> 16);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sm80_mma_gemm(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp % WK, position = warp / WK;
  const int warp_m = position / WN, warp_n = position % WN;
  const int rank = blockIdx.x % SPLIT;
  bool inside;
  const TileCoord tile = grid_tile<true, GROUP, SPLIT>((m + BM - 1) / BM, (n + BN - 1) / BN, inside);
  if (!inside) return;
  const TileCoord at{tile.m * BM, tile.n * BN};

  if (PDL) pdl_launch_dependents();
  if constexpr (SPLIT > 1) {
    if (threadIdx.x == 0) {
      mbar_init(smem + BAR_OFFSET, 1);
      fence_mbar_init();
      if (rank < OWNERS) mbar_arrive_expect_tx(smem + BAR_OFFSET, INBOX_BYTES);
    }
    __syncthreads();
    cluster_arrive();
  }
  const int all = (k + BK - 1) / BK;
  const int share = all / SPLIT, extra = all % SPLIT;
  const int first = rank * share + (rank < extra ? rank : extra);
  const int iters = share + (rank < extra ? 1 : 0);

  Fragment acc[MT][NT] = {};
  if (PDL) pdl_wait();
  constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 1;
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) {
    if (s < iters) load_stage(smem + s * STAGE_BYTES, a, b, at, (first + s) * BK, m, n, k);
    cp_async_commit();
  }
  for (int i = 0; i < iters; ++i) {
    cp_async_wait<AHEAD - 1>();
    __syncthreads();
    if (STAGES > 1 && i + AHEAD < iters)
      load_stage(smem + (i + AHEAD) % STAGES * STAGE_BYTES, a, b, at, (first + i + AHEAD) * BK, m, n, k);
    if (STAGES > 1) cp_async_commit();
    multiply_stage(acc, smem + i % STAGES * STAGE_BYTES, warp_m, warp_n, warp_k, lane);
    if (STAGES == 1 && i + 1 < iters) {
      __syncthreads();
      load_stage(smem, a, b, at, (first + i + 1) * BK, m, n, k);
      cp_async_commit();
    }
  }
  float own[WARP_OWNED][4], mine[CTA_OWNED][4];
  reduce_warps(acc, own, smem, position, warp_k, lane);
  int unit0 = warp_k * WARP_OWNED;
  if constexpr (SPLIT > 1) cluster_wait();  // the peers' inboxes exist
  if (warp_k >= WARP_OWNERS) return;
  if constexpr (SPLIT > 1) {
    if (!reduce_cluster(own, mine, smem, rank, position * WARP_OWNERS + warp_k, lane)) return;
    unit0 += rank * CTA_OWNED;
  }
#pragma unroll
  for (int i = 0; i < CTA_OWNED; ++i) {
    const float(&v)[4] = SPLIT > 1 ? mine[i] : own[i];
    const int unit = unit0 + i;
    const int row = at.m + (warp_m * MT + unit / NT) * 16 + lane / 4;
    const int col = at.n + (warp_n * NT + unit % NT) * 8 + 2 * (lane % 4);
    store_two(c, row, col, m, n, v[0], v[1]);
    store_two(c, row + 8, col, m, n, v[2], v[3]);
  }
}
