// Global memory, in vectors of 1, 2 or 4 registers. PTX ISA: Data Movement and Conversion Instructions: ld, st.
// Not ld.global.nc: under programmatic dependent launch a predecessor may still write the operands after this
// kernel has begun, which .nc forbids.
#pragma once
#include "ptx/types.cuh"

// ld.global.v4/v2/b32: WORDS registers; zeros where `valid` is false.
template <int WORDS>
__device__ __forceinline__ void load_vector(u32 (&r)[WORDS], const u16* from, bool valid) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one load");
#pragma unroll
  for (int i = 0; i < WORDS; ++i) r[i] = 0;
  if constexpr (WORDS == 4)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
                 : "l"(from), "r"(static_cast<int>(valid))
                 : "memory");
  else if constexpr (WORDS == 2)
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
                 : "+r"(r[0]), "+r"(r[1])
                 : "l"(from), "r"(static_cast<int>(valid))
                 : "memory");
  else
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.b32 %0, [%1];\n}"
                 : "+r"(r[0])
                 : "l"(from), "r"(static_cast<int>(valid))
                 : "memory");
}

// st.global.v4/v2/b32.
template <int WORDS>
__device__ __forceinline__ void store_vector(u16* to, const u32 (&r)[WORDS]) {
  if constexpr (WORDS == 4)
    *reinterpret_cast<uint4*>(to) = make_uint4(r[0], r[1], r[2], r[3]);
  else if constexpr (WORDS == 2)
    *reinterpret_cast<uint2*>(to) = make_uint2(r[0], r[1]);
  else
    *reinterpret_cast<u32*>(to) = r[0];
}

// st.global.v4.f32.
__device__ __forceinline__ void store_f32x4(float* to, const float (&v)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// ld.relaxed.gpu.v4.f32, from L2 (L1 may hold what another SM has overwritten since).
__device__ __forceinline__ void load_f32x4_of_other_sms(float (&v)[4], const float* from) {
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(from)
               : "memory");
}

// atom.inc: adds one, or stores 0 if `last` was reached; returns the old value.
// acq_rel.gpu: a thread that counts later sees what this thread wrote, and what this thread has seen of its CTA behind
// a barrier. PTX ISA: atom; Memory Consistency Model.
__device__ __forceinline__ u32 count_in_turn(u32* counter, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// atom.add of 64 bits with the same ordering; returns the old value.
__device__ __forceinline__ u64 atomic_add_acq_rel(u64* word, u64 more) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(more) : "memory");
  return before;
}

// ld.acquire.gpu: later reads of this thread see what was written before the value that it returns.
__device__ __forceinline__ u64 load_acquire(const u64* word) {
  u64 value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// fence.acq_rel.cta: no memory access moves across. PTX ISA: membar / fence.
__device__ __forceinline__ void memory_fence_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
