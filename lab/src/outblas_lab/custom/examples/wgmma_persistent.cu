// As many CTAs as multiprocessors, each over many tiles.
// The producer runs ahead into the next tile while the last one is stored, through shared memory, by TMA. Tiles are
// walked in bands of eight tile rows, which share B in L2. 128 x 128 x 64, four stages. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_wgmma_persistent", "acc": "fp32", "grid": ["min(SMS, ceil(M, 128) * ceil(N, 128))", 1, 1],
 "block": [384, 1, 1], "shared": 164992, "requires": ["K % 8 == 0", "N % 8 == 0"],
 "tensor_maps": [{"operand": "A", "box": [128, 64], "swizzle": 128}, {"operand": "B", "box": [128, 64], "swizzle": 128},
                 {"operand": "C", "box": [64, 64], "swizzle": 128}]}
*/
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if OUTBLAS_NN
#error "gemm_wgmma_persistent reads B as N x K (TN)"
#endif
#if OUTBLAS_BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int TILE = 128, DEPTH = 64, STAGES = 4, BAND = 8;
constexpr int OPERAND_BYTES = TILE * DEPTH * ELEM, STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int CHUNK_BYTES = 64 * 64 * ELEM;  // 64 x 64 of C; each warpgroup has two
// Stages | chunks of C | barriers, behind up to 1,008 bytes that align them to 1,024.
constexpr int CHUNK_OFFSET = STAGES * STAGE_BYTES, FULL_OFFSET = CHUNK_OFFSET + 4 * CHUNK_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
static_assert(EMPTY_OFFSET + 8 * STAGES + 1024 <= 164992, "shared memory of the launch");

// D (+)= A B, m64n128k16, both from shared memory, both K-major; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Descriptor of a K-major operand at `addr` in rows of 128 swizzled bytes: 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 k_major(u32 addr) { return descriptor(descriptor_low(addr, 16), 1024, 1); }

struct Origin {
  int row, col;
};

// Down the rows of a band first, then on to its next column.
__device__ __forceinline__ Origin origin(int tile, int tiles_m, int tiles_n) {
  const int band = tile / (BAND * tiles_n), first = band * BAND;
  const int height = min(BAND, tiles_m - first), within = tile - first * tiles_n;
  return {(first + within % height) * TILE, within / height * TILE};
}

__device__ __forceinline__ void produce(const TensorMap* map_a, const TensorMap* map_b, u32 smem, int tiles_m,
                                        int tiles_n, int steps) {
  u32 fill = 0;  // stages filled so far, over all tiles
  for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    const Origin at = origin(tile, tiles_m, tiles_n);
    for (int step = 0; step < steps; ++step, ++fill) {
      const u32 stage = fill % STAGES, full = smem + FULL_OFFSET + 8 * stage, to = smem + stage * STAGE_BYTES;
      if (fill >= STAGES) mbar_wait(smem + EMPTY_OFFSET + 8 * stage, (fill / STAGES - 1) % 2);
      mbar_arrive_expect_tx(full, STAGE_BYTES);
      tma_load(to, map_a, full, step * DEPTH, at.row);
      tma_load(to + OPERAND_BYTES, map_b, full, step * DEPTH, at.col);
    }
  }
}

// 64 x 128 of C: registers -> two swizzled chunks -> TMA, which clips what lies outside.
__device__ __forceinline__ void store(const float (&acc)[TILE / 2], const TensorMap* map_c, u32 chunks, int row, int col,
                                      int warpgroup) {
  const int wg_thread = threadIdx.x % 128, lane = threadIdx.x % 32, local = wg_thread / 32 * 16 + lane % 16;
  if (wg_thread == 0) tma_store_wait_read<0>();  // the stores of the tile before have read the chunks
  named_sync(1 + warpgroup, 128);
#pragma unroll
  for (int j = 0; j < TILE / 8; j += 2) {  // lanes 0-15 address unit j, lanes 16-31 unit j + 1
    const int unit = (j + lane / 16) % 8 ^ local % 8;
    stmatrix_x4(chunks + j / 8 * CHUNK_BYTES + local * 128 + unit * 16, pack2<BF16>(acc[4 * j], acc[4 * j + 1]),
                pack2<BF16>(acc[4 * j + 2], acc[4 * j + 3]), pack2<BF16>(acc[4 * j + 4], acc[4 * j + 5]),
                pack2<BF16>(acc[4 * j + 6], acc[4 * j + 7]));
  }
  fence_proxy_async();
  named_sync(1 + warpgroup, 128);
  if (wg_thread == 0) {
    tma_store(map_c, chunks, col, row);
    tma_store(map_c, chunks + CHUNK_BYTES, col + 64, row);
    tma_store_commit();
  }
}

__device__ __forceinline__ void consume(const TensorMap* map_c, u32 smem, int tiles_m, int tiles_n, int steps,
                                        int warpgroup) {
  float acc[TILE / 2];
  u32 read = 0;  // stages read so far, over all tiles
  for (int tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    const Origin at = origin(tile, tiles_m, tiles_n);
    for (int step = 0; step < steps; ++step, ++read) {
      const u32 stage = read % STAGES, from = smem + stage * STAGE_BYTES;
      mbar_wait(smem + FULL_OFFSET + 8 * stage, read / STAGES % 2);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < DEPTH; k += 16)
        wgmma_m64n128k16(acc, k_major(from + warpgroup * 64 * 128 + k * ELEM), k_major(from + OPERAND_BYTES + k * ELEM),
                         step > 0 || k > 0);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        if (threadIdx.x % 128 == 0) mbar_arrive(smem + EMPTY_OFFSET + 8 * ((read - 1) % STAGES));
      }
    }
    wgmma_wait<0>();
    if (threadIdx.x % 128 == 0) mbar_arrive(smem + EMPTY_OFFSET + 8 * ((read - 1) % STAGES));
    store(acc, map_c, smem + CHUNK_OFFSET + warpgroup * 2 * CHUNK_BYTES, at.row + warpgroup * 64, at.col, warpgroup);
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // shared memory outlives its readers
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_wgmma_persistent(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace,
                          const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                          const __grid_constant__ TensorMap map_c) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (smem_u32(shared) + 1023) & ~1023u;
  const int tiles_m = (M + TILE - 1) / TILE, tiles_n = (N + TILE - 1) / TILE, steps = (K + DEPTH - 1) / DEPTH;
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(smem + FULL_OFFSET + 8 * s, 1);
      mbar_init(smem + EMPTY_OFFSET + 8 * s, 2);  // one arrival of each warpgroup
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (warpgroup == 2) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 256) produce(&map_a, &map_b, smem, tiles_m, tiles_n, steps);
  } else {
    setmaxnreg_inc<232>();
    consume(&map_c, smem, tiles_m, tiles_n, steps, warpgroup);
  }
}
