// sm80_pipelined_gemm: C[M, N] = A[M, K] B by cp.async, ldmatrix and mma.sync, for tiles up to 256 x 128.
//
// A ring of STAGES stages is filled STAGES - 1 stages ahead. Operands of the next 16 of K are read into registers while
// the present ones are multiplied. C leaves through shared memory in 16-byte stores.
//   PERSISTENT  a CTA walks over tiles; the ring keeps filling while a tile is stored;
//   SPLIT > 1   SPLIT CTAs share a tile's K and meet in a workspace.
// M, N and K are free: copies past the edges write zeros. VEC elements per copy: 8, 4, 2 by cp.async of 16, 8, 4 bytes;
// 1 by scalar loads. The knobs are constants that the generated prelude defines (source.py).
#pragma once
#include "pipelined/staged_store.cuh"
#include "pipelined/warp_tile.cuh"
#include "pipelined/work.cuh"
#include "ptx/sync.cuh"
#if SPLIT_WORKSPACE
#include "pipelined/part_sums.cuh"
#endif

// Dynamic shared memory: the ring, and a slab per warp. Only a persistent CTA needs both at once.
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int SLAB_BYTES = WM * WN * Slab::BYTES;
constexpr int SLAB_OFFSET = PERSISTENT ? RING_BYTES : 0;
constexpr int SMEM_BYTES = PERSISTENT ? RING_BYTES + SLAB_BYTES : RING_BYTES > SLAB_BYTES ? RING_BYTES : SLAB_BYTES;
constexpr int AHEAD = STAGES - 1;  // stages that are filled ahead of the one in use

// Operands in global memory.
struct Matrices {
  const u16 *a, *b;
  int m, n, k;

  __device__ __forceinline__ void load_a(u32 stage, TileCoord at, int k0) const {
    StageA::load(stage, a + (static_cast<u64>(at.m) * k + k0), k, m - at.m, k - k0);
  }
  __device__ __forceinline__ void load_b(u32 stage, TileCoord at, int k0) const {
    if constexpr (B_K_MAJOR)
      StageB::load(stage + StageA::BYTES, b + (static_cast<u64>(at.n) * k + k0), k, n - at.n, k - k0);
    else
      StageB::load(stage + StageA::BYTES, b + (static_cast<u64>(k0) * n + at.n), n, k - k0, n - at.n);
  }
};

// The filling end of the ring. Every stage is one group of copies; behind the last position the groups are empty.
struct Filler {
  const Matrices& matrices;
  const Work& work;
  Position position;
  u32 ring, slot = 0;

  __device__ __forceinline__ Filler(const Matrices& matrices, const Work& work, u32 ring)
      : matrices(matrices), work(work), position(work), ring(ring) {}

  template <bool A, bool B>
  __device__ __forceinline__ void load() {
    if (position.exists(work)) {
      const int k0 = (work.k_begin + position.stage) * BK;
      if constexpr (A) matrices.load_a(ring + slot, position.at, k0);
      if constexpr (B) matrices.load_b(ring + slot, position.at, k0);
      position.next(work);
    }
    slot = slot + STAGE_BYTES == RING_BYTES ? 0 : slot + STAGE_BYTES;
  }
  __device__ __forceinline__ void fill() {
    load<true, true>();
    cp_async_commit();
  }
  // The first stages. With EARLY_B, B of all of them belongs to the first group, which is waited for first.
  __device__ __forceinline__ void begin() {
    if constexpr (EARLY_B) {
      Filler early = *this;
#pragma unroll
      for (int s = 0; s < AHEAD; ++s) early.template load<false, true>();
    }
    if constexpr (PDL) pdl_wait();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      load<true, !EARLY_B>();
      cp_async_commit();
    }
  }
};

// Until the oldest stage that is not in use yet has arrived, for all threads, and the stage in use has been read.
__device__ __forceinline__ void await_next_stage() {
  cp_async_wait<AHEAD - 1>();
  __syncthreads();
}

// All stages of one tile. Its first one has arrived; at the end that of the next tile has.
__device__ __forceinline__ void multiply_tile(Fragment (&acc)[MT][NT], Filler& filler, u32& slot,
                                              const LaneOffsets& lane, int stages) {
  Operands now;
  load_operands(now, filler.ring + slot, lane, 0);
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    const u32 here = filler.ring + slot;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      Operands next;
      if (step + 1 < K_STEPS) load_operands(next, here, lane, step + 1);
      if (step == 0) filler.fill();
      if (step + 1 == K_STEPS) {
        await_next_stage();
        slot = slot + STAGE_BYTES == RING_BYTES ? 0 : slot + STAGE_BYTES;
        if (stage + 1 < stages) load_operands(next, filler.ring + slot, lane, 0);
      }
      multiply(acc, now);
      now = next;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm80_pipelined_gemm(const u16* __restrict__ a, const u16* __restrict__ b, u16* __restrict__ c, int m, int n, int k
#if SPLIT_WORKSPACE
                        ,
                        unsigned char* workspace
#endif
                        FUSED_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  // The same in all lanes, and known to be: what follows from it is kept in uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int warp_m = warp / WN, warp_n = warp % WN;
  const Work work(m, n, k);
  if (PDL) pdl_launch_dependents();
  if (work.first >= work.tiles) return;

  const Matrices matrices{a, b, m, n, k};
  Filler filler(matrices, work, smem_u32(smem_base));
  const LaneOffsets offsets(warp_m, warp_n, lane);
  unsigned char* const slab = smem_base + SLAB_OFFSET + warp * Slab::BYTES;
  FUSED_MAKE
  filler.begin();
  await_next_stage();
  u32 slot = 0;
#pragma unroll 1
  for (int tile = work.first; tile < work.tiles; tile += work.step) {
    Fragment acc[MT][NT] = {};
    multiply_tile(acc, filler, slot, offsets, work.k_stages);
    const TileCoord at = work.origin(tile);
    const StagedStore store{c, slab, at.m + warp_m * WARP_M, at.n + warp_n * WARP_N, m, n, lane FUSED_PASS};
#if SPLIT_WORKSPACE
    PartSums::run(acc, workspace, work.number(), work.part, warp, lane, store);
#else
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      float sums[NT][4];
#pragma unroll
      for (int j = 0; j < NT; ++j) fragment_f32(acc[i][j], sums[j]);
      store(i, sums);
    }
#endif
  }
}
