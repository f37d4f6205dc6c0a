// CUTLASS 3.x on Hopper: TMA and wgmma by the collective builder, warp-specialised. TN and NN, fp16 and bf16, accumulation
// in fp32. {{WHAT}}
/* outblas-launch
{"form": "host", "acc": "fp32", "uses": ["cutlass"], "requires": ["N % 8 == 0", "K % 8 == 0"]}
*/
#define NDEBUG  // an assertion between two wgmma makes the compiler wait for each

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/kernel_hardware_info.hpp>

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
constexpr int ALIGN = 8;  // elements: 16 bytes, what TMA needs of a row

using Tile = cute::Shape<cute::Int<{{TILE_M}}>, cute::Int<{{TILE_N}}>, cute::Int<{{TILE_K}}>>;
using Cluster = cute::Shape<cute::Int<{{CLUSTER_M}}>, cute::Int<{{CLUSTER_N}}>, cute::Int<1>>;

// C is void: no product reads what its output held before.
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutC, ALIGN, Element, LayoutC, ALIGN,
    cutlass::epilogue::{{EPILOGUE_SCHEDULE}}>::CollectiveOp;

using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, ALIGN, Element, LayoutB, ALIGN, float, Tile,
    Cluster, {{STAGES}},
    cutlass::gemm::{{KERNEL_SCHEDULE}}>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                    {{SCHEDULER_TYPE}}>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

// Made anew in every call, on the host's stack: nothing is kept by address.
static typename Gemm::Arguments arguments(const void* A, const void* B, void* C, int M, int N, int K) {
  typename Kernel::StrideA a{};
  typename Kernel::StrideB b{};
  typename Kernel::StrideD c{};
  cute::get<0>(a) = K;
#if OUTBLAS_NN
  cute::get<1>(b) = N;
#else
  cute::get<0>(b) = K;
#endif
  cute::get<0>(c) = N;
  cutlass::KernelHardwareInfo hardware;
  cudaGetDevice(&hardware.device_id);
  hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);
  typename Gemm::Arguments all{cutlass::gemm::GemmUniversalMode::kGemm,
                               {M, N, K, 1},
                               {static_cast<const Element*>(A), a, static_cast<const Element*>(B), b},
                               {{1.0f, 0.0f}, nullptr, {}, static_cast<Element*>(C), c},
                               hardware};
  all.scheduler.max_swizzle_size = {{SWIZZLE}};
  return all;
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
