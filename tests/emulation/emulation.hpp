// CUDA kernels on the CPU, for their indices and their protocol, not their speed: a CTA's threads are fibers, one cluster
// runs at a time. What is asynchronous on a GPU (cp.async, TMA, wgmma) happens either as early or as late as it may
// (EMULATE_LATE), so that a stage that is read too soon, or given back too soon, gives wrong numbers.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

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

constexpr u32 WINDOW = 256 * 1024;      // of a CTA's shared memory; aligned to itself, as descriptors hold 18 bits

inline bool late() {
  static const bool is = std::getenv("EMULATE_LATE") != nullptr;
  return is;
}
[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::_Exit(3);
}

struct Gather {  // threads that do one thing together
  int arrived = 0;
  u64 generation = 0;
  void* slots[128];
};
struct Mbarrier {
  int count = 0, pending = 0;
  long bytes = 0;
  u64 completed = 0;
};
struct Wgmma {
  int n;
  u64 a, b;
  bool accumulate;
  float* d[128];
};
struct Warpgroup {
  Gather gather;
  std::vector<std::vector<Wgmma>> groups{1};
};
struct Cta {
  dim3 index;
  int rank = 0, threads = 0, alive = 0;
  unsigned char* shared = nullptr;
  std::map<int, Gather> barriers;
  std::map<u32, Mbarrier> mbarriers;
  std::vector<Gather> warps;
  std::vector<int> warp_alive;
  std::vector<Warpgroup> warpgroups;
};
struct Thread {
  dim3 index;
  int linear = 0;
  Cta* cta = nullptr;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  u64 cluster_phase = 0;
  std::vector<std::vector<std::function<void()>>> copies{1}, stores{1};  // by group, the last one open
};
struct Machine {
  dim3 grid, block, cluster;
  std::vector<Cta> ctas;
  std::vector<Thread> threads;
  Thread* current = nullptr;
  ucontext_t scheduler;
  unsigned char* arena = nullptr;
  int cluster_arrived = 0;
  u64 cluster_completed = 0, progress = 0;
  std::function<void()> body;
};
inline Machine& machine() {
  static Machine it;
  return it;
}
inline Thread& self() { return *machine().current; }
inline Cta& cta() { return *self().cta; }

inline void yield() { swapcontext(&self().context, &machine().scheduler); }
template <class Condition>
inline void wait_until(Condition condition) {
  while (!condition()) yield();
  ++machine().progress;
}

// The last of `count` threads runs `act` on what all of them brought.
inline void together(Gather& at, int slot, int count, void* mine, const std::function<void(void**)>& act) {
  at.slots[slot] = mine;
  const u64 generation = at.generation;
  ++machine().progress;
  if (++at.arrived >= count) {
    if (act) act(at.slots);
    at.arrived = 0;
    ++at.generation;
  } else {
    wait_until([&] { return at.generation != generation; });
  }
}
inline void warp_together(void* mine, const std::function<void(void**)>& act) {
  const int warp = self().linear / 32;
  together(cta().warps[warp], self().linear % 32, cta().warp_alive[warp], mine, act);
}
inline void barrier(int id, int threads) {
  Gather& at = cta().barriers[id];
  const u64 generation = at.generation;
  ++machine().progress;
  ++at.arrived;
  wait_until([&] {
    if (at.generation == generation && at.arrived >= (threads ? threads : cta().alive)) at.arrived = 0, ++at.generation;
    return at.generation != generation;
  });
}

inline unsigned char* address(u32 at) {
  Machine& m = machine();
  const u64 base = reinterpret_cast<u64>(m.arena);
  if (at < base || at >= base + m.ctas.size() * WINDOW) fail("an address outside of shared memory");
  return reinterpret_cast<unsigned char*>(static_cast<u64>(at));
}
inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
inline u16& element(u32 at) { return *reinterpret_cast<u16*>(address(at)); }

inline void* static_shared(u32 offset) { return cta().shared + offset; }
inline unsigned char* dynamic_shared() { return cta().shared; }

inline float widened(u16 bits, bool bf16) {
  if (bf16) {
    const u32 wide = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
inline u16 rounded(float value, bool bf16) {
  u16 bits;
  if (bf16) {
    u32 wide;
    std::memcpy(&wide, &value, 4);
    if (value != value) return 0x7FFF;
    return static_cast<u16>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
  const _Float16 half = static_cast<_Float16>(value);
  std::memcpy(&bits, &half, 2);
  return bits;
}

// --- mbarriers -----------------------------------------------------------------------------------------------------
inline Mbarrier& mbarrier(u32 at) {
  Machine& m = machine();
  Cta& owner = m.ctas[(at - static_cast<u32>(reinterpret_cast<u64>(m.arena))) / WINDOW];
  if (!owner.mbarriers.count(at)) fail("an mbarrier that was not initialised");
  if (owner.alive == 0) fail("an mbarrier of a CTA that has ended");
  return owner.mbarriers[at];
}
inline void advance(Mbarrier& b) {
  ++machine().progress;
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.completed;
}
inline void arrive(u32 at) {
  Mbarrier& b = mbarrier(at);
  if (b.pending == 0) fail("more arrivals than an mbarrier counts");
  --b.pending;
  advance(b);
}

// --- wgmma ---------------------------------------------------------------------------------------------------------
inline u32 start_of(u64 descriptor) {
  return static_cast<u32>(reinterpret_cast<u64>(cta().shared)) | (static_cast<u32>(descriptor) & 0x3FFF) << 4;
}
inline void run(const Wgmma& op) {
  const u32 a = start_of(op.a), b = start_of(op.b);
  const u32 stride_a = (op.a >> 32 & 0x3FFF) << 4, stride_b = (op.b >> 32 & 0x3FFF) << 4;
  if (op.a >> 62 != 1 || op.b >> 62 != 1) fail("a descriptor that is not of 128 swizzled bytes");
  const auto at = [](u32 start, u32 stride, int row, int k) {
    return widened(element(swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2)), OUTBLAS_BF16);
  };
  std::vector<float> left(64 * 16), right(op.n * 16);
  for (int r = 0; r < 64; ++r)
    for (int k = 0; k < 16; ++k) left[r * 16 + k] = at(a, stride_a, r, k);
  for (int c = 0; c < op.n; ++c)
    for (int k = 0; k < 16; ++k) right[c * 16 + k] = at(b, stride_b, c, k);
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < op.n; ++c) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += left[r * 16 + k] * right[c * 16 + k];
      float& d = op.d[r / 16 * 32 + r % 8 * 4 + c % 8 / 2][c / 8 * 4 + r % 16 / 8 * 2 + c % 2];
      d = op.accumulate ? d + sum : sum;
    }
}
inline void drain(Warpgroup& group, size_t keep) {  // all closed groups but the last `keep`
  const size_t closed = group.groups.size() - 1;
  if (closed <= keep) return;
  for (size_t i = 0; i < closed - keep; ++i)
    for (const Wgmma& op : group.groups[i]) run(op);
  group.groups.erase(group.groups.begin(), group.groups.begin() + (closed - keep));
}
inline Warpgroup& warpgroup() { return cta().warpgroups[self().linear / 128]; }
inline void warpgroup_together(void* mine, const std::function<void(void**)>& act) {
  together(warpgroup().gather, self().linear % 128, 128, mine, act);
}
inline void wgmma(float* d, int n, u64 a, u64 b, bool accumulate) {
  Warpgroup& group = warpgroup();
  warpgroup_together(d, [&](void** slots) {
    Wgmma op{n, a, b, accumulate, {}};
    for (int i = 0; i < 128; ++i) op.d[i] = static_cast<float*>(slots[i]);
    if (late())
      group.groups.back().push_back(op);
    else
      run(op);
  });
}

// --- groups of a thread's own copies ---------------------------------------------------------------------------------
using Groups = std::vector<std::vector<std::function<void()>>>;
inline void enqueue(Groups& groups, std::function<void()> what) {
  if (late())
    groups.back().push_back(std::move(what));
  else
    what();
}
inline void drain(Groups& groups, size_t keep) {
  const size_t closed = groups.size() - 1;
  if (closed <= keep) return;
  for (size_t i = 0; i < closed - keep; ++i)
    for (auto& each : groups[i]) each();
  groups.erase(groups.begin(), groups.begin() + (closed - keep));
}

// --- TMA -----------------------------------------------------------------------------------------------------------
struct Map {
  u16* data;
  int rows, cols, box_rows, box_cols, swizzle;
};
inline Map map_of(const TensorMap* from) {
  Map map;
  std::memcpy(&map, from, sizeof map);
  return map;
}
inline u32 in_box(const Map& map, u32 base, int row, int col) {
  if (map.swizzle != 128 || map.box_cols != 64 || base % 1024) fail("a box that the emulation does not know");
  return swizzled(base + row * 128 + col * 2);
}
inline void load_box(const Map& map, u32 to, u32 bar, int x, int y) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c) {
      const bool inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.cols;
      element(in_box(map, to, r, c)) = inside ? map.data[static_cast<size_t>(y + r) * map.cols + x + c] : 0;
    }
  Mbarrier& b = mbarrier(bar);
  b.bytes -= map.box_rows * map.box_cols * 2;
  advance(b);
}
inline void store_box(const Map& map, u32 from, int x, int y) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c)
      if (y + r < map.rows && x + c < map.cols)
        map.data[static_cast<size_t>(y + r) * map.cols + x + c] = element(in_box(map, from, r, c));
}

// --- the machine ---------------------------------------------------------------------------------------------------
inline void entry() {
  machine().body();
  Thread& t = self();
  drain(t.stores, 0);
  t.done = true;
  --t.cta->alive;
  --t.cta->warp_alive[t.linear / 32];
  ++machine().progress;
  yield();
}
inline void run_cluster(dim3 first) {
  Machine& m = machine();
  const int threads = m.block.x * m.block.y * m.block.z, ctas = m.cluster.x * m.cluster.y * m.cluster.z;
  m.ctas.assign(ctas, Cta{});
  m.cluster_arrived = 0, m.cluster_completed = 0;
  for (int r = 0; r < ctas; ++r) {
    Cta& c = m.ctas[r];
    c.index = {first.x + r % m.cluster.x, first.y + r / m.cluster.x % m.cluster.y, first.z + r / m.cluster.x / m.cluster.y};
    c.rank = r, c.threads = c.alive = threads, c.shared = m.arena + r * WINDOW;
    std::memset(c.shared, 0xFF, WINDOW);  // NaN
    c.warps.resize((threads + 31) / 32);
    c.warp_alive.assign((threads + 31) / 32, 32);
    c.warpgroups.resize((threads + 127) / 128);
  }
  m.threads.clear();
  m.threads.resize(static_cast<size_t>(threads) * ctas);
  for (size_t i = 0; i < m.threads.size(); ++i) {
    Thread& t = m.threads[i];
    t.linear = i % threads, t.cta = &m.ctas[i / threads];
    t.index = {t.linear % m.block.x, t.linear / m.block.x % m.block.y, t.linear / m.block.x / m.block.y};
    constexpr size_t STACK = 64 * 1024;
    t.stack.reset(new char[STACK]);
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = STACK;
    t.context.uc_link = nullptr;
    makecontext(&t.context, entry, 0);
  }
  for (size_t left = m.threads.size(); left;) {
    const u64 before = m.progress;
    for (Thread& t : m.threads) {
      if (t.done) continue;
      m.current = &t;
      swapcontext(&m.scheduler, &t.context);
      if (t.done) --left;
    }
    if (m.progress == before) fail("deadlock");
  }
}
inline void launch(dim3 grid, dim3 block, dim3 cluster, std::function<void()> body) {
  Machine& m = machine();
  m.grid = grid, m.block = block, m.cluster = cluster, m.body = std::move(body);
  const size_t bytes = static_cast<size_t>(cluster.x * cluster.y * cluster.z + 1) * WINDOW;
  void* low = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
  if (low == MAP_FAILED) fail("no memory below 2 GiB");
  m.arena = reinterpret_cast<unsigned char*>((reinterpret_cast<u64>(low) + WINDOW - 1) / WINDOW * WINDOW);
  std::vector<dim3> order;
  for (u32 z = 0; z < grid.z; z += cluster.z)
    for (u32 y = 0; y < grid.y; y += cluster.y)
      for (u32 x = 0; x < grid.x; x += cluster.x) order.push_back({x, y, z});
  if (late()) std::reverse(order.begin(), order.end());  // CTAs come in any order
  for (const dim3& first : order) run_cluster(first);
}
}  // namespace emu

#define threadIdx (emu::self().index)
#define blockIdx (emu::cta().index)
#define gridDim (emu::machine().grid)
#define blockDim (emu::machine().block)

inline void __syncthreads() { emu::barrier(0, 0); }
inline void __syncwarp() { emu::warp_together(nullptr, nullptr); }
template <class T>
inline T __shfl_xor_sync(u32, T value, int apart) {
  struct Mine {
    T value, got;
    int apart;
  } mine{value, value, apart};
  emu::warp_together(&mine, [](void** slots) {
    for (int i = 0; i < 32; ++i) {
      Mine* to = static_cast<Mine*>(slots[i]);
      to->got = static_cast<Mine*>(slots[i ^ to->apart])->value;
    }
  });
  return mine.got;
}
template <class T>
inline T __shfl_sync(u32, T value, int from) {
  struct Mine {
    T value, got;
    int from;
  } mine{value, value, from};
  emu::warp_together(&mine, [](void** slots) {
    for (int i = 0; i < 32; ++i) {
      Mine* to = static_cast<Mine*>(slots[i]);
      to->got = static_cast<Mine*>(slots[to->from])->value;
    }
  });
  return mine.got;
}

// --- outblas' wrappers -----------------------------------------------------------------------------------------------
inline u32 smem_u32(const void* p) { return static_cast<u32>(reinterpret_cast<u64>(p)); }
template <bool BF16>
inline u32 pack2(float low, float high) {
  return emu::rounded(low, BF16) | static_cast<u32>(emu::rounded(high, BF16)) << 16;
}

namespace emu {
struct Tiles {
  u32 addr;
  u32 r[4];
};
inline void matrix(Tiles& mine, bool trans, bool store) {
  warp_together(&mine, [trans, store](void** slots) {
    for (int t = 0; t < 4; ++t)
      for (int lane = 0; lane < 32; ++lane) {
        u32& r = static_cast<Tiles*>(slots[lane])->r[t];
        for (int half = 0; half < 2; ++half) {
          const int row = trans ? lane % 4 * 2 + half : lane / 4, col = trans ? lane / 4 : lane % 4 * 2 + half;
          const u32 addr = static_cast<Tiles*>(slots[8 * t + row])->addr;
          if (addr % 16) fail("a row of a matrix that is not aligned");
          u16& e = element(addr + col * 2);
          if (store)
            e = static_cast<u16>(r >> 16 * half);
          else
            r = half ? (r & 0xFFFF) | static_cast<u32>(e) << 16 : e;
        }
      }
  });
}
}  // namespace emu
inline void ldmatrix_x4(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  emu::Tiles t{addr, {0, 0, 0, 0}};
  emu::matrix(t, false, false);
  a = t.r[0], b = t.r[1], c = t.r[2], d = t.r[3];
}
inline void ldmatrix_x4_trans(u32 addr, u32& a, u32& b, u32& c, u32& d) {
  emu::Tiles t{addr, {0, 0, 0, 0}};
  emu::matrix(t, true, false);
  a = t.r[0], b = t.r[1], c = t.r[2], d = t.r[3];
}
inline void stmatrix_x4(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  emu::Tiles t{addr, {a, b, c, d}};
  emu::matrix(t, false, true);
}
template <bool BF16>
inline void mma_f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Mine {
    float* d;
    const u32* a;
    u32 b[2];
  } mine{d, a, {b0, b1}};
  emu::warp_together(&mine, [](void** slots) {
    const auto of = [&](int lane) { return static_cast<Mine*>(slots[lane]); };
    float sum[16][8];
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 8; ++c) {
        sum[r][c] = 0;
        for (int k = 0; k < 16; ++k) {
          const u32 x = of(r % 8 * 4 + k % 8 / 2)->a[r / 8 + k / 8 * 2], y = of(c * 4 + k % 8 / 2)->b[k / 8];
          sum[r][c] += emu::widened(x >> k % 2 * 16 & 0xFFFF, BF16) * emu::widened(y >> k % 2 * 16 & 0xFFFF, BF16);
        }
      }
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 8; ++c) of(r % 8 * 4 + c / 2)->d[r / 8 * 2 + c % 2] += sum[r][c];
  });
}
template <int BYTES>
inline void cp_async(u32 dst, const void* src, bool valid) {
  emu::enqueue(emu::self().copies, [=] {
    if (valid)
      std::memcpy(emu::address(dst), src, BYTES);
    else
      std::memset(emu::address(dst), 0, BYTES);
  });
}
inline void cp_async_commit() { emu::self().copies.emplace_back(); }
template <int N>
inline void cp_async_wait() {
  emu::drain(emu::self().copies, N);
}
inline void store_f32x4(float* to, const float (&v)[4]) { std::memcpy(to, v, 16); }
inline void load_f32x4_of_other_sms(float (&v)[4], const float* from) { std::memcpy(v, from, 16); }
inline u32 count_in_turn(u32* counter, u32 last) {
  const u32 before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
inline void mbar_init(u32 bar, u32 count) {
  emu::Mbarrier b;
  b.count = b.pending = count;
  emu::cta().mbarriers[bar] = b;
}
inline void fence_mbar_init() {}
inline void fence_proxy_async() {}
inline void mbar_arrive_expect_tx(u32 bar, u32 bytes) {
  emu::mbarrier(bar).bytes += bytes;
  emu::arrive(bar);
}
inline void mbar_arrive(u32 bar) { emu::arrive(bar); }
inline void mbar_arrive_remote(u32 bar, u32 to) { emu::arrive(bar + (to - emu::cta().rank) * emu::WINDOW); }
inline void mbar_wait(u32 bar, u32 parity) {
  emu::wait_until([=] { return (emu::mbarrier(bar).completed & 1) != parity; });
}
inline void tma_load(u32 dst, const TensorMap* map, u32 bar, int x, int y) {
  emu::load_box(emu::map_of(map), dst, bar, x, y);
}
inline void tma_load_multicast(u32 dst, const TensorMap* map, u32 bar, int x, int y, u16 mask) {
  for (u32 to = 0; to < emu::machine().ctas.size(); ++to) {
    const u32 apart = (to - emu::cta().rank) * emu::WINDOW;
    if (mask >> to & 1) emu::load_box(emu::map_of(map), dst + apart, bar + apart, x, y);
  }
}
inline void tma_store(const TensorMap* map, u32 src, int x, int y) {
  emu::enqueue(emu::self().stores, [=] { emu::store_box(emu::map_of(map), src, x, y); });
}
inline void tma_store_commit() { emu::self().stores.emplace_back(); }
template <int N>
inline void tma_store_wait_read() {
  emu::drain(emu::self().stores, N);
}
inline u32 descriptor_low(u32 addr, u32 leading_bytes) { return (addr & 0x3FFFF) >> 4 | leading_bytes >> 4 << 16; }
inline u64 descriptor(u32 low, u32 stride_bytes, u32 swizzle) {
  return static_cast<u64>(stride_bytes >> 4 | swizzle << 30) << 32 | low;
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  emu::warpgroup_together(nullptr, [](void**) { emu::warpgroup().groups.emplace_back(); });
}
template <int N>
inline void wgmma_wait() {
  emu::warpgroup_together(nullptr, [](void**) { emu::drain(emu::warpgroup(), N); });
}
inline void named_sync(int id, int threads) { emu::barrier(id + 16, threads); }
template <int N>
inline void setmaxnreg_dec() {}
template <int N>
inline void setmaxnreg_inc() {}
inline u32 cluster_rank() { return emu::cta().rank; }
inline void cluster_arrive() {
  emu::Machine& m = emu::machine();
  emu::self().cluster_phase = m.cluster_completed;
  ++m.progress;
  if (++m.cluster_arrived == static_cast<int>(m.threads.size())) m.cluster_arrived = 0, ++m.cluster_completed;
}
inline void cluster_wait() {
  emu::wait_until([] { return emu::machine().cluster_completed != emu::self().cluster_phase; });
}
