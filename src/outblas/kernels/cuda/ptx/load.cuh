// Loads of 16 bytes for operands that are streamed: read once, never again by this CTA.
// PTX ISA: Data Movement and Conversion Instructions: ld, cp.async.
#pragma once
#include "ptx/types.cuh"

// The text of a load with QUALIFIERS and further OPERANDS, and the text of a copy into shared memory.
// Both move 16 bytes; they give zeros, and read nothing, if `valid` is false.
#define LOAD_OR_ZEROS(QUALIFIERS, OPERANDS, ...)                           \
  asm volatile(                                                            \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"                          \
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"   \
      "@p ld.global" QUALIFIERS ".v4.u32 {%0, %1, %2, %3}, [%4]" OPERANDS  \
      ";\n}"                                                               \
      : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])                 \
      : "l"(src), "r"(static_cast<int>(valid)) __VA_ARGS__                 \
      : "memory")
#define COPY_OR_ZEROS(QUALIFIERS)                                                                                 \
  asm volatile("cp.async" QUALIFIERS " [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory")

// ld.global.v4, no place in L1, a miss brings PREFETCH bytes into L2. Not .nc: a predecessor under programmatic dependent
// launch may have written the operand.
template <int PREFETCH>
__device__ __forceinline__ void load_stream(const void* src, bool valid, u32 (&v)[4]) {
  static_assert(PREFETCH == 128 || PREFETCH == 256, "L2 prefetch of 128 or 256 bytes");
  if constexpr (PREFETCH == 256)
    LOAD_OR_ZEROS(".L1::no_allocate.L2::256B", "", );
  else
    LOAD_OR_ZEROS(".L1::no_allocate.L2::128B", "", );
}

// ld.global.v4 through L1, for what other warps of the CTA read too.
__device__ __forceinline__ void load_shared_by_warps(const void* src, bool valid, u32 (&v)[4]) {
  LOAD_OR_ZEROS("", "", );
}

// cp.async.cg with an L2 prefetch size: past L1.
template <int PREFETCH>
__device__ __forceinline__ void copy_stream(u32 dst, const void* src, bool valid) {
  static_assert(PREFETCH == 128 || PREFETCH == 256, "L2 prefetch of 128 or 256 bytes");
  if constexpr (PREFETCH == 256)
    COPY_OR_ZEROS(".cg.shared.global.L2::256B");
  else
    COPY_OR_ZEROS(".cg.shared.global.L2::128B");
}

// load_stream with a policy for L2 (ptx/cache_policy.cuh). PTX ISA: ld: .L2::cache_hint. There is no such cp.async here: ptxas
// 13.0 encodes one whose shared-memory address has a uniform part with a policy that traps ("illegal instruction").
template <int PREFETCH>
__device__ __forceinline__ void load_stream_hint(const void* src, bool valid, u32 (&v)[4], u64 policy) {
  static_assert(PREFETCH == 128 || PREFETCH == 256, "L2 prefetch of 128 or 256 bytes");
  if constexpr (PREFETCH == 256)
    LOAD_OR_ZEROS(".L1::no_allocate.L2::cache_hint.L2::256B", ", %6", , "l"(policy));
  else
    LOAD_OR_ZEROS(".L1::no_allocate.L2::cache_hint.L2::128B", ", %6", , "l"(policy));
}

// cp.async.bulk.prefetch.L2 (sm_90): prefetches a multiple of 16 bytes from a multiple of 16 into L2, without a wait.
// PTX ISA: cp.async.bulk.prefetch.
__device__ __forceinline__ void prefetch_into_l2(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// cp.async.ca: through L1.
__device__ __forceinline__ void copy_shared_by_warps(u32 dst, const void* src, bool valid) {
  COPY_OR_ZEROS(".ca.shared.global");
}

#undef LOAD_OR_ZEROS
#undef COPY_OR_ZEROS

// ld.shared.v4.u32: 16 bytes.
__device__ __forceinline__ void load_shared(u32 addr, u32 (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(addr)
               : "memory");
}

// prmt: halves (low of a, low of b) and (high of a, high of b). PTX ISA: prmt.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
