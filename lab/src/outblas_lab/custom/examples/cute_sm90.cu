// CuTe on wgmma: its layouts for shared memory, its tiled multiplication and its fragments; TMA fills a ring of four stages
// that one thread feeds. 128 x 128 x 64, two warpgroups that share the tile. TN only.
/* outblas-launch
{"form": "device", "entry": "gemm_cute_sm90", "acc": "fp32", "uses": ["cutlass"],
 "grid": ["ceil(N, 128)", "ceil(M, 128)", 1], "block": [288, 1, 1], "shared": 132160,
 "requires": ["K % 8 == 0", "N % 2 == 0", "ceil(M, 128) <= 65535"],
 "tensor_maps": [{"operand": "A", "box": [128, 64], "swizzle": 128}, {"operand": "B", "box": [128, 64], "swizzle": 128}]}
*/
#include <cute/tensor.hpp>

#include "ptx/convert.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

#if OUTBLAS_NN
#error "gemm_cute_sm90 reads B as N x K (TN)"
#endif

using namespace cute;

constexpr bool BF16 = OUTBLAS_BF16;
#if OUTBLAS_BF16
using Element = bfloat16_t;
using Instruction = SM90_64x128x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>;
#else
using Element = half_t;
using Instruction = SM90_64x128x16_F32F16F16_SS<GMMA::Major::K, GMMA::Major::K>;
#endif

constexpr int STAGES = 4, OPERAND_BYTES = 128 * 64 * sizeof(Element);
using TileMN = Shape<_128, _128>;
using Shared = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<_128, _64, Int<STAGES>>{}));
using Mma = decltype(make_tiled_mma(MMA_Atom<Instruction>{}, Layout<Shape<_2, _1, _1>>{}));

// Stages of A | stages of B | full barriers | empty barriers, aligned to 1,024 bytes.
constexpr int B_OFFSET = STAGES * OPERAND_BYTES, FULL_OFFSET = 2 * B_OFFSET, EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
static_assert(EMPTY_OFFSET + 8 * STAGES + 1024 <= 132160, "shared memory of the launch");

extern "C" __global__ void __launch_bounds__(288)
    gemm_cute_sm90(const u16* A, const u16* B, u16* C, int M, int N, int K, void* workspace,
                   const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const aligned = shared + (1024 - smem_u32(shared) % 1024) % 1024;
  const u32 smem = smem_u32(aligned);
  const int row0 = blockIdx.y * 128, col0 = blockIdx.x * 128, steps = (K + 63) / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbar_init(smem + FULL_OFFSET + 8 * s, 1);
      mbar_init(smem + EMPTY_OFFSET + 8 * s, 2);  // one arrival of each warpgroup
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    if (threadIdx.x > 256) return;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % STAGES, turn = step / STAGES;
      const u32 full = smem + FULL_OFFSET + 8 * stage;
      if (turn > 0) mbar_wait(smem + EMPTY_OFFSET + 8 * stage, (turn - 1) % 2);
      mbar_arrive_expect_tx(full, 2 * OPERAND_BYTES);
      tma_load(smem + stage * OPERAND_BYTES, &map_a, full, step * 64, row0);
      tma_load(smem + B_OFFSET + stage * OPERAND_BYTES, &map_b, full, step * 64, col0);
    }
    return;
  }

  Tensor s_a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(aligned)), Shared{});
  Tensor s_b = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(aligned + B_OFFSET)), Shared{});
  Mma mma;
  auto mine = mma.get_slice(threadIdx.x);
  Tensor a = mine.make_fragment_A(mine.partition_A(s_a));  // descriptors: (MMA, MMA_M, MMA_K, stages)
  Tensor b = mine.make_fragment_B(mine.partition_B(s_b));
  Tensor acc = partition_fragment_C(mma, TileMN{});
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  for (int step = 0; step < steps; ++step) {
    const int stage = step % STAGES;
    mbar_wait(smem + FULL_OFFSET + 8 * stage, step / STAGES % 2);
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
      gemm(mma, a(_, _, k, stage), b(_, _, k, stage), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    if (step > 0) {
      warpgroup_wait<1>();
      if (threadIdx.x % 128 == 0) mbar_arrive(smem + EMPTY_OFFSET + 8 * ((step - 1) % STAGES));
    }
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);

  Tensor at = mine.partition_C(make_identity_tensor(TileMN{}));
  CUTE_UNROLL
  for (int i = 0; i < size(acc); i += 2) {  // neighbours of a row; N is even
    const int row = row0 + get<0>(at(i)), col = col0 + get<1>(at(i));
    if (row < M && col < N)
      *reinterpret_cast<u32*>(C + static_cast<u64>(row) * N + col) = pack2<BF16>(acc(i), acc(i + 1));
  }
}
