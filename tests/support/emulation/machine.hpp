// The machine of emulation.hpp: fibers, barriers, mbarriers, and what is put off until somebody waits for it.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define OUTBLAS_BF16 0  // kernels say these with each call
#define OUTBLAS_NN 0
#include "emulation.hpp"
#undef threadIdx
#undef blockIdx
#undef gridDim
#undef blockDim

namespace emu {

constexpr u32 WINDOW = 256 * 1024;    // of a CTA's shared memory; aligned to itself, as descriptors hold 18 bits

bool late() {
  static const bool is = std::getenv("EMULATE_LATE") != nullptr;
  return is;
}
[[noreturn]] void fail(const char* what) {
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
  bool accumulate, bf16, n_major;  // of B
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
  std::map<std::pair<int, u64>, bool> any;  // by barrier and generation
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
Machine& machine() {
  static Machine it;
  return it;
}
Thread& self() { return *machine().current; }
Cta& cta() { return *self().cta; }

void yield() { swapcontext(&self().context, &machine().scheduler); }
template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
  ++machine().progress;
}

// The last of `count` threads runs `act` on what all of them brought.
void together(Gather& at, int slot, int count, void* mine, const std::function<void(void**)>& act) {
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
void warp_together(void* mine, const std::function<void(void**)>& act) {
  const int warp = self().linear / 32;
  together(cta().warps[warp], self().linear % 32, cta().warp_alive[warp], mine, act);
}
void barrier(int id, int threads) {
  Gather& at = cta().barriers[id];
  const u64 generation = at.generation;
  ++machine().progress;
  ++at.arrived;
  wait_until([&] {
    if (at.generation == generation && at.arrived >= (threads ? threads : cta().alive)) at.arrived = 0, ++at.generation;
    return at.generation != generation;
  });
}

void arrive_at_barrier(int id, int threads) {
  Gather& at = cta().barriers[id];
  ++machine().progress;
  if (++at.arrived >= threads) at.arrived = 0, ++at.generation;
}

bool barrier_any(int id, int threads, bool mine) {  // `mine` of any thread
  bool& any = cta().any[{id, cta().barriers[id].generation}];
  any = any || mine;
  barrier(id, threads);
  return any;
}

unsigned char* address(u32 at) {
  Machine& m = machine();
  const u64 base = reinterpret_cast<u64>(m.arena);
  if (at < base || at >= base + m.ctas.size() * WINDOW) fail("an address outside of shared memory");
  return reinterpret_cast<unsigned char*>(static_cast<u64>(at));
}
u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
u16& element(u32 at) { return *reinterpret_cast<u16*>(address(at)); }


float widened(u16 bits, bool bf16) {
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
u16 rounded(float value, bool bf16) {
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
Mbarrier& mbarrier(u32 at) {
  Machine& m = machine();
  Cta& owner = m.ctas[(at - static_cast<u32>(reinterpret_cast<u64>(m.arena))) / WINDOW];
  if (!owner.mbarriers.count(at)) fail("an mbarrier that was not initialised");
  if (owner.alive == 0) fail("an mbarrier of a CTA that has ended");
  return owner.mbarriers[at];
}
void advance(Mbarrier& b) {
  ++machine().progress;
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.completed;
}
void arrive(u32 at) {
  Mbarrier& b = mbarrier(at);
  if (b.pending == 0) fail("more arrivals than an mbarrier counts");
  --b.pending;
  advance(b);
}

// --- wgmma ---------------------------------------------------------------------------------------------------------
u32 start_of(u64 descriptor) {
  return static_cast<u32>(reinterpret_cast<u64>(cta().shared)) | (static_cast<u32>(descriptor) & 0x3FFF) << 4;
}
void run(const Wgmma& op) {
  const u32 a = start_of(op.a), b = start_of(op.b), leading_b = (op.b >> 16 & 0x3FFF) << 4;
  const u32 stride_a = (op.a >> 32 & 0x3FFF) << 4, stride_b = (op.b >> 32 & 0x3FFF) << 4;
  if (op.a >> 62 != 1 || op.b >> 62 != 1) fail("a descriptor that is not of 128 swizzled bytes");
  const auto at = [&op](u32 start, u32 stride, int row, int k) {
    return widened(element(swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2)), op.bf16);
  };
  const auto n_major = [&](int col, int k) {
    return widened(element(swizzled(b + col / 64 * leading_b + k / 8 * stride_b + k % 8 * 128 + col % 64 * 2)), op.bf16);
  };
  std::vector<float> left(64 * 16), right(op.n * 16);
  for (int r = 0; r < 64; ++r)
    for (int k = 0; k < 16; ++k) left[r * 16 + k] = at(a, stride_a, r, k);
  for (int c = 0; c < op.n; ++c)
    for (int k = 0; k < 16; ++k) right[c * 16 + k] = op.n_major ? n_major(c, k) : at(b, stride_b, c, k);
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < op.n; ++c) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += left[r * 16 + k] * right[c * 16 + k];
      float& d = op.d[r / 16 * 32 + r % 8 * 4 + c % 8 / 2][c / 8 * 4 + r % 16 / 8 * 2 + c % 2];
      d = op.accumulate ? d + sum : sum;
    }
}
void drain(Warpgroup& group, size_t keep) {  // all closed groups but the last `keep`
  const size_t closed = group.groups.size() - 1;
  if (closed <= keep) return;
  for (size_t i = 0; i < closed - keep; ++i)
    for (const Wgmma& op : group.groups[i]) run(op);
  group.groups.erase(group.groups.begin(), group.groups.begin() + (closed - keep));
}
Warpgroup& warpgroup() { return cta().warpgroups[self().linear / 128]; }
void warpgroup_together(void* mine, const std::function<void(void**)>& act) {
  together(warpgroup().gather, self().linear % 128, 128, mine, act);
}
void wgmma_of(float* d, int n, u64 a, u64 b, bool accumulate, bool bf16, bool n_major) {
  Warpgroup& group = warpgroup();
  warpgroup_together(d, [&](void** slots) {
    Wgmma op{n, a, b, accumulate, bf16, n_major, {}};
    for (int i = 0; i < 128; ++i) op.d[i] = static_cast<float*>(slots[i]);
    if (late())
      group.groups.back().push_back(op);
    else
      run(op);
  });
}

// --- groups of a thread's own copies ---------------------------------------------------------------------------------
using Groups = std::vector<std::vector<std::function<void()>>>;
void enqueue(Groups& groups, std::function<void()> what) {
  if (late())
    groups.back().push_back(std::move(what));
  else
    what();
}
void drain(Groups& groups, size_t keep) {
  const size_t closed = groups.size() - 1;
  if (closed <= keep) return;
  for (size_t i = 0; i < closed - keep; ++i)
    for (auto& each : groups[i]) each();
  groups.erase(groups.begin(), groups.begin() + (closed - keep));
}

// --- TMA -----------------------------------------------------------------------------------------------------------
struct Map {
  u16* data;
  int rows, cols, box_rows, box_cols, swizzle, pitch;  // pitch: elements from row to row
  int turn = 0;  // rows of the upper half before as many of the lower; 0: all in their order
};
// What TMA wants of a matrix; a comb of one fulfils it where the matrix does not.
Map described_map(u16* data, int rows, int cols, const int* box, int comb) {
  Map map{data, rows, cols, box[0], box[1], box[2], cols, comb < -1 ? -1 - comb : 0};
  if (comb >= 0) {
    const int before = cols * comb % 8;
    map = {data + static_cast<size_t>(cols) * comb - before, (rows - comb + 7) / 8, cols + before, box[0], box[1], box[2],
           8 * cols};
  }
  if (comb >= 0 && (reinterpret_cast<u64>(map.data) % 16 || map.pitch % 8 || map.rows < 1)) fail("no matrix for TMA");
  return map;
}
Map map_of(const TensorMap* from) {
  Map map;
  std::memcpy(&map, from, sizeof map);
  return map;
}
u32 in_box(const Map& map, u32 base, int row, int col) {
  if (map.swizzle != 128 || map.box_cols != 64 || base % 128) fail("a box that the emulation does not know");
  return swizzled(base + row * 128 + col * 2);
}
void load_box(const Map& map, u32 to, u32 bar, int x, int y) {
  if (map.turn) fail("two coordinates for a map of more extents");
  // A GPU says "illegal instruction". NVIDIA's documentation does not.
  if (x * 2 % 16) fail("a box that does not begin at 16 bytes");
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c) {
      const bool inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.cols;
      element(in_box(map, to, r, c)) = inside ? map.data[static_cast<size_t>(y + r) * map.pitch + x + c] : 0;
    }
  Mbarrier& b = mbarrier(bar);
  b.bytes -= map.box_rows * map.box_cols * 2;
  advance(b);
}
// The extents: columns, rows of a turn, halves, turns of a half (runtime/tensor_map.py: encode_turns).
void load_turns(const Map& map, u32 to, u32 bar, int x, int y, int z, int w) {
  if (map.turn == 0 || map.rows % (2 * map.turn) || map.box_rows % (2 * map.turn)) fail("no whole turns");
  const int half = map.rows / 2;
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c) {
      const int i = y + r % map.turn, side = z + r / map.turn % 2, turn = w + r / map.turn / 2, col = x + c;
      const bool inside = col < map.cols && i < map.turn && side < 2 && turn < half / map.turn;
      const size_t at = static_cast<size_t>(side * half + turn * map.turn + i) * map.pitch + col;
      element(in_box(map, to, r, c)) = inside ? map.data[at] : 0;
    }
  Mbarrier& b = mbarrier(bar);
  b.bytes -= map.box_rows * map.box_cols * 2;
  advance(b);
}
void store_box(const Map& map, u32 from, int x, int y) {
  if (x * 2 % 16) fail("a box that does not begin at 16 bytes");
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c)
      if (y + r < map.rows && x + c < map.cols)
        map.data[static_cast<size_t>(y + r) * map.pitch + x + c] = element(in_box(map, from, r, c));
}

// --- the machine ---------------------------------------------------------------------------------------------------
void entry() {
  machine().body();
  Thread& t = self();
  drain(t.stores, 0);
  t.done = true;
  --t.cta->alive;
  --t.cta->warp_alive[t.linear / 32];
  ++machine().progress;
  yield();
}
void run_cluster(dim3 first) {
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
void launch(dim3 grid, dim3 block, dim3 cluster, std::function<void()> body) {
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
