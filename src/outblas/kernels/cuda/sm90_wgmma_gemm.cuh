// sm90_wgmma_gemm: C[M, N] = A[M, K] B, warp-specialised TMA + wgmma for sm_90a.
//
// One producer thread feeds a ring of STAGES tiles by TMA; CONSUMERS warpgroups multiply out of it.
//   coop      the consumers share a tile (each BM / CONSUMERS rows);
//   stagger   the same; the second starts LAG stages later;  pingpong  they alternate whole tiles.
// A cluster has CLUSTER_SPLIT x CLUSTER_N x CLUSTER_M CTAs. Operand tiles are multicast along M and N. Along
// CLUSTER_SPLIT, the CTAs share one tile's K and reduce through distributed shared memory. With SPLIT_WORKSPACE, the
// SPLIT clusters of a tile meet in global memory instead. The last one adds up; with REDUCE_ALL each adds up a share.
// With SWAP the kernel computes C^T = B A^T, stored transposed: rows, M and "A" are columns of C, N and B.
// M, N and K are free: TMA fills zeros past the edges and clips stores. Rows must be multiples of 16 bytes.
#pragma once
#include "epilogue/cluster_reduce.cuh"
#include "epilogue/direct_store.cuh"
#include "epilogue/swapped_gate.cuh"
#include "epilogue/tma_store.cuh"
#include "generated/wgmma_instance.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/raster.cuh"
#if SPLIT_WORKSPACE
#include "epilogue/workspace_reduce.cuh"
#endif

constexpr int MULTICAST = CLUSTER_M * CLUSTER_N;
constexpr int CLUSTER_SPLIT = SPLIT_WORKSPACE ? 1 : SPLIT;
constexpr int CLUSTER = MULTICAST * CLUSTER_SPLIT;
constexpr bool HINTED = STREAM_A || STREAM_B;  // loads say how L2 is to keep what they read
constexpr int WG_ROWS = PINGPONG ? BM : BM / CONSUMERS;
constexpr int MI = WG_ROWS / 64;                             // m64 blocks of a warpgroup
constexpr int PRODUCER_THREADS = CONSUMERS == 1 ? 32 : 128;  // setmaxnreg acts on whole warpgroups
constexpr int THREADS = 128 * CONSUMERS + PRODUCER_THREADS;

// A stage has the first A_ROWS rows of A. If A_ROWS < 64 (small M), wgmma reads 64: stale data, whose results are never
// stored. A_FITS: a box has the M rows that exist, and so do its bytes.
constexpr int A_BYTES = A_ROWS * BK * ELEM;
constexpr int B_BYTES = BN * BK * ELEM;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

// A, and B of TN: blocks of 64 of K (one 128-byte swizzle row). B of NN: blocks of B_WIDTH of N, whose rows are K.
constexpr int K_BLOCKS = BK / 64;
// K-major: 8 rows are 1024 bytes apart. N-major: B_WIDTH columns are BK rows apart (leading), 8 of K 8 rows (stride).
constexpr int B_SWIZZLE = B_K_MAJOR || B_WIDTH == 64 ? 1 : B_WIDTH == 32 ? 2 : 3;
constexpr int B_LEADING = B_K_MAJOR ? 16 : BK * B_WIDTH * ELEM;
constexpr int B_STRIDE = B_K_MAJOR ? 1024 : 8 * B_WIDTH * ELEM;
using Reduce = ClusterReduce<MI, CONSUMERS>;
constexpr int INBOX_BYTES = CLUSTER_SPLIT > 1 ? Reduce::EXPECTED_BYTES : 0;
constexpr int EPI_BYTES = STORE_TMA ? CONSUMERS * EPI_BUFS * EPI_CHUNK_BYTES : 0;

// Dynamic shared memory: stages | epilogue chunks | inbox of the reduction | barriers.
constexpr int EPI_OFFSET = STAGES * STAGE_BYTES;
constexpr int INBOX_OFFSET = EPI_OFFSET + EPI_BYTES;
constexpr int FULL_OFFSET = INBOX_OFFSET + INBOX_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
constexpr int REDUCE_BAR_OFFSET = EMPTY_OFFSET + 8 * STAGES;
constexpr int A_READ_END = (STAGES - 1) * STAGE_BYTES + (K_BLOCKS - 1) * A_ROWS * 128 + (A_ROWS < 64 ? 64 : A_ROWS) * 128;
constexpr int SMEM_BYTES = REDUCE_BAR_OFFSET + 8 > A_READ_END ? REDUCE_BAR_OFFSET + 8 : A_READ_END;
constexpr int START_BARRIER = 1;     // named barrier: mbarriers are initialised
constexpr int EPILOGUE_BARRIER = 2;  // + warpgroup
constexpr int ORDER_BARRIER = 5;     // + warpgroup: its turn to run the K loop
constexpr int LAG = STAGES / 2;      // stages by which `stagger` delays the second consumer
struct Work {  // what every role needs to walk the same tiles in the same order
  int tiles_m, tiles_n;  // in units of one cluster's tiles
  int first, step, tiles;
  TileCoord only;  // the one tile of a CTA that is not persistent
  int k_begin, k_iters;
  int rank_m, rank_n, rank_split;  // in the cluster
  int part;                        // of K
  int last_m, last_n;              // SHIFT: where the last tiles that lie inside C begin
  u32 stage_bytes;                 // A_FITS: what the loads of a stage bring

  __device__ __forceinline__ Work(int m, int n, int k) {
    const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
    rank_m = rank % CLUSTER_M;
    rank_n = rank / CLUSTER_M % CLUSTER_N;
    rank_split = rank / MULTICAST;
    part = SPLIT_WORKSPACE ? k_part<SPLIT>() : rank_split;
    if constexpr (SHIFT) last_m = m > BM ? m - BM : 0, last_n = n > BN ? n - BN : 0;
    if constexpr (A_FITS) stage_bytes = m * (BK * ELEM) + B_BYTES;
    tiles_m = (m + BM * CLUSTER_M - 1) / (BM * CLUSTER_M);
    tiles_n = (n + BN * CLUSTER_N - 1) / (BN * CLUSTER_N);
    if constexpr (PERSISTENT) {
      tiles = tiles_m * tiles_n;
      first = static_cast<int>(blockIdx.x) / CLUSTER;
      step = static_cast<int>(gridDim.x) / CLUSTER;
    } else {
      bool inside;
      only = grid_tile<RASTER_M, GROUP, CLUSTER, SPLIT / CLUSTER_SPLIT>(tiles_m, tiles_n, inside);
      first = 0, step = 1, tiles = inside ? 1 : 0;
    }
    const int all = (k + BK - 1) / BK;
    const int share = all / SPLIT, extra = all % SPLIT;
    k_begin = part * share + (part < extra ? part : extra);
    k_iters = share + (part < extra ? 1 : 0);
  }
  // Row and column of this CTA's tile `index`, in elements.
  __device__ __forceinline__ TileCoord origin(int index) const {
    const TileCoord t = PERSISTENT ? raster_tile<RASTER_M, GROUP>(index, tiles_m, tiles_n) : only;
    TileCoord at = {(t.m * CLUSTER_M + rank_m) * BM, (t.n * CLUSTER_N + rank_n) * BN};
    // A box that reaches past an edge costs TMA several times a whole one. Tiles that overlap compute the same bits.
    if constexpr (SHIFT) at.m = at.m < last_m ? at.m : last_m, at.n = at.n < last_n ? at.n : last_n;
    return at;
  }
  // Number of the only tile among all, those that pad clusters at the edges included.
  __device__ __forceinline__ int number() const {
    return (only.m * CLUSTER_M + rank_m) * (tiles_n * CLUSTER_N) + only.n * CLUSTER_N + rank_n;
  }
};

struct Ring {  // a position in the ring of stages
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ void skip(u32 count) {
    stage += count;
    parity ^= (stage / STAGES) & 1;
    stage %= STAGES;
  }
};

// A TMA load to this CTA or to those of `mask`; `policy`: how L2 is to keep it (HINTED). TURNS: of gate and up.
template <bool SHARED, bool TURNS = false>
__device__ __forceinline__ void load(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask, u64 policy) {
  if constexpr (TURNS)
    tma_load_4d<SHARED, HINTED>(dst, map, bar, x, 0, 0, y / 16, mask, policy);
  else if constexpr (SHARED && HINTED)
    tma_load_multicast_hint(dst, map, bar, x, y, mask, policy);
  else if constexpr (SHARED)
    tma_load_multicast(dst, map, bar, x, y, mask);
  else if constexpr (HINTED)
    tma_load_hint(dst, map, bar, x, y, policy);
  else
    tma_load(dst, map, bar, x, y);
}

// One stage of A: the CLUSTER_N CTAs of a row each fetch a slice of its rows for all of them.
__device__ __forceinline__ void load_a(const Work& w, const TensorMap* map_a, u32 stage_smem, u32 bar, TileCoord at,
                                       int k0, u16 mask_a, u64 policy) {
  constexpr int A_SLICE = A_ROWS / CLUSTER_N;
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb)
    load<(CLUSTER_N > 1), SWAPPED_GATE>(stage_smem + kb * A_ROWS * 128 + w.rank_n * A_SLICE * 128, map_a, bar,
                                        k0 + kb * 64, at.m + w.rank_n * A_SLICE, mask_a, policy);
}

// One stage of B: the CLUSTER_M CTAs of a column each fetch a slice.
__device__ __forceinline__ void load_b(const Work& w, const TensorMap* map_b, u32 stage_smem, u32 bar, TileCoord at,
                                       int k0, u16 mask_b, u64 policy) {
  const u32 smem_b = stage_smem + A_BYTES;
#if FUSED
  if constexpr (FUSED_STACKED && !SWAP) {  // gate and up are the map's second extent: their rows by turns
#pragma unroll
    for (int kb = 0; kb < K_BLOCKS; ++kb)
      tma_load_3d<HINTED>(smem_b + kb * BN * 128, map_b, bar, k0 + kb * 64, 0, at.n / 2, policy);
    return;
  }
#endif
  if constexpr (B_K_MAJOR) {
    constexpr int B_SLICE = BN / CLUSTER_M;
#pragma unroll
    for (int kb = 0; kb < K_BLOCKS; ++kb)
      load<(CLUSTER_M > 1)>(smem_b + kb * BN * 128 + w.rank_m * B_SLICE * 128, map_b, bar, k0 + kb * 64,
                            at.n + w.rank_m * B_SLICE, mask_b, policy);
  } else {
    constexpr int K_SLICE = BK / CLUSTER_M;
#pragma unroll
    for (int nb = 0; nb < BN / B_WIDTH; ++nb)
      load<(CLUSTER_M > 1)>(smem_b + (nb * BK + w.rank_m * K_SLICE) * B_WIDTH * ELEM, map_b, bar, at.n + nb * B_WIDTH,
                            k0 + w.rank_m * K_SLICE, mask_b, policy);
  }
}

// The producer: one thread, all loads of all tiles of this CTA.
__device__ __forceinline__ void produce(const Work& w, const TensorMap* map_a, const TensorMap* map_b, u32 smem) {
  u16 mask_a = 0, mask_b = 0;
  const int base = w.rank_split * MULTICAST;
  for (int i = 0; i < CLUSTER_N; ++i) mask_a |= 1 << (base + i * CLUSTER_M + w.rank_m);
  for (int i = 0; i < CLUSTER_M; ++i) mask_b |= 1 << (base + w.rank_n * CLUSTER_M + i);
  // One operand is read once and streams through L2; the other is read repeatedly and stays.
  const u64 policy_a = STREAM_A ? evict_first_policy() : STREAM_B ? evict_last_policy() : 0;
  const u64 policy_b = STREAM_B ? evict_first_policy() : STREAM_A ? evict_last_policy() : 0;
  Ring ring;
  // The first stages of the first tile, which are all free.
  const TileCoord at = w.origin(w.first);
  int begin = w.first < w.tiles ? (w.k_iters < STAGES ? w.k_iters : STAGES) : 0;
  if constexpr (EARLY_B) {  // the problem's B before the predecessor has ended
#pragma unroll 1
    for (int s = 0; s < begin; ++s) {
      const u32 full = smem + FULL_OFFSET + 8 * s;
      mbar_arrive_expect_tx(full, A_FITS ? w.stage_bytes : STAGE_BYTES);
      if constexpr (SWAP)
        load_a(w, map_a, smem + s * STAGE_BYTES, full, at, (w.k_begin + s) * BK, mask_a, policy_a);
      else
        load_b(w, map_b, smem + s * STAGE_BYTES, full, at, (w.k_begin + s) * BK, mask_b, policy_b);
    }
    pdl_wait();
#pragma unroll 1
    for (int s = 0; s < begin; ++s) {
      const u32 stage = smem + s * STAGE_BYTES, full = smem + FULL_OFFSET + 8 * s;
      if constexpr (SWAP)
        load_b(w, map_b, stage, full, at, (w.k_begin + s) * BK, mask_b, policy_b);
      else
        load_a(w, map_a, stage, full, at, (w.k_begin + s) * BK, mask_a, policy_a);
    }
  } else {
    if constexpr (PDL) pdl_wait();
#pragma unroll 1  // no stage has to be waited for
    for (int s = 0; s < begin; ++s) {
      const u32 stage = smem + s * STAGE_BYTES, full = smem + FULL_OFFSET + 8 * s;
      mbar_arrive_expect_tx(full, A_FITS ? w.stage_bytes : STAGE_BYTES);
      load_a(w, map_a, stage, full, at, (w.k_begin + s) * BK, mask_a, policy_a);
      load_b(w, map_b, stage, full, at, (w.k_begin + s) * BK, mask_b, policy_b);
    }
  }
  ring.skip(begin);
  for (int tile = w.first; tile < w.tiles; tile += w.step) {
    const TileCoord at = w.origin(tile);
#pragma unroll 1  // short code: at these run times instruction fetches are felt
    for (int i = begin; i < w.k_iters; ++i) {
      const u32 full = smem + FULL_OFFSET + 8 * ring.stage;
      mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
      mbar_arrive_expect_tx(full, A_FITS ? w.stage_bytes : STAGE_BYTES);
      load_a(w, map_a, smem + ring.stage * STAGE_BYTES, full, at, (w.k_begin + i) * BK, mask_a, policy_a);
      load_b(w, map_b, smem + ring.stage * STAGE_BYTES, full, at, (w.k_begin + i) * BK, mask_b, policy_b);
      ring.next();
    }
    begin = 0;
  }
  // A CTA must outlive the arrivals that its peers send it: all of its stages have been given back.
  if constexpr (MULTICAST > 1) {
    for (int s = 0; s < STAGES; ++s, ring.next()) mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
  }
}

// Tells a stage's producers that this warpgroup has read it; its first warp does, as its wgmma complete together.
__device__ __forceinline__ void release_stage(const Work& w, u32 smem, u32 stage, int wg_thread) {
  const u32 empty = smem + EMPTY_OFFSET + 8 * stage;
  if constexpr (MULTICAST == 1) {
    if (wg_thread == 0) mbar_arrive(empty);
  } else if (wg_thread < MULTICAST && (wg_thread % CLUSTER_M == w.rank_m || wg_thread / CLUSTER_M == w.rank_n)) {
    mbar_arrive_remote(empty, w.rank_split * MULTICAST + wg_thread);
  }
}

// The changing part of the descriptors of A and B (low word, units of 16 bytes) for stage 0; advancing adds a number.
struct Descriptors {
  u32 a, b;

  __device__ __forceinline__ Descriptors(u32 smem, int wg_row)
      : a(descriptor_low(smem + wg_row * 128, 16)), b(descriptor_low(smem + A_BYTES, B_LEADING)) {}
};

// All wgmma of one stage for this warpgroup.
__device__ __forceinline__ void multiply_stage(AccReg (&acc)[MI][ACC_REGS], const Descriptors& at, u32 stage, bool first) {
  const u32 a = at.a + stage * (STAGE_BYTES / 16), b = at.b + stage * (STAGE_BYTES / 16);
#pragma unroll
  for (int kk = 0; kk < BK / 16; ++kk) {
    const u32 bk = b + (B_K_MAJOR ? (kk / 4) * BN * 128 + (kk % 4) * 32 : kk * 16 * B_WIDTH * ELEM) / 16;
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
      const u32 ak = a + ((kk / 4) * A_ROWS * 128 + mi * 64 * 128 + (kk % 4) * 32) / 16;
      wgmma_instance(acc[mi], descriptor(ak, 1024, 1), descriptor(bk, B_STRIDE, B_SWIZZLE), !(first && kk == 0));
    }
  }
}

// One tile's K loop, one wgmma group in flight. `lead`: a staggered pair's first warpgroup, which starts the second.
__device__ __forceinline__ void multiply_tile(const Work& w, AccReg (&acc)[MI][ACC_REGS], u32 smem, Ring& ring,
                                              const Descriptors& at, int wg_thread, bool lead) {
  u32 previous = 0;
#pragma unroll 1
  for (int i = 0; i < w.k_iters; ++i) {
    if (STAGGER && lead && i == (w.k_iters < LAG ? w.k_iters : LAG) - 1) named_arrive(ORDER_BARRIER, 256);
    mbar_wait(smem + FULL_OFFSET + 8 * ring.stage, ring.parity);
    wgmma_fence();
    multiply_stage(acc, at, ring.stage, i == 0);
    wgmma_commit();
    if (i > 0) {
      wgmma_wait<1>();
      release_stage(w, smem, previous, wg_thread);
    }
    previous = ring.stage;
    ring.next();
  }
}

// The last group's end: only now may the accumulators be read.
__device__ __forceinline__ void finish_tile(const Work& w, u32 smem, const Ring& ring, int wg_thread) {
  wgmma_wait<0>();
  release_stage(w, smem, ring.stage == 0 ? STAGES - 1 : ring.stage - 1, wg_thread);
}

// A consumer warpgroup: every tile (coop) or every other tile (pingpong) of this CTA.
__device__ __forceinline__ void consume(const Work& w, const TensorMap* map_c, u32 smem, u16* c, int m, int n,
                                        int warpgroup, int wg_thread, unsigned char* workspace FUSED_ARGUMENTS) {
  AccReg acc[MI][ACC_REGS];
  Ring ring;
  const int wg_row = PINGPONG ? 0 : warpgroup * WG_ROWS;
  const Descriptors descriptors(smem, wg_row);
  int turn = 0;
  // Pingpong: the K loops take turns. One that ran ahead would take the parity of an older fill for its own.
  if (PINGPONG && warpgroup == 1) named_arrive(ORDER_BARRIER, 256);
  if (STAGGER && warpgroup == 1 && w.first < w.tiles) named_sync(ORDER_BARRIER, 256);
  for (int tile = w.first; tile < w.tiles; tile += w.step, ++turn) {
    if (PINGPONG && turn % CONSUMERS != warpgroup) {
      ring.skip(w.k_iters);
      continue;
    }
    if constexpr (PINGPONG) named_sync(ORDER_BARRIER + warpgroup, 256);
    multiply_tile(w, acc, smem, ring, descriptors, wg_thread, warpgroup == 0 && turn == 0);
    if (PINGPONG && tile + w.step < w.tiles) named_arrive(ORDER_BARRIER + 1 - warpgroup, 256);
    finish_tile(w, smem, ring, wg_thread);
    const TileCoord at = w.origin(tile);
    const int y0 = at.m + wg_row;
#if FUSED
    if constexpr (PDL) pdl_wait();  // a predecessor may have written what this thread reads of bias and residual
    if constexpr (SWAPPED_GATE) store_swapped_gate<MI>(acc, c, at.n, y0, m, n, wg_thread);
    if constexpr (SPLIT == 1 && !SWAP) fuse<MI>(acc, fused, c, at.n, y0, m, n, wg_thread);
    if constexpr (SPLIT == 1 && FUSED_GATED) continue;  // already stored: the output is no tile of C
#endif
#if SPLIT_WORKSPACE
    if constexpr (PDL) pdl_wait();  // a predecessor may still be adding up in the workspace
    WorkspaceReduce<MI, CONSUMERS>::run(acc, workspace, w.number(), w.part, c, at.n, y0, m, n, warpgroup, wg_thread,
                                        EPILOGUE_BARRIER + warpgroup FUSED_PASS);
    return;  // and no `continue`: the accumulators would be kept for a second tile
#endif
    if constexpr (CLUSTER_SPLIT > 1) {
      if constexpr (MULTICAST == 1) cluster_wait();  // the peers' inboxes exist
      Reduce::run(acc, smem + INBOX_OFFSET, smem + REDUCE_BAR_OFFSET, w.rank_split, w.rank_n * CLUSTER_M + w.rank_m,
                  MULTICAST, c, at.n, y0, m, n, warpgroup, wg_thread FUSED_PASS);
    } else if constexpr (STORE_TMA) {
      epilogue_tma<MI>(acc, map_c, smem + EPI_OFFSET + warpgroup * EPI_BUFS * EPI_CHUNK_BYTES, at.n, y0, wg_thread,
                       EPILOGUE_BARRIER + warpgroup);
    } else {
      epilogue_direct<MI>(acc, c, at.n, y0, m, n, wg_thread);
    }
  }
  if (STORE_TMA && wg_thread == 0) tma_store_wait_read<0>();
}

__device__ __forceinline__ void init_barriers(u32 smem) {
  // A stage is free once every warpgroup that reads it, here and in the CTAs it was multicast to, said so.
  constexpr int READERS = (PINGPONG ? 1 : CONSUMERS) * (CLUSTER_M + CLUSTER_N - 1);
  for (int s = 0; s < STAGES; ++s) {
    mbar_init(smem + FULL_OFFSET + 8 * s, 1);
    mbar_init(smem + EMPTY_OFFSET + 8 * s, READERS);
  }
  if constexpr (CLUSTER_SPLIT > 1) mbar_init(smem + REDUCE_BAR_OFFSET, 1);
  fence_mbar_init();
  if (CLUSTER_SPLIT > 1 && cluster_rank() / MULTICAST < OWNERS)
    mbar_arrive_expect_tx(smem + REDUCE_BAR_OFFSET, Reduce::EXPECTED_BYTES);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm90_wgmma_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                    const __grid_constant__ TensorMap map_c, u16* __restrict__ c, int m, int n, int k
#if SPLIT_WORKSPACE
                    ,
                    unsigned char* workspace
#endif
                    FUSED_PARAMETERS) {
#if !SPLIT_WORKSPACE
  unsigned char* const workspace = nullptr;
#endif
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  // The same in all lanes, and known to be: what follows from it is kept in uniform registers.
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
  const int wg_thread = threadIdx.x % 128;
  const bool producer_warp = threadIdx.x / 32 == 4 * CONSUMERS;
  if (PDL) pdl_launch_dependents();
  const Work work(SWAP ? n : m, SWAP ? m : n, k);  // here, once for all roles: instruction fetches are felt
  if (threadIdx.x == 128 * CONSUMERS) init_barriers(smem);
  if (threadIdx.x == 0) {  // another warp's: a fence behind a prefetch would wait for it
    tma_prefetch(&map_a);
    tma_prefetch(&map_b);
    if (STORE_TMA) tma_prefetch(&map_c);
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_arrive();
  // Multicast writes into peers: they must be ready before the first load. Split-K's wait is left to the consumers.
  if constexpr (MULTICAST > 1) cluster_wait();
  if (warpgroup == CONSUMERS) {
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGS>();
    if (producer_warp) {
      if constexpr (MULTICAST == 1) named_arrive(START_BARRIER, 128 * CONSUMERS + 32);
      if (threadIdx.x % 32 == 0) produce(work, SWAP ? &map_b : &map_a, SWAP ? &map_a : &map_b, smem);
      __syncwarp();
    }
    if constexpr (CLUSTER_SPLIT > 1 && MULTICAST == 1) cluster_wait();
  } else {
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGS>();
    if constexpr (MULTICAST == 1) named_sync(START_BARRIER, 128 * CONSUMERS + 32);
    FUSED_MAKE
    consume(work, &map_c, smem, c, m, n, warpgroup, wg_thread, workspace FUSED_PASS);
  }
}
