@COMMENT@
#pragma once
#include <cuda.h>

#include <cstddef>

// How a function of the driver is called; define it before the include to find them otherwise, e.g. by dlsym.
#ifndef OUTBLAS_DRIVER
#define OUTBLAS_DRIVER(name) name
#endif

namespace @NAME@ {

constexpr const char* ENTRY = "@ENTRY@";
constexpr int M = @M@, N = @N@, K = @K@;
constexpr unsigned GRID[3] = {@GRID@};
constexpr unsigned BLOCK = @THREADS@, SHARED_BYTES = @SHARED_BYTES@, CLUSTER_CTAS = @CLUSTER@;
constexpr bool DEPENDENT = @DEPENDENT@;  // programmatic dependent launch
constexpr std::size_t ALIGN_BYTES = @ALIGNMENT@;  // of the addresses of A, B and C
// Memory that launches of one stream may share; its first COUNTERS_BYTES are zero before the first of them.
constexpr std::size_t WORKSPACE_BYTES = @WORKSPACE_BYTES@, COUNTERS_BYTES = @COUNTERS_BYTES@;

@ENCODE@// Once per function: allow its shared memory, and a cluster of more than 8 CTAs.
inline CUresult prepare(CUfunction function) {
  const CUresult status = OUTBLAS_DRIVER(cuFuncSetAttribute)(
      function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(SHARED_BYTES));
  if (status != CUDA_SUCCESS || CLUSTER_CTAS <= 8) return status;
  return OUTBLAS_DRIVER(cuFuncSetAttribute)(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
}

// The kernel of a cubin in memory, in the current context; the module is the caller's to unload.
inline CUresult load(const void* image, CUmodule* module, CUfunction* function) {
  if (const CUresult status = OUTBLAS_DRIVER(cuModuleLoadData)(module, image)) return status;
  if (const CUresult status = OUTBLAS_DRIVER(cuModuleGetFunction)(function, *module, ENTRY)) return status;
  return prepare(*function);
}

// Enqueues C = A B on a stream. It neither allocates nor waits. Addresses as above; C overlaps neither A
// nor B. `workspace`: WORKSPACE_BYTES, aligned as cuMemAlloc does, used by no other stream at the same time.
inline CUresult launch(CUfunction function, CUstream stream, CUdeviceptr a, CUdeviceptr b, CUdeviceptr c,
                       CUdeviceptr workspace = 0) {
  if ((a | b | c) % ALIGN_BYTES != 0 || (WORKSPACE_BYTES != 0 && workspace == 0)) return CUDA_ERROR_INVALID_VALUE;
  int m = M, n = N, k = K;
@PARAMS@
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (CLUSTER_CTAS > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count].value.clusterDim.x = CLUSTER_CTAS;
    attributes[count].value.clusterDim.y = 1;
    attributes[count].value.clusterDim.z = 1;
    ++count;
  }
  if (DEPENDENT) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[count].value.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  CUlaunchConfig config = {};
  config.gridDimX = GRID[0];
  config.gridDimY = GRID[1];
  config.gridDimZ = GRID[2];
  config.blockDimX = BLOCK;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = SHARED_BYTES;
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return OUTBLAS_DRIVER(cuLaunchKernelEx)(&config, function, parameters, nullptr);
}

}  // namespace @NAME@
