// CUTLASS 2.x: mma.sync with a ring of cp.async stages, as it runs on an A100. TN and NN, fp16 and bf16. {{WHAT}}
/* outblas-launch
{"form": "host", "acc": "{{ACC}}", "uses": ["cutlass"], "requires": ["N % 8 == 0", "K % 8 == 0"]}
*/
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_universal.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle_streamk.h>

#if OUTBLAS_BF16
using Element = cutlass::bfloat16_t;
#else
using Element = cutlass::half_t;
#endif
using LayoutA = cutlass::layout::RowMajor;
#if OUTBLAS_NN
using LayoutB = cutlass::layout::RowMajor;  // K x N
#else
using LayoutB = cutlass::layout::ColumnMajor;  // N x K row-major
#endif
using LayoutC = cutlass::layout::RowMajor;
using Accumulator = {{ACCUMULATOR}};
constexpr int ALIGN = 8;  // elements: 16 bytes, one cp.async

using Tile = cutlass::gemm::GemmShape<{{TILE_M}}, {{TILE_N}}, {{TILE_K}}>;
using WarpTile = cutlass::gemm::GemmShape<{{WARP_M}}, {{WARP_N}}, {{TILE_K}}>;
using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
using Epilogue = cutlass::epilogue::thread::LinearCombination<Element, ALIGN, Accumulator, Accumulator>;
using Swizzle = cutlass::gemm::threadblock::{{SWIZZLE}};

using Gemm = cutlass::gemm::device::GemmUniversal<
    Element, LayoutA, Element, LayoutB, Element, LayoutC, Accumulator, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, Tile, WarpTile, Instruction, Epilogue, Swizzle, {{STAGES}}, ALIGN, ALIGN>;

// Made anew in every call, on the host's stack: nothing is kept by address.
static typename Gemm::Arguments arguments(const void* A, const void* B, void* C, int M, int N, int K) {
#if OUTBLAS_NN
  const int ldb = N;
#else
  const int ldb = K;
#endif
  // beta is 0: the epilogue reads no C.
  return {cutlass::gemm::GemmUniversalMode::kGemm, {M, N, K}, {{SPLITS}}, {Accumulator(1), Accumulator(0)},
          A, B, C, C, 0, 0, 0, 0, K, ldb, N, N};
}

extern "C" size_t outblas_workspace(int M, int N, int K) {
  return Gemm::get_workspace_size(arguments(nullptr, nullptr, nullptr, M, N, K));
}

extern "C" int outblas_launch(const void* A, const void* B, void* C, int M, int N, int K, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  const auto all = arguments(A, B, C, M, N, K);
  if (Gemm::can_implement(all) != cutlass::Status::kSuccess || Gemm::get_workspace_size(all) > workspace_bytes) return -1;
  Gemm gemm;
  if (gemm.initialize(all, workspace, stream) != cutlass::Status::kSuccess ||
      gemm.run(stream) != cutlass::Status::kSuccess) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? -1 : static_cast<int>(error);
  }
  return 0;
}
