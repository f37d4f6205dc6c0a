// sm90_oddrows_gemm: C[M, N] = A[M, K] B for rows of any length, warp-specialised TMA + wgmma for sm_90a.
//
// Rows that are no multiples of 16 bytes have eight TMA maps (combs/maps.cuh), so a tile's rows lie in shared memory in
// another order. Rows of A are then rows of the sums, and rows of B are columns of the sums (TN). Both are put right by
// the epilogue. For NN, rows of B are K, and A gets the same order of K in registers (combs/fragments.cuh).
//
// One producer thread feeds a ring of STAGES tiles; CONSUMERS warpgroups share a tile. SPLIT CTAs share a tile's K. M, N
// and K are 8 or more and otherwise free. The knobs are constants that the generated prelude defines (source.py).
#pragma once
#include "generated/wgmma_instance.cuh"  // with A_IN_REGISTERS
#include "combs/maps.cuh"
#include "combs/store_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#if A_IN_REGISTERS
#include "combs/fragments.cuh"
#endif
#if SPLIT_WORKSPACE
#include "combs/part_sums.cuh"
#endif

constexpr int MI = BM / 64 / CONSUMERS;  // m64 blocks of a warpgroup
constexpr int K_BLOCKS = BK / 64;
constexpr int PRODUCER_THREADS = CONSUMERS == 1 ? 32 : 128;  // setmaxnreg acts on whole warpgroups
constexpr int THREADS = 128 * CONSUMERS + PRODUCER_THREADS;

// A stage: A in blocks of 64 of K; B of TN, too. B of NN in blocks of 64 of K, each in blocks of 64 columns. A holds the
// first A_ROWS rows. wgmma reads 64 rows; the results of the others are never stored.
constexpr int A_BLOCK_BYTES = A_ROWS * COMB_ROW_BYTES;
constexpr int B_BLOCK_BYTES = BN * COMB_ROW_BYTES;
constexpr int A_BYTES = K_BLOCKS * A_BLOCK_BYTES;
constexpr int STAGE_BYTES = A_BYTES + K_BLOCKS * B_BLOCK_BYTES;
// K-major: 8 rows are 1024 bytes apart. N-major: 64 columns are 64 rows apart (leading), 8 of K are 8 rows apart (stride).
constexpr int B_LEADING = A_IN_REGISTERS ? 64 * COMB_ROW_BYTES : 16;
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
// Warps that give a stage back, of each warpgroup. wgmma of a warpgroup complete together; loads to registers do not.
constexpr int READERS = A_IN_REGISTERS ? 4 : 1;

struct Work {
  int m0, n0, tile, part, k_begin, k_iters;

  __device__ __forceinline__ Work(int m, int n, int k, bool& inside) {
    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    const TileCoord at = grid_tile<true, GROUP, 1, SPLIT>(tiles_m, tiles_n, inside);
    m0 = at.m * BM, n0 = at.n * BN, tile = at.m * tiles_n + at.n, part = k_part<SPLIT>();
    const int all = (k + BK - 1) / BK, share = all / SPLIT, extra = all % SPLIT;
    k_begin = part * share + (part < extra ? part : extra);
    k_iters = share + (part < extra ? 1 : 0);
  }
};

struct Ring {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void load_a(const Work& w, const CombMaps& a, u32 smem, u32 stage, int i, int k) {
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb)
    load_combs<A_ROWS>(smem + stage * STAGE_BYTES + kb * A_BLOCK_BYTES, a, smem + FULL_OFFSET + 8 * stage, k,
                       (w.k_begin + i) * BK + kb * 64, w.m0);
}

__device__ __forceinline__ void load_b(const Work& w, const CombMaps& b, u32 smem, u32 stage, int i, int n, int k) {
  const u32 smem_b = smem + stage * STAGE_BYTES + A_BYTES, full = smem + FULL_OFFSET + 8 * stage;
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb) {
    const int k0 = (w.k_begin + i) * BK + kb * 64;
    const u32 block = smem_b + kb * B_BLOCK_BYTES;
#if A_IN_REGISTERS
#pragma unroll
    for (int span = 0; span < SPANS; ++span)
      load_combs<64>(block + span * 64 * COMB_ROW_BYTES, b, full, n, w.n0 + span * COMB_SPAN, k0);
#else
    load_combs<BN>(block, b, full, k, k0, w.n0);
#endif
  }
}

// The producer: one thread, all loads of this CTA.
__device__ __forceinline__ void produce(const Work& w, const CombMaps& a, const CombMaps& b, u32 smem, int n, int k) {
  int early = 0;  // stages whose B is on its way before the predecessor has ended
  if constexpr (EARLY_B) {
    early = w.k_iters < STAGES ? w.k_iters : STAGES;
#pragma unroll 1
    for (int i = 0; i < early; ++i) {
      mbar_arrive_expect_tx(smem + FULL_OFFSET + 8 * i, STAGE_BYTES);
      load_b(w, b, smem, i, i, n, k);
    }
  }
  if constexpr (PDL) pdl_wait();
  Ring ring;
#pragma unroll 1
  for (int i = 0; i < w.k_iters; ++i, ring.next()) {
    if (i >= early) {
      mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
      mbar_arrive_expect_tx(smem + FULL_OFFSET + 8 * ring.stage, STAGE_BYTES);
      load_b(w, b, smem, ring.stage, i, n, k);
    }
    load_a(w, a, smem, ring.stage, i, k);
  }
}

__device__ __forceinline__ void release_stage(u32 smem, u32 stage, int wg_thread) {
  if (wg_thread % (128 / READERS) == 0) mbar_arrive(smem + EMPTY_OFFSET + 8 * stage);
}

// The K loop of a consumer warpgroup, with one wgmma group in flight.
struct Multiplier {
  u32 smem;
  int wg_row, wg_thread;  // first row in the tile; thread of the warpgroup
  Ring ring;
  u32 previous = 0;

#if A_IN_REGISTERS
  using Operands = u32[MI][K_BLOCKS][BLOCK_STEPS][4];
  __device__ __forceinline__ void load(Operands& a) const {
    const u32 stage = smem + ring.stage * STAGE_BYTES;
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
      for (int kb = 0; kb < K_BLOCKS; ++kb)
        load_fragments(a[mi][kb], stage + kb * A_BLOCK_BYTES, wg_row + mi * 64 + wg_thread / 32 * 16, wg_thread % 32);
  }
#else
  struct Operands {};
  __device__ __forceinline__ void load(Operands&) const {}
#endif

  __device__ __forceinline__ void step(AccReg (&acc)[MI][ACC_REGS], Operands& a, bool first) {
    mbar_wait(smem + FULL_OFFSET + 8 * ring.stage, ring.parity);
    load(a);
    const u32 stage = smem + ring.stage * STAGE_BYTES;
    const u32 b = descriptor_low(stage + A_BYTES, B_LEADING);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk) {
      const u32 bk = b + (kk / 4 * B_BLOCK_BYTES + kk % 4 * (A_IN_REGISTERS ? 16 * COMB_ROW_BYTES : 32)) / 16;
#pragma unroll
      for (int mi = 0; mi < MI; ++mi) {
#if A_IN_REGISTERS
        wgmma_instance(acc[mi], a[mi][kk / 4][kk % 4], descriptor(bk, B_STRIDE, 1), !(first && kk == 0));
#else
        const u32 ak = descriptor_low(stage + wg_row * COMB_ROW_BYTES, 16) +
                       (kk / 4 * A_BLOCK_BYTES + mi * 64 * COMB_ROW_BYTES + kk % 4 * 32) / 16;
        wgmma_instance(acc[mi], descriptor(ak, 1024, 1), descriptor(bk, B_STRIDE, 1), !(first && kk == 0));
#endif
      }
    }
    wgmma_commit();
    if (!first) {
      wgmma_wait<1>();
      release_stage(smem, previous, wg_thread);
    }
    previous = ring.stage;
    ring.next();
  }

  __device__ __forceinline__ void run(AccReg (&acc)[MI][ACC_REGS], int k_iters) {
    Operands even, odd;  // registers of a group in flight, and of the next
#pragma unroll 1
    for (int i = 0; i < k_iters; i += 2) {
      step(acc, even, i == 0);
      if (i + 1 < k_iters) step(acc, odd, false);
    }
    wgmma_wait<0>();
  }
};

__device__ __forceinline__ void consume(const Work& w, const CombMaps& map_c, u32 smem, int m, int n, int warpgroup,
                                        int wg_thread, unsigned char* workspace) {
  AccReg acc[MI][ACC_REGS];
  const int wg_row = warpgroup * MI * 64, warp = wg_thread / 32, lane = wg_thread % 32;
  Multiplier{smem, wg_row, wg_thread}.run(acc, w.k_iters);
#if SPLIT_WORKSPACE
  if constexpr (PDL) pdl_wait();  // a predecessor may still be adding up in the workspace
  if (!sum_parts<MI, 128 * CONSUMERS>(acc, workspace, w.tile, w.part, warpgroup * 128 + wg_thread, CONSUMER_BARRIER)) return;
#else
  named_sync(CONSUMER_BARRIER, 128 * CONSUMERS);  // the tile overwrites stages
#endif
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const int row = wg_row + mi * 64 + warp * 16;
#if A_IN_REGISTERS
    write_rows(acc[mi], smem, row, lane);
#else
    write_rows_of_combs(acc[mi], smem, row, lane);
#endif
  }
  fence_proxy_async();
  named_sync(STORE_BARRIER + warpgroup, 128);
  constexpr int OWN = COMBS / CONSUMERS;
  if (warp == 0 && elect_one()) store_combs<OWN>(map_c, smem, warpgroup * OWN, w.m0, w.n0, m, n);
}

__device__ __forceinline__ void init_barriers(u32 smem) {
  for (int s = 0; s < STAGES; ++s) {
    mbar_init(smem + FULL_OFFSET + 8 * s, 1);
    mbar_init(smem + EMPTY_OFFSET + 8 * s, READERS * CONSUMERS);
  }
  fence_mbar_init();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm90_oddrows_gemm(const __grid_constant__ CombMaps map_a, const __grid_constant__ CombMaps map_b,
                       const __grid_constant__ CombMaps map_c, u16* __restrict__ c, int m, int n, int k
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
    named_arrive(START_BARRIER, 128 * CONSUMERS + 32);
    if (one) produce(work, map_a, map_b, smem, n, k);
  } else {
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGS>();
    const int wg_thread = static_cast<int>(threadIdx.x) % 128;
    if (warpgroup == 0 && wg_thread < COMBS) tma_prefetch(&map_a.comb[wg_thread]);
    if (warpgroup == 0 && wg_thread / COMBS == 32 / COMBS) tma_prefetch(&map_b.comb[wg_thread % COMBS]);
    named_sync(START_BARRIER, 128 * CONSUMERS + 32);
    consume(work, map_c, smem, m, n, warpgroup, wg_thread, workspace);
  }
}
