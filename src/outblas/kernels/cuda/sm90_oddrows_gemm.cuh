// sm90_oddrows_gemm: C[M, N] = A[M, K] B for rows of any length, warp-specialised TMA + wgmma for sm_90a.
//
// Rows that are no multiples of 16 bytes have eight TMA maps (combs/maps.cuh). So a tile's rows lie in shared memory in
// another order, and shifted. The consumers put a stage's rows right while the stage before it is multiplied
// (combs/align.cuh). The order of rows of A is that of rows of the sums, and rows of B are columns of the sums (TN). The
// epilogue puts them right (combs/store_tile.cuh). For NN, rows of B are K, and A gets the same order of K.
//
// One producer thread feeds a ring of STAGES tiles; CONSUMERS warpgroups share a tile. SPLIT CTAs share a tile's K. M, N
// and K are 8 or more and otherwise free. The knobs are constants that the generated prelude defines (source.py).
#pragma once
#include "generated/wgmma_instance.cuh"
#include "combs/align.cuh"
#include "combs/store_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#if SPLIT_WORKSPACE
#include "combs/part_sums.cuh"
#endif

constexpr int MI = BM / 64 / CONSUMERS;  // m64 blocks of a warpgroup
constexpr int PRODUCER_THREADS = CONSUMERS == 1 ? 32 : 128;  // setmaxnreg acts on whole warpgroups
constexpr int THREADS = 128 * CONSUMERS + PRODUCER_THREADS;

// A stage: A in blocks of 64 of K; B of TN, too. B of NN in blocks of 64 of K, each in blocks of 64 columns. A holds the
// first A_ROWS rows. wgmma reads 64 rows; the results of the others are never stored.
constexpr int STAGE_BYTES = A_BYTES + K_BLOCKS * B_BLOCK_BYTES;
// K-major: 8 rows are 1024 bytes apart. N-major: 64 columns are 64 rows apart (leading), 8 of K are 8 rows apart (stride).
constexpr int B_LEADING = N_MAJOR ? SPAN_BYTES : 16;
constexpr int B_STRIDE = 1024;

// Dynamic shared memory: stages, later the tile of C | barriers.
constexpr int TILE_BYTES = BM * BN * ELEM;
constexpr int A_READ_END = (STAGES - 1) * STAGE_BYTES + (K_BLOCKS - 1) * A_BLOCK_BYTES + (A_ROWS < 64 ? 64 : A_ROWS) * COMB_ROW_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES > A_READ_END ? STAGES * STAGE_BYTES : A_READ_END;
constexpr int FULL_OFFSET = RING_BYTES > TILE_BYTES ? RING_BYTES : TILE_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
constexpr int SMEM_BYTES = EMPTY_OFFSET + 8 * STAGES;
constexpr int CONSUMER_BARRIER = 1;  // named barrier of all consumers
constexpr int START_BARRIER = 2;     // mbarriers are initialised
constexpr int STORE_BARRIER = 3;     // + warpgroup

// A part's first stage begins with a unit of zeros (combs/align.cuh), so it has a unit of K less than its stages hold.
struct Work {
  int m0, n0, tile, part, k_begin, k_iters;  // k_begin: first column of the maps along K

  __device__ __forceinline__ Work(int m, int n, int k, bool& inside) {
    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const TileCoord at = grid_tile<true, GROUP, 1, SPLIT>(tiles_m, tiles_n, inside);
    m0 = at.m * BM, n0 = at.n * BN, tile = at.m * tiles_n + at.n, part = k_part<SPLIT>();
    const int all = ((k + UNIT - 1) / UNIT + SPLIT + STAGE_UNITS - 1) / STAGE_UNITS, share = all / SPLIT, extra = all % SPLIT;
    k_begin = (part * share + (part < extra ? part : extra)) * BK - part * UNIT;
    k_iters = share + (part < extra ? 1 : 0);
  }
};

struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void load_a(const Work& w, const CombMaps& a, u32 smem, u32 stage, int i) {
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb)
    load_combs<A_ROWS>(smem + stage * STAGE_BYTES + kb * A_BLOCK_BYTES, a, smem + FULL_OFFSET + 8 * stage,
                       w.k_begin + i * BK + kb * COMB_SPAN, w.m0);
}

__device__ __forceinline__ void load_b(const Work& w, const CombMaps& b, u32 smem, u32 stage, int i) {
  const u32 smem_b = smem + stage * STAGE_BYTES + A_BYTES, full = smem + FULL_OFFSET + 8 * stage;
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb) {
    const int k0 = w.k_begin + i * BK + kb * COMB_SPAN;
    const u32 block = smem_b + kb * B_BLOCK_BYTES;
    if constexpr (N_MAJOR) {
#pragma unroll
      for (int span = 0; span < SPANS; ++span)
        load_combs<COMB_SPAN>(block + span * SPAN_BYTES, b, full, w.n0 + span * COMB_SPAN, k0 - UNIT);
    } else {
      load_combs<BN>(block, b, full, k0, w.n0);
    }
  }
}

// The producer: one thread, all loads of this CTA.
__device__ __forceinline__ void produce(const Work& w, const CombMaps& a, const CombMaps& b, u32 smem) {
  int early = 0;  // stages whose B is on its way before the predecessor has ended
  if constexpr (EARLY_B) {
    early = w.k_iters < STAGES ? w.k_iters : STAGES;
#pragma unroll 1
    for (int i = 0; i < early; ++i) {
      mbar_arrive_expect_tx(smem + FULL_OFFSET + 8 * i, STAGE_BYTES);
      load_b(w, b, smem, i, i);
    }
  }
  if constexpr (PDL) pdl_wait();
  Ring ring;
#pragma unroll 1
  for (int i = 0; i < w.k_iters; ++i, ring.next()) {
    if (i >= early) {
      mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
      mbar_arrive_expect_tx(smem + FULL_OFFSET + 8 * ring.stage, STAGE_BYTES);
      load_b(w, b, smem, ring.stage, i);
    }
    load_a(w, a, smem, ring.stage, i);
  }
}

// The K loop of a consumer warpgroup, with one wgmma group in flight while the next stage is aligned.
struct Multiplier {
  u32 smem;
  int wg_row, wg_thread;  // first row in the tile; thread of the warpgroup
  Ring ring;
  u32 previous = 0;

  __device__ __forceinline__ void multiply(AccReg (&acc)[MI][ACC_REGS], bool first) const {
    const u32 stage = smem + ring.stage * STAGE_BYTES;
    const u32 a = descriptor_low(stage + wg_row * COMB_ROW_BYTES, 16), b = descriptor_low(stage + A_BYTES, B_LEADING);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk) {
      const u32 bk = b + (kk / 4 * B_BLOCK_BYTES + kk % 4 * (N_MAJOR ? 16 * COMB_ROW_BYTES : 32)) / 16;
#pragma unroll
      for (int mi = 0; mi < MI; ++mi) {
        const u32 ak = a + (kk / 4 * A_BLOCK_BYTES + mi * 64 * COMB_ROW_BYTES + kk % 4 * 32) / 16;
        wgmma_instance(acc[mi], descriptor(ak, 1024, 1), descriptor(bk, B_STRIDE, 1), !(first && kk == 0));
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void run(AccReg (&acc)[MI][ACC_REGS], Aligner& aligner, int k_iters) {
#pragma unroll 1
    for (int i = 0; i < k_iters; ++i) {
      mbar_wait(smem + FULL_OFFSET + 8 * ring.stage, ring.parity);
      aligner.align(smem + ring.stage * STAGE_BYTES, i == 0);
      fence_proxy_async();
      named_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
      multiply(acc, i == 0);
      if constexpr (N_MAJOR) aligner.load_edges(i + 1);
      if (i > 0) {
        wgmma_wait<1>();
        if (wg_thread == 0) mbar_arrive(smem + EMPTY_OFFSET + 8 * previous);
      }
      previous = ring.stage;
      ring.next();
    }
    wgmma_wait<0>();
  }
};

__device__ __forceinline__ void consume(const Work& w, const u16* b, u16* c, u32 smem, int m, int n, int k, int warpgroup,
                                        int wg_thread, unsigned char* workspace) {
  AccReg acc[MI][ACC_REGS];
  const int wg_row = warpgroup * MI * 64, thread = warpgroup * 128 + wg_thread;
  Aligner aligner{{b, n, k, w.n0, w.k_begin - UNIT}, thread};
  if constexpr (N_MAJOR) {
    if constexpr (PDL && !EARLY_B) pdl_wait();  // a predecessor may have written B
    aligner.load_edges(0);
  }
  Multiplier{smem, wg_row, wg_thread}.run(acc, aligner, w.k_iters);
#if SPLIT_WORKSPACE
  if constexpr (PDL) pdl_wait();  // a predecessor may still be adding up in the workspace
  if (!sum_parts<MI, CONSUMER_THREADS>(acc, workspace, w.tile, w.part, thread, CONSUMER_BARRIER)) return;
#else
  named_sync(CONSUMER_BARRIER, CONSUMER_THREADS);  // the tile overwrites stages
#endif
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const int row = wg_row + mi * 64 + wg_thread / 32 * 16;
    if constexpr (N_MAJOR)
      write_rows(acc[mi], smem, row, wg_thread % 32);
    else
      write_rows_of_combs(acc[mi], smem, row, wg_thread % 32);
  }
  named_sync(STORE_BARRIER + warpgroup, 128);
  const CombStore store{c, smem, w.m0, w.n0, m, n};
  constexpr int ROWS = A_ROWS / CONSUMERS;
  store.store_whole(wg_row, ROWS, wg_thread);
  store.store_ends(wg_row, ROWS, wg_thread);
}

__device__ __forceinline__ void init_barriers(u32 smem) {
  for (int s = 0; s < STAGES; ++s) {
    mbar_init(smem + FULL_OFFSET + 8 * s, 1);
    mbar_init(smem + EMPTY_OFFSET + 8 * s, CONSUMERS);
  }
  fence_mbar_init();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm90_oddrows_gemm(const __grid_constant__ CombMaps map_a, const __grid_constant__ CombMaps map_b,
                      const u16* b, u16* c, int m, int n, int k
#if SPLIT_WORKSPACE
                       ,
                       unsigned char* workspace
#endif
    ) {
#if !SPLIT_WORKSPACE
  unsigned char* const workspace = nullptr;
#endif
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  // The same in all lanes, and known to be.
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
  if (PDL) pdl_launch_dependents();
  bool inside;
  const Work work(m, n, k, inside);
  if (!inside) return;
  if (warpgroup == CONSUMERS) {
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGS>();
    if (threadIdx.x / 32 != 4 * CONSUMERS) return;
    // elect.sync tells the compiler that one lane issues the loads. Any other test makes it build a loop around each.
    const bool one = elect_one();
    if (one) init_barriers(smem);
    __syncwarp();
    named_arrive(START_BARRIER, CONSUMER_THREADS + 32);
    if (one) produce(work, map_a, map_b, smem);
  } else {
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGS>();
    const int wg_thread = static_cast<int>(threadIdx.x) % 128;
    if (warpgroup == 0 && wg_thread < COMBS) tma_prefetch(&map_a.comb[wg_thread]);
    if (warpgroup == 0 && wg_thread / COMBS == 32 / COMBS) tma_prefetch(&map_b.comb[wg_thread % COMBS]);
    named_sync(START_BARRIER, CONSUMER_THREADS + 32);
    consume(work, b, c, smem, m, n, k, warpgroup, wg_thread, workspace);
  }
}
