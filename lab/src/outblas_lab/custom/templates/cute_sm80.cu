// CuTe on mma.sync: cp.async into a ring of {{STAGES}} stages of {{TILE_M}} x {{TILE_N}} x {{TILE_K}}, ldmatrix,
// {{WARPS_M}} x {{WARPS_N}} warps. TN and NN, fp16 and bf16, accumulation in fp32.
/* outblas-launch
{"form": "device", "entry": "gemm_cute_sm80", "acc": "fp32", "uses": ["cutlass"],
 "grid": ["ceil(N, {{TILE_N}})", "ceil(M, {{TILE_M}})", 1], "block": [{{THREADS}}, 1, 1], "shared": {{SHARED}},
 "requires": ["N % 8 == 0", "K % 8 == 0", "ceil(M, {{TILE_M}}) <= 65535"]}
*/
#include <cute/tensor.hpp>

using namespace cute;

constexpr int TILE_M = {{TILE_M}}, TILE_N = {{TILE_N}}, TILE_K = {{TILE_K}}, STAGES = {{STAGES}};
constexpr int WARPS_M = {{WARPS_M}}, WARPS_N = {{WARPS_N}}, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int VECTOR = 8;  // elements of one copy: 16 bytes

#if OUTBLAS_BF16
using Element = cutlass::bfloat16_t;
using Instruction = SM80_16x8x16_F32BF16BF16F32_TN;
#else
using Element = cutlass::half_t;
using Instruction = SM80_16x8x16_F32F16F16F32_TN;
#endif

// Eight rows of SPAN contiguous elements, units of 16 bytes exchanged so that eight rows of one unit meet 32 banks.
template <int SPAN>
using SwizzleOf = Swizzle<SPAN == 64 ? 3 : 2, 3, 3>;
constexpr int SPAN_K = TILE_K % 64 == 0 ? 64 : 32, SPAN_N = TILE_N % 64 == 0 ? 64 : 32;
using AtomK = decltype(composition(SwizzleOf<SPAN_K>{}, Layout<Shape<_8, Int<SPAN_K>>, Stride<Int<SPAN_K>, _1>>{}));
using AtomN = decltype(composition(SwizzleOf<SPAN_N>{}, Layout<Shape<Int<SPAN_N>, _8>, Stride<_1, Int<SPAN_N>>>{}));

// Which thread copies which vector of a tile whose contiguous extent is SPAN: neighbours next to each other.
template <int SPAN>
using AlongSecond = Layout<Shape<Int<THREADS / (SPAN / VECTOR)>, Int<SPAN / VECTOR>>, Stride<Int<SPAN / VECTOR>, _1>>;
template <int SPAN>
using AlongFirst = Layout<Shape<Int<SPAN / VECTOR>, Int<THREADS / (SPAN / VECTOR)>>, Stride<_1, Int<SPAN / VECTOR>>>;

using SharedA = decltype(tile_to_shape(AtomK{}, Shape<Int<TILE_M>, Int<TILE_K>, Int<STAGES>>{}));
using CopyInstruction = Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>;
using CopyA = decltype(make_tiled_copy(CopyInstruction{}, AlongSecond<SPAN_K>{}, Layout<Shape<_1, Int<VECTOR>>>{}));
using LoadA = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
#if OUTBLAS_NN
using StrideB = Stride<_1, int>;
using SharedB = decltype(tile_to_shape(AtomN{}, Shape<Int<TILE_N>, Int<TILE_K>, Int<STAGES>>{}));
using CopyB = decltype(make_tiled_copy(CopyInstruction{}, AlongFirst<SPAN_N>{}, Layout<Shape<Int<VECTOR>, _1>>{}));
using LoadB = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
#else
using StrideB = Stride<int, _1>;
using SharedB = decltype(tile_to_shape(AtomK{}, Shape<Int<TILE_N>, Int<TILE_K>, Int<STAGES>>{}));
using CopyB = CopyA;
using LoadB = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
#endif
using Mma = decltype(make_tiled_mma(MMA_Atom<Instruction>{}, Layout<Shape<Int<WARPS_M>, Int<WARPS_N>, _1>>{},
                                    Tile<Int<16 * WARPS_M>, Int<16 * WARPS_N>, _16>{}));

static_assert(sizeof(Element) * (cosize_v<SharedA> + cosize_v<SharedB>) <= {{SHARED}}, "shared memory of the launch");

// Every vector of this thread's part of a tile; zeros for those outside of rows x K. `at` holds their coordinates in the
// tile; the first `rows` and `depth` of them lie inside.
template <class Copy, class From, class To, class Coordinates>
__device__ __forceinline__ void copy_inside(const Copy& how, const From& from, const To& to, const Coordinates& at, int rows,
                                            int depth) {
  CUTE_UNROLL
  for (int i = 0; i < size<1>(from); ++i) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(from); ++k) {
      const auto where = at(0, i, k);
      copy(how.with(get<0>(where) < rows && get<1>(where) < depth), from(_, i, k), to(_, i, k));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gemm_cute_sm80(const Element* A, const Element* B, Element* C, int M, int N, int K, void* workspace) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* const shared_a = reinterpret_cast<Element*>(shared);
  Tensor s_a = make_tensor(make_smem_ptr(shared_a), SharedA{});
  Tensor s_b = make_tensor(make_smem_ptr(shared_a + cosize_v<SharedA>), SharedB{});

  const int tile_m = blockIdx.y, tile_n = blockIdx.x, steps = (K + TILE_K - 1) / TILE_K;
  Tensor all_a = make_tensor(make_gmem_ptr(A), make_shape(M, K), make_stride(K, _1{}));
#if OUTBLAS_NN
  Tensor all_b = make_tensor(make_gmem_ptr(B), make_shape(N, K), make_stride(_1{}, N));
#else
  Tensor all_b = make_tensor(make_gmem_ptr(B), make_shape(N, K), make_stride(K, _1{}));
#endif
  Tensor g_a = local_tile(all_a, Shape<Int<TILE_M>, Int<TILE_K>>{}, make_coord(tile_m, _));  // (TILE_M, TILE_K, steps)
  Tensor g_b = local_tile(all_b, Shape<Int<TILE_N>, Int<TILE_K>>{}, make_coord(tile_n, _));
  const int rows_a = M - tile_m * TILE_M, rows_b = N - tile_n * TILE_N;

  const CopyA copy_a;
  const CopyB copy_b;
  auto mine_a = copy_a.get_slice(threadIdx.x);
  auto mine_b = copy_b.get_slice(threadIdx.x);
  Tensor from_a = mine_a.partition_S(g_a);
  Tensor to_a = mine_a.partition_D(s_a);
  Tensor from_b = mine_b.partition_S(g_b);
  Tensor to_b = mine_b.partition_D(s_b);
  Tensor at_a = mine_a.partition_S(make_identity_tensor(Shape<Int<TILE_M>, Int<TILE_K>>{}));
  Tensor at_b = mine_b.partition_S(make_identity_tensor(Shape<Int<TILE_N>, Int<TILE_K>>{}));

  // A step behind the last is an empty group, so that groups and steps count alike.
  auto fetch = [&](int step) {
    if (step < steps) {
      copy_inside(copy_a, from_a(_, _, _, step), to_a(_, _, _, step % STAGES), at_a, rows_a, K - step * TILE_K);
      copy_inside(copy_b, from_b(_, _, _, step), to_b(_, _, _, step % STAGES), at_b, rows_b, K - step * TILE_K);
    }
    cp_async_fence();
  };

  const Mma mma;
  auto mine = mma.get_slice(threadIdx.x);
  Tensor tile_c = make_identity_tensor(Shape<Int<TILE_M>, Int<TILE_N>>{});
  Tensor at_c = mine.partition_C(tile_c);
  Tensor acc = partition_fragment_C(mma, Shape<Int<TILE_M>, Int<TILE_N>>{});
  clear(acc);
  Tensor r_a = mine.partition_fragment_A(s_a(_, _, 0));
  Tensor r_b = mine.partition_fragment_B(s_b(_, _, 0));
  auto load_a = make_tiled_copy_A(LoadA{}, mma);
  auto load_b = make_tiled_copy_B(LoadB{}, mma);
  Tensor out_a = load_a.get_slice(threadIdx.x).partition_S(s_a);
  Tensor out_b = load_b.get_slice(threadIdx.x).partition_S(s_b);
  Tensor in_a = load_a.get_slice(threadIdx.x).retile_D(r_a);
  Tensor in_b = load_b.get_slice(threadIdx.x).retile_D(r_b);

  for (int step = 0; step < STAGES - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this step is there for all, and all have left the stage that is filled next
    fetch(step + STAGES - 1);
    const int stage = step % STAGES;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(r_a); ++k) {
      copy(load_a, out_a(_, _, k, stage), in_a(_, _, k));
      copy(load_b, out_b(_, _, k, stage), in_b(_, _, k));
      gemm(mma, r_a(_, _, k), r_b(_, _, k), acc);
    }
  }

  CUTE_UNROLL
  for (int i = 0; i < size(acc); i += 2) {  // neighbours of a row; N is even
    const int row = get<0>(at_c(i)), col = get<1>(at_c(i));
    if (row < rows_a && col < rows_b) {
      const Element pair[2] = {Element(acc(i)), Element(acc(i + 1))};
      const size_t to = (static_cast<size_t>(tile_m) * TILE_M + row) * N + static_cast<size_t>(tile_n) * TILE_N + col;
      *reinterpret_cast<uint32_t*>(C + to) =
          static_cast<uint32_t>(pair[0].raw()) | static_cast<uint32_t>(pair[1].raw()) << 16;
    }
  }
}
