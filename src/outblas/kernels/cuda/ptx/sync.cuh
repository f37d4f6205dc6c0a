// Barriers inside a CTA, warpgroup register budgets, programmatic dependent launch.
#pragma once
#include "ptx/types.cuh"

// barrier.cta.sync on a named barrier of `threads` threads. PTX ISA: bar / barrier.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier.cta.arrive: counts this thread without waiting. PTX ISA: bar / barrier.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier.cta.red.or: a barrier of `threads` threads that tells all of them whether `mine` holds for any.
// PTX ISA: bar / barrier.
__device__ __forceinline__ bool named_any(int id, int threads, bool mine) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(mine))
      : "memory");
  return any != 0;
}

// setmaxnreg: hands registers back, or takes them. PTX ISA: Miscellaneous Instructions: setmaxnreg.
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// griddepcontrol.launch_dependents: lets the next kernel of the stream start its prologue.
// PTX ISA: Control Flow / Parallel Synchronization: griddepcontrol.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: until the kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
