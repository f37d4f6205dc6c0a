// What benchmarks/rivals/torch_stand_in.cuh asks of CUDA, on the CPU: memory of the host, and a list of what was enqueued.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

struct CUstream_st;
struct CUevent_st;
typedef CUstream_st* cudaStream_t;
typedef CUevent_st* cudaEvent_t;
typedef int cudaError_t;
constexpr cudaError_t cudaSuccess = 0;
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline std::string& enqueued() {
  static std::string all;
  return all;
}

inline cudaError_t note(const char* what, cudaStream_t stream) {
  enqueued() += std::string(what) + "@" + std::to_string(reinterpret_cast<size_t>(stream)) + " ";
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return note("malloc", nullptr);
}
inline cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  std::memset(pointer, value, bytes);
  return note("memset", stream);
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) { return note("event", stream); }
inline cudaError_t cudaDeviceSynchronize() { return note("wait", nullptr); }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return note("launch", stream);
}
inline cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return note("together", stream);
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return note("configured", config->stream);
}
template <class... Expected, class... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*)(Expected...), Actual&&...) {
  return note("typed", config->stream);
}
