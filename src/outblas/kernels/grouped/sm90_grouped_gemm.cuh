// sm90_grouped_gemm: for each group g, C[begin[g] .. end[g], :] = A[begin[g] .. end[g], :] W[g], for sm_90a.
//
// A has the rows of all groups, sorted. The groups' ends lie on the device. A persistent grid walks over the tiles of
// all groups. The kernel computes the transpose: rows of wgmma are rows of W, and its columns are rows of A. So a tile may
// have any multiple of 8 rows of A. One producer thread feeds a ring of STAGES tiles by TMA. CONSUMERS warpgroups multiply
// out of it. They share a tile (each has ROWS / CONSUMERS rows of W) or (PINGPONG) alternate tiles.
// With CLUSTER 2, two CTAs have neighbouring rows of W and the same rows of A, of which each loads half for both.
// GATED: W has the rows of gate above those of up; C has SiLU(gate) * up. BIAS: each group has a bias.
// A tile's box may read rows of the next group. Their results are never stored, so no row depends on another group.
#pragma once
#include "generated/wgmma_instance.cuh"
#include "epilogue/fragment.cuh"
#include "group_walk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/global.cuh"
#include "ptx/load.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int WG_ROWS = PINGPONG ? ROWS : ROWS / CONSUMERS;
constexpr int MI = WG_ROWS / 64;  // m64 blocks of a warpgroup
constexpr int PRODUCER_THREADS = CONSUMERS == 1 ? 32 : 128;
constexpr int THREADS = 128 * CONSUMERS + PRODUCER_THREADS;
constexpr int K_BLOCKS = BK / 64;
constexpr int W_BYTES = ROWS * BK * ELEM;
constexpr int A_BYTES = BN * BK * ELEM;
constexpr int STAGE_BYTES = W_BYTES + A_BYTES;
// Chunks of the epilogue: CHUNK rows of A x 64 rows of W, two for each warpgroup.
constexpr int CHUNK_BYTES = CHUNK * 128;
constexpr int EPI_OFFSET = STAGES * STAGE_BYTES;
constexpr int FULL_OFFSET = EPI_OFFSET + CONSUMERS * 2 * CHUNK_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
constexpr int TABLE_OFFSET = EMPTY_OFFSET + 8 * STAGES;
constexpr int READY_BARRIER = 1;     // named barriers: the table of groups and the mbarriers are there
constexpr int EPILOGUE_BARRIER = 2;  // + warpgroup
constexpr int ORDER_BARRIER = 5;     // + warpgroup: its turn to run the K loop

__device__ __forceinline__ float half_value(u16 bits) {
  float low, high;
  if constexpr (BF16) return __uint_as_float(static_cast<u32>(bits) << 16);
  unpack2(bits, low, high);
  return low;
}

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

// Row of W at which block `block` of 64 of a tile begins. GATED: blocks of gate and up by turns.
__device__ __forceinline__ int block_row(int tile_row, int block, int n) {
  if constexpr (GATED) return tile_row / 2 + block / 2 * 64 + (block % 2 ? n / 2 : 0);
  return tile_row + block * 64;
}

// One stage: blocks of 64 rows of W, and this CTA's share of the rows of A. One thread.
__device__ __forceinline__ void load_stage(const TensorMap* map_a, const TensorMap* map_w, u32 stage, u32 full,
                                           const GroupTile& at, int k0, int n, int rank, u64 policy) {
  mbar_arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
  for (int block = 0; block < ROWS / 64; ++block) {
    const int row = block_row(at.row, block, n);
    if constexpr (W_K_MAJOR) {
#pragma unroll
      for (int kb = 0; kb < K_BLOCKS; ++kb)
        tma_load_3d<STREAM_W>(stage + (kb * ROWS + block * 64) * 128, map_w, full, k0 + kb * 64, row, at.group, policy);
    } else {
      tma_load_3d<STREAM_W>(stage + block * BK * 128, map_w, full, row, k0, at.group, policy);
    }
  }
  constexpr int SHARE = BN / CLUSTER;
#pragma unroll
  for (int kb = 0; kb < K_BLOCKS; ++kb) {
    const u32 dst = stage + W_BYTES + (kb * BN + rank * SHARE) * 128;
    if constexpr (CLUSTER > 1)
      tma_load_multicast(dst, map_a, full, k0 + kb * 64, at.begin + rank * SHARE, (1 << CLUSTER) - 1);
    else
      tma_load(dst, map_a, full, k0 + kb * 64, at.begin);
  }
}

// The producer warp. All lanes walk, one loads.
__device__ __forceinline__ void produce(GroupWalk walk, const TensorMap* map_a, const TensorMap* map_w, u32 smem, int n,
                                        int k_iters, int rank, bool loads) {
  const u64 policy = STREAM_W ? evict_first_policy() : 0;
  Ring ring;
  GroupTile at;
  u32 filled = 0;  // stages that were filled at least once
  while (walk.next(at)) {
    if (loads) {
#pragma unroll 1
      for (int i = 0; i < k_iters; ++i) {
        if (filled < STAGES)
          ++filled;
        else
          mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
        load_stage(map_a, map_w, smem + ring.stage * STAGE_BYTES, smem + FULL_OFFSET + 8 * ring.stage, at, i * BK, n, rank,
                   policy);
        ring.next();
      }
    }
    __syncwarp();
  }
  // A CTA must outlive the arrivals that its peer sends it.
  if (CLUSTER > 1 && loads) {
    if (filled < STAGES) ring.stage = 0, ring.parity = 1;  // the stages that have one fill
    for (u32 s = 0; s < filled; ++s, ring.next()) mbar_wait(smem + EMPTY_OFFSET + 8 * ring.stage, ring.parity ^ 1);
  }
}

__device__ __forceinline__ void release_stage(u32 smem, u32 stage, int wg_thread) {
  const u32 empty = smem + EMPTY_OFFSET + 8 * stage;
  if constexpr (CLUSTER == 1) {
    if (wg_thread == 0) mbar_arrive(empty);
  } else if (wg_thread < CLUSTER) {
    mbar_arrive_remote(empty, wg_thread);
  }
}

// All wgmma of one stage for this warpgroup, whose first row of W is `wg_row`.
__device__ __forceinline__ void multiply_stage(AccReg (&acc)[MI][ACC_REGS], u32 w, u32 a, u32 stage, bool first) {
  w += stage * (STAGE_BYTES / 16), a += stage * (STAGE_BYTES / 16);
#pragma unroll
  for (int kk = 0; kk < BK / 16; ++kk) {
    const u32 ak = a + ((kk / 4) * BN * 128 + (kk % 4) * 32) / 16;
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
      const u32 wk = w + (W_K_MAJOR ? ((kk / 4) * ROWS * 128 + mi * 64 * 128 + (kk % 4) * 32) / 16
                                    : (mi * BK * 128 + kk * 16 * 128) / 16);
      wgmma_instance(acc[mi], descriptor(wk, 1024, 1), descriptor(ak, 1024, 1), !(first && kk == 0));
    }
  }
}

// 16-byte unit `u` of row `row` of a chunk, swizzled so that neither stmatrix nor the loads have conflicts.
__device__ __forceinline__ u32 chunk_at(int row, int u) { return row * 128 + ((u ^ (row & 7)) << 4); }

// One warp writes its 16 rows of W of a chunk, transposed.
__device__ __forceinline__ void write_chunk(const AccReg (&acc)[ACC_REGS], u32 chunk, int ch, int warp, int lane) {
  const int unit = warp * 2 + lane / 8 % 2;
  if constexpr (CHUNK == 8) {
    stmatrix_x2_trans(chunk + chunk_at(lane % 8, unit), packed_pair(acc, ch, 0), packed_pair(acc, ch, 1));
  } else {
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j += 2) {
      const int nb = ch * (CHUNK / 8) + j;
      stmatrix_x4_trans(chunk + chunk_at(j * 8 + lane / 16 * 8 + lane % 8, unit), packed_pair(acc, nb, 0),
                        packed_pair(acc, nb, 1), packed_pair(acc, nb + 1, 0), packed_pair(acc, nb + 1, 1));
    }
  }
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// What follows the sums, in place. GATED: the result is in the even blocks.
__device__ __forceinline__ void finish_sums(AccReg (&acc)[MI][ACC_REGS], const GroupTile& at, int first_block,
                                            const u16* bias, int n, int wg_thread) {
  if constexpr (BIAS) {
#pragma unroll
    for (int mi = 0; mi < MI; ++mi) {
      const int row = block_row(at.row, first_block + mi, n) + wg_thread / 32 * 16 + wg_thread % 32 / 4;
      const u16* of_group = bias + static_cast<u64>(at.group) * n;
      const float upper = row < n ? half_value(of_group[row]) : 0.0f;
      const float lower = row + 8 < n ? half_value(of_group[row + 8]) : 0.0f;
#pragma unroll
      for (int nb = 0; nb < BN / 8; ++nb) {
        acc[mi][4 * nb] += upper, acc[mi][4 * nb + 1] += upper;
        acc[mi][4 * nb + 2] += lower, acc[mi][4 * nb + 3] += lower;
      }
    }
  }
  if constexpr (GATED) {
#pragma unroll
    for (int mi = 0; mi + 1 < MI; mi += 2)
#pragma unroll
      for (int i = 0; i < ACC_REGS; ++i) acc[mi][i] = silu(acc[mi][i]) * acc[mi + 1][i];
  }
}

// A warpgroup's rows of W of a tile, to C: through shared memory, so that a row of C gets 128 bytes at once.
__device__ __forceinline__ void store_tile(const AccReg (&acc)[MI][ACC_REGS], const GroupTile& at, int first_block,
                                           u32 chunks, u16* c, int n, int wg_thread, int barrier) {
  constexpr int STEP = GATED ? 2 : 1;
  const int columns = GATED ? n / 2 : n, lane = wg_thread % 32, warp = wg_thread / 32;
  int turn = 0;
#pragma unroll
  for (int mi = 0; mi < MI; mi += STEP) {
    const int column = block_row(at.row, first_block + mi, n);
#pragma unroll
    for (int ch = 0; ch < BN / CHUNK; ++ch, ++turn) {
      if (at.begin + ch * CHUNK >= at.end) break;
      const u32 chunk = chunks + turn % 2 * CHUNK_BYTES;
      write_chunk(acc[mi], chunk, ch, warp, lane);
      named_sync(barrier, 128);  // also: the chunk before the last one has been read
#pragma unroll
      for (int unit = wg_thread; unit < CHUNK * 8; unit += 128) {
        const int row = at.begin + ch * CHUNK + unit / 8, col = column + unit % 8 * 8;
        if (row < at.end && col < columns) {
          u32 v[4];
          load_shared(chunk + chunk_at(unit / 8, unit % 8), v);
          store_vector(c + static_cast<u64>(row) * columns + col, v);
        }
      }
    }
  }
  named_sync(barrier, 128);  // the next tile writes to these chunks
}

__device__ __forceinline__ void consume(GroupWalk walk, u32 smem, u16* c, const u16* bias, int n, int k_iters,
                                        int warpgroup, int wg_thread) {
  AccReg acc[MI][ACC_REGS];
  Ring ring;
  const int wg_row = PINGPONG ? 0 : warpgroup * WG_ROWS;
  const u32 w = descriptor_low(smem + (W_K_MAJOR ? wg_row * 128 : wg_row / 64 * BK * 128), 16);
  const u32 a = descriptor_low(smem + W_BYTES, 16);
  int turn = 0;
  if (PINGPONG && warpgroup == 1) named_arrive(ORDER_BARRIER, 256);
  GroupTile at;
  for (; walk.next(at); ++turn) {
    if (PINGPONG && turn % 2 != warpgroup) {
      ring.skip(k_iters);
      continue;
    }
    if constexpr (PINGPONG) named_sync(ORDER_BARRIER + warpgroup, 256);
    u32 previous = 0;
#pragma unroll 1
    for (int i = 0; i < k_iters; ++i) {
      mbar_wait(smem + FULL_OFFSET + 8 * ring.stage, ring.parity);
      wgmma_fence();
      multiply_stage(acc, w, a, ring.stage, i == 0);
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        release_stage(smem, previous, wg_thread);
      }
      previous = ring.stage;
      ring.next();
    }
    if (PINGPONG && walk.has_next()) named_arrive(ORDER_BARRIER + 1 - warpgroup, 256);
    wgmma_wait<0>();
    release_stage(smem, previous, wg_thread);
    finish_sums(acc, at, wg_row / 64, bias, n, wg_thread);
    store_tile(acc, at, wg_row / 64, smem + EPI_OFFSET + warpgroup * 2 * CHUNK_BYTES, c, n, wg_thread,
               EPILOGUE_BARRIER + warpgroup);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sm90_grouped_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_w,
                      const int* __restrict__ ends, u16* __restrict__ c, const u16* __restrict__ bias, int rows, int n,
                      int k, int groups) {
  extern __shared__ __align__(1024) unsigned char smem_base[];
  const u32 smem = smem_u32(smem_base);
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
  const int wg_thread = threadIdx.x % 128;
  const bool producer_warp = threadIdx.x / 32 == 4 * CONSUMERS;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  pdl_launch_dependents();
  if (threadIdx.x == 128 * CONSUMERS) {
    constexpr int READERS = (PINGPONG ? 1 : CONSUMERS) * CLUSTER;
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(smem + FULL_OFFSET + 8 * s, 1);
      mbar_init(smem + EMPTY_OFFSET + 8 * s, READERS);
    }
    fence_mbar_init();
    tma_prefetch(&map_a);
    tma_prefetch(&map_w);
  }
  int* const table = reinterpret_cast<int*>(smem_base + TABLE_OFFSET);
  pdl_wait();  // a predecessor may write what follows
  if (threadIdx.x < 32) make_group_table<BN>(table, ends, groups, rows, static_cast<int>(threadIdx.x));
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();  // the peer's barriers are there
  const int row_tiles = (n + ROWS * CLUSTER - 1) / (ROWS * CLUSTER);
  const GroupWalk walk(table, groups, row_tiles, static_cast<int>(blockIdx.x) / CLUSTER,
                       static_cast<int>(gridDim.x) / CLUSTER, rank, static_cast<int>(threadIdx.x) % 32);
  const int k_iters = (k + BK - 1) / BK;
  if (warpgroup == CONSUMERS) {
    if constexpr (CONSUMERS > 1) setmaxnreg_dec<PRODUCER_REGS>();
    if (producer_warp) produce(walk, &map_a, &map_w, smem, n, k_iters, rank, threadIdx.x % 32 == 0);
  } else {
    if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMER_REGS>();
    consume(walk, smem, c, bias, n, k_iters, warpgroup, wg_thread);
  }
}
