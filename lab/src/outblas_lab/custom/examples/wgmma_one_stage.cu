// The least that TMA and wgmma need: one stage, loaded by one thread, multiplied by two warpgroups, then the next. 128 x
// 128 x 64. TMA writes zeros past the edges, so that M, N and the tail of K are free. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_wgmma_one_stage", "acc": "fp32", "grid": ["ceil(N, 128)", "ceil(M, 128)", 1],
 "block": [256, 1, 1], "requires": ["K % 8 == 0", "ceil(M, 128) <= 65535"],
 "tensor_maps": [{"operand": "A", "box": [128, 64], "swizzle": 128}, {"operand": "B", "box": [128, 64], "swizzle": 128}]}
*/
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if OUTBLAS_NN
#error "gemm_wgmma_one_stage reads B as N x K (TN)"
#endif
#if OUTBLAS_BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int TILE = 128, DEPTH = 64, OPERAND_BYTES = TILE * DEPTH * ELEM;

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

__device__ __forceinline__ void store_two(u16* C, int row, int col, int M, int N, float first, float second) {
  const u32 pair = pack2<BF16>(first, second);
  if (row >= M) return;
  u16* to = C + static_cast<u64>(row) * N + col;
  if (col < N) to[0] = static_cast<u16>(pair);
  if (col + 1 < N) to[1] = static_cast<u16>(pair >> 16);
}

extern "C" __global__ void __launch_bounds__(256)
    gemm_wgmma_one_stage(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace,
                         const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b) {
  __shared__ __align__(1024) unsigned char tile_a[OPERAND_BYTES];
  __shared__ __align__(1024) unsigned char tile_b[OPERAND_BYTES];
  __shared__ __align__(8) u64 barrier;
  const u32 a = smem_u32(tile_a), b = smem_u32(tile_b), full = smem_u32(&barrier);
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (threadIdx.x == 0) {
    mbar_init(full, 1);
    fence_mbar_init();
  }
  __syncthreads();

  float acc[TILE / 2];
  u32 parity = 0;
  for (int k0 = 0; k0 < K; k0 += DEPTH, parity ^= 1) {
    if (threadIdx.x == 0) {
      mbar_arrive_expect_tx(full, 2 * OPERAND_BYTES);
      tma_load(a, &map_a, full, k0, row0);
      tma_load(b, &map_b, full, k0, col0);
    }
    mbar_wait(full, parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16)
      wgmma_m64n128k16(acc, k_major(a + warpgroup * 64 * 128 + k * ELEM), k_major(b + k * ELEM), k0 + k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    __syncthreads();  // both warpgroups have read the stage
  }
#pragma unroll
  for (int j = 0; j < TILE / 8; ++j) {
    const int row = row0 + warpgroup * 64 + warp * 16 + lane / 4, col = col0 + 8 * j + lane % 4 * 2;
    store_two(C, row, col, M, N, acc[4 * j], acc[4 * j + 1]);
    store_two(C, row + 8, col, M, N, acc[4 * j + 2], acc[4 * j + 3]);
  }
}
