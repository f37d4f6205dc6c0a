// CUDA kernels on the CPU, for their indices and their protocol, not their speed: a CTA's threads are fibers, one cluster
// runs at a time. What is asynchronous on a GPU (cp.async, TMA, wgmma) happens either as early or as late as it may
// (EMULATE_LATE), so that a stage that is read too soon, or given back too soon, gives wrong numbers. What a kernel's text
// needs is here; the machine is in machine.cpp, compiled once.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
constexpr int ELEM = 2;
struct alignas(64) TensorMap {
  char opaque[128];
};

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct dim3 {
  u32 x = 1, y = 1, z = 1;
};
struct uint4 {
  u32 x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }

namespace emu {
const dim3& thread_index();
const dim3& block_index();
const dim3& grid_size();
const dim3& block_size();
unsigned char* shared_window();  // of this CTA; its addresses fit into 32 bits
float widened(u16 bits, bool bf16);
u16 rounded(float value, bool bf16);
void arrive_at_barrier(int id, int threads);
void barrier(int id, int threads);  // 0 threads: all of the CTA that are left
bool barrier_any(int id, int threads, bool mine);
void warp_barrier();
void store(u32 addr, u16 value);
[[noreturn]] void fail(const char* what);
u32 shuffle(u32 value, int from_lane);
// Four 8x8 matrices between shared memory and the registers of a warp.
void matrices(u32 addr, u32 (&r)[4], bool transposed, bool store);
void check_aligned(const void* address, int bytes);
// 16 bytes of this lane.
void vector(u32 addr, u32 (&r)[4], bool store);
void mma(float* d, const u32* a, u32 b0, u32 b1, bool bf16);
void copy(u32 dst, const void* src, int bytes, bool valid);
void copy_commit();
void copy_wait(int groups);
u32 count(u32* counter, u32 last);
void mbarrier_init(u32 bar, u32 count);
void mbarrier_expect(u32 bar, u32 bytes);
void mbarrier_arrive(u32 bar, int to_rank);  // -1: of this CTA
void mbarrier_wait(u32 bar, u32 parity);
void box_load(u32 dst, const TensorMap* map, u32 bar, int x, int y, u32 mask);  // 0: to this CTA
// Of a map by turns: y in a turn, z one of the halves, w the turn.
void turns_load(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, int w, u32 mask);
void box_store(const TensorMap* map, u32 src, int x, int y);
void store_commit();
void store_wait(int groups);
void wgmma_of(float* d, int n, u64 a, u64 b, bool accumulate, bool bf16, bool n_major);
void wgmma_close();
void wgmma_drain(int groups);
u32 rank();
void arrive_at_cluster();
void wait_for_cluster();
inline void wgmma(float* d, int n, u64 a, u64 b, bool accumulate, bool n_major) {
  wgmma_of(d, n, a, b, accumulate, OUTBLAS_BF16, n_major);
}

// What every program has beside the machine: the kernel, and its tensor maps as (operand, box rows, columns, swizzle,
// comb). Comb s has the rows s, s + 8, ...; -1 is the whole matrix; -1 - t has t rows of its upper half, then t of its
// lower half, and so on.
void run_kernel(const void* A, const void* B, void* C, int M, int N, int K, void* workspace, const TensorMap* maps);
extern const int described[][5], described_count;
extern const bool nn;
}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define gridDim (emu::grid_size())
#define blockDim (emu::block_size())

inline void __syncthreads() { emu::barrier(0, 0); }
inline void __syncwarp() { emu::warp_barrier(); }
template <class T>
inline T __shfl_sync(u32, T value, int from) {
  static_assert(sizeof(T) == 4, "one register");
  u32 bits;
  std::memcpy(&bits, &value, 4);
  bits = emu::shuffle(bits, from);
  std::memcpy(&value, &bits, 4);
  return value;
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int apart) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ apart);
}

// The wrappers of src/outblas/kernels/cuda/ptx.
inline void pdl_launch_dependents() {}
inline void pdl_wait() {}
inline void store_shared(u32 addr, u16 value) { emu::store(addr, value); }
inline bool named_any(int id, int threads, bool mine) { return emu::barrier_any(id + 16, threads, mine); }
inline void unpack2(u32, float&, float&) { emu::fail("no sums in fp16 here"); }
inline void mma_f16(u32 (&)[2], const u32 (&)[4], u32, u32) { emu::fail("no sums in fp16 here"); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __uint_as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 smem_u32(const void* p) { return static_cast<u32>(reinterpret_cast<u64>(p)); }
template <bool BF16>
inline u32 pack2(float low, float high) {
  return emu::rounded(low, BF16) | static_cast<u32>(emu::rounded(high, BF16)) << 16;
}
inline void ldmatrix_x4(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  u32 r[4];
  emu::matrices(addr, r, false, false);
  a = r[0], b = r[1], c = r[2], d = r[3];
}
inline void ldmatrix_x4_trans(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  u32 r[4];
  emu::matrices(addr, r, true, false);
  a = r[0], b = r[1], c = r[2], d = r[3];
}
inline void stmatrix_x4(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  u32 r[4] = {a, b, c, d};
  emu::matrices(addr, r, false, true);
}
inline void stmatrix_x4_trans(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  u32 r[4] = {a, b, c, d};
  emu::matrices(addr, r, true, true);
}
inline void stmatrix_x2(u32, u32, u32) { emu::fail("no two matrices here"); }
inline void stmatrix_x2_trans(u32, u32, u32) { emu::fail("no two matrices here"); }
inline u32 transpose_8x8(u32 pair) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  u32 r = 0;
  for (int i = 0; i < 2; ++i)
    r |= (emu::shuffle(pair, (lane % 4 * 2 + i) * 4 + row / 2) >> row % 2 * 16 & 0xFFFF) << i * 16;
  return r;
}
inline void load_shared(u32 addr, u32 (&r)[4]) { emu::vector(addr, r, false); }
inline void store_shared_x4(u32 addr, const u32 (&r)[4]) {
  u32 copy[4] = {r[0], r[1], r[2], r[3]};
  emu::vector(addr, copy, true);
}
inline u32 low_halves(u32 first, u32 second) { return (first & 0xFFFF) | second << 16; }
inline u32 high_halves(u32 first, u32 second) { return first >> 16 | (second & 0xFFFF0000); }
inline u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 both = static_cast<u64>(high) << 32 | low;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<u32>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return r;
}
template <bool BF16>
inline void mma_f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emu::mma(d, a, b0, b1, BF16);
}
template <int BYTES>
inline void cp_async(u32 dst, const void* src, bool valid) {
  emu::copy(dst, src, BYTES, valid);
}
inline void cp_async_commit() { emu::copy_commit(); }
template <int N>
inline void cp_async_wait() {
  emu::copy_wait(N);
}
template <int WORDS>
inline void load_vector(u32 (&r)[WORDS], const u16* from, bool valid) {
  emu::check_aligned(from, 4 * WORDS);
  std::memset(r, 0, 4 * WORDS);
  if (valid) std::memcpy(r, from, 4 * WORDS);
}
template <int WORDS>
inline void store_vector(u16* to, const u32 (&r)[WORDS]) {
  emu::check_aligned(to, 4 * WORDS);
  std::memcpy(to, r, 4 * WORDS);
}
inline void store_f32x4(float* to, const float (&v)[4]) { std::memcpy(to, v, 16); }
inline void load_f32x4_of_other_sms(float (&v)[4], const float* from) { std::memcpy(v, from, 16); }
inline u32 count_in_turn(u32* counter, u32 last) { return emu::count(counter, last); }
inline void mbar_init(u32 bar, u32 count) { emu::mbarrier_init(bar, count); }
inline void fence_mbar_init() {}
inline void fence_proxy_async() {}
inline void mbar_arrive_expect_tx(u32 bar, u32 bytes) { emu::mbarrier_expect(bar, bytes); }
inline void mbar_arrive(u32 bar) { emu::mbarrier_arrive(bar, -1); }
inline void mbar_arrive_remote(u32 bar, u32 to) { emu::mbarrier_arrive(bar, static_cast<int>(to)); }
inline void mbar_wait(u32 bar, u32 parity) { emu::mbarrier_wait(bar, parity); }
inline void tma_prefetch(const TensorMap*) {}
inline void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) { emu::box_load(dst, map, bar, x, y, 0); }
inline void tma_load_multicast(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask) {
  emu::box_load(dst, map, bar, x, y, mask);
}
inline u64 evict_first_policy() { return 1; }
inline u64 evict_last_policy() { return 2; }
inline void tma_load_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u64) {
  emu::box_load(dst, map, bar, x, y, 0);
}
inline void tma_load_multicast_hint(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask, u64) {
  emu::box_load(dst, map, bar, x, y, mask);
}
template <bool HAS_POLICY>
inline void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, u64) {
  emu::turns_load(dst, map, bar, x, 0, y, z, 0);
}
template <bool SHARED, bool HAS_POLICY>
inline void tma_load_4d(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, int w, u16 mask, u64) {
  emu::turns_load(dst, map, bar, x, y, z, w, SHARED ? mask : 0);
}
inline void tma_store(const TensorMap* map, u32 src, int x, int y) { emu::box_store(map, src, x, y); }
inline void tma_store_hint(const TensorMap* map, u32 src, int x, int y, u64) { emu::box_store(map, src, x, y); }
inline void tma_store_commit() { emu::store_commit(); }
template <int N>
inline void tma_store_wait_read() {
  emu::store_wait(N);
}
inline u32 descriptor_low(u32 addr, u32 leading_bytes) { return (addr & 0x3FFFF) >> 4 | leading_bytes >> 4 << 16; }
inline u64 descriptor(u32 low, u32 stride_bytes, u32 swizzle) {
  return static_cast<u64>(stride_bytes >> 4 | swizzle << 30) << 32 | low;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { emu::wgmma_close(); }
template <int N>
inline void wgmma_wait() {
  emu::wgmma_drain(N);
}
inline void named_sync(int id, int threads) { emu::barrier(id + 16, threads); }
template <int N>
inline void setmaxnreg_dec() {}
template <int N>
inline void setmaxnreg_inc() {}
inline bool elect_one() {
  emu::warp_barrier();
  return threadIdx.x % 32 == 0;
}
inline void named_arrive(int id, int threads) { emu::arrive_at_barrier(id + 16, threads); }
inline u32 cluster_rank() { return emu::rank(); }
inline void cluster_arrive() { emu::arrive_at_cluster(); }
inline void cluster_wait() { emu::wait_for_cluster(); }
inline u32 map_to_cta(u32, u32) { emu::fail("no distributed shared memory here"); }
inline void st_async_v4(u32, u32, float, float, float, float) { emu::fail("no distributed shared memory here"); }
inline void mbar_wait_cluster(u32, u32) { emu::fail("no distributed shared memory here"); }
