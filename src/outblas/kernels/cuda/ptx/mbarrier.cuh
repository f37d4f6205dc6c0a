// Memory barriers in shared memory. PTX ISA: Parallel Synchronization and Communication
// Instructions: mbarrier.
#pragma once
#include "ptx/types.cuh"

// mbarrier.init: `count` arrivals complete a phase.
__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

// fence.mbarrier_init: makes initialised barriers visible to the cluster.
// PTX ISA: membar / fence.
__device__ __forceinline__ void fence_mbar_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// fence.proxy.async: orders generic-proxy writes before async-proxy (TMA, wgmma) accesses.
// PTX ISA: membar / fence.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// mbarrier.arrive.expect_tx: one arrival that also announces `bytes` of asynchronous writes.
__device__ __forceinline__ void mbar_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// mbarrier.arrive: one arrival at a barrier of this CTA.
__device__ __forceinline__ void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// mbarrier.arrive on the same barrier of another CTA of the cluster (mapa gives its address). It says
// "I have read this stage": nothing was written, so the default semantics serve. With .release.cluster
// ptxas emits MEMBAR.ALL.GPU, which cost about 0.8 us per stage.
__device__ __forceinline__ void mbar_arrive_remote(u32 bar, u32 cta) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
      "r"(cta)
      : "memory");
}

// mbarrier.try_wait: blocks until the phase of the given parity has completed.
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same with cluster scope: also acquires what other CTAs wrote before they arrived.
__device__ __forceinline__ void mbar_wait_cluster(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
