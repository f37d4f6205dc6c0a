// A cluster of two CTAs below each other shares B: each fetches half of its rows and multicasts them to both. 128 x 256 x 64
// per CTA, four stages; a stage is free when both warpgroups of both CTAs have read it. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_wgmma_multicast", "acc": "fp32", "grid": ["2 * ceil(M, 256)", "ceil(N, 256)", 1],
 "block": [384, 1, 1], "cluster": [2, 1, 1], "shared": 197696,
 "requires": ["K % 8 == 0", "N % 2 == 0", "ceil(N, 256) <= 65535"],
 "tensor_maps": [{"operand": "A", "box": [128, 64], "swizzle": 128}, {"operand": "B", "box": [128, 64], "swizzle": 128}]}
*/
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if OUTBLAS_NN
#error "gemm_wgmma_multicast reads B as N x K (TN)"
#endif
#if OUTBLAS_BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif

constexpr bool BF16 = OUTBLAS_BF16;
constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, CTAS = 2;
constexpr int A_BYTES = BM * BK * ELEM, B_BYTES = BN * BK * ELEM, STAGE_BYTES = A_BYTES + B_BYTES;
// The barriers lie behind the stages; up to 1,008 bytes align the stages to 1,024, by the same number in both CTAs.
constexpr int FULL_OFFSET = STAGES * STAGE_BYTES, EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
static_assert(EMPTY_OFFSET + 8 * STAGES + 1024 <= 197696, "shared memory of the launch");

// D (+)= A B, m64n256k16, both from shared memory, both K-major; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
        "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
        "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
        "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
        "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
        "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

// Descriptor of a K-major operand at `addr` in rows of 128 swizzled bytes: 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 k_major(u32 addr) { return descriptor(descriptor_low(addr, 16), 1024, 1); }

// One thread: A of this CTA, and the rank's half of B for both.
__device__ __forceinline__ void produce(const TensorMap* map_a, const TensorMap* map_b, u32 smem, int row0, int col0,
                                        int steps, int rank) {
  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES, turn = step / STAGES;
    const u32 full = smem + FULL_OFFSET + 8 * stage, to = smem + stage * STAGE_BYTES;
    if (turn > 0) mbar_wait(smem + EMPTY_OFFSET + 8 * stage, (turn - 1) % 2);
    mbar_arrive_expect_tx(full, STAGE_BYTES);  // the other CTA's half arrives here, too
    tma_load(to, map_a, full, step * BK, row0);
    tma_load_multicast(to + A_BYTES + rank * (B_BYTES / CTAS), map_b, full, step * BK, col0 + rank * (BN / CTAS), 3);
  }
}

// One warpgroup: 64 rows of the tile.
__device__ __forceinline__ void consume(u16* C, int M, int N, u32 smem, int row0, int col0, int steps, int warpgroup) {
  const int wg_thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  float acc[BN / 2];
  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES;
    const u32 a = smem + stage * STAGE_BYTES + warpgroup * 64 * 128, b = smem + stage * STAGE_BYTES + A_BYTES;
    mbar_wait(smem + FULL_OFFSET + 8 * stage, step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK; k += 16)
      wgmma_m64n256k16(acc, k_major(a + k * ELEM), k_major(b + k * ELEM), step > 0 || k > 0);
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();
      if (wg_thread < CTAS) mbar_arrive_remote(smem + EMPTY_OFFSET + 8 * ((step - 1) % STAGES), wg_thread);
    }
  }
  wgmma_wait<0>();
  const int row = row0 + warpgroup * 64 + wg_thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    const int col = col0 + 8 * j + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (row + 8 * half < M && col < N)  // N is even
        *reinterpret_cast<u32*>(C + static_cast<u64>(row + 8 * half) * N + col) =
            pack2<BF16>(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    gemm_wgmma_multicast(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace,
                         const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 smem = (smem_u32(shared) + 1023) & ~1023u;
  const int rank = static_cast<int>(cluster_rank());
  const int row0 = blockIdx.x * BM, col0 = blockIdx.y * BN, steps = (K + BK - 1) / BK;
  const int warpgroup = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(smem + FULL_OFFSET + 8 * s, 1);
      mbar_init(smem + EMPTY_OFFSET + 8 * s, 2 * CTAS);  // two warpgroups of each CTA
    }
    fence_mbar_init();
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();  // no load into a CTA whose barriers are not there
  if (warpgroup == 2) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 256) produce(&map_a, &map_b, smem, row0, col0, steps, rank);
    __syncwarp();
  } else {
    setmaxnreg_inc<232>();
    consume(C, M, N, smem, row0, col0, steps, warpgroup);
    __syncwarp();
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();  // no CTA ends before what the other sends it has arrived
}
