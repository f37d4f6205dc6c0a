// The machine of emulation.hpp, compiled once and linked to every kernel.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define OUTBLAS_BF16 0  // kernels say it with each call
#include "emulation.hpp"
#undef threadIdx
#undef blockIdx
#undef gridDim
#undef blockDim

namespace emu {

constexpr u32 WINDOW = 256 * 1024;      // of a CTA's shared memory; aligned to itself, as descriptors hold 18 bits

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
  bool accumulate, bf16;
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
  const u32 a = start_of(op.a), b = start_of(op.b);
  const u32 stride_a = (op.a >> 32 & 0x3FFF) << 4, stride_b = (op.b >> 32 & 0x3FFF) << 4;
  if (op.a >> 62 != 1 || op.b >> 62 != 1) fail("a descriptor that is not of 128 swizzled bytes");
  const auto at = [&op](u32 start, u32 stride, int row, int k) {
    return widened(element(swizzled(start + row / 8 * stride + row % 8 * 128 + k * 2)), op.bf16);
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
void wgmma_of(float* d, int n, u64 a, u64 b, bool accumulate, bool bf16) {
  Warpgroup& group = warpgroup();
  warpgroup_together(d, [&](void** slots) {
    Wgmma op{n, a, b, accumulate, bf16, {}};
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
  int rows, cols, box_rows, box_cols, swizzle;
};
Map map_of(const TensorMap* from) {
  Map map;
  std::memcpy(&map, from, sizeof map);
  return map;
}
u32 in_box(const Map& map, u32 base, int row, int col) {
  if (map.swizzle != 128 || map.box_cols != 64 || base % 1024) fail("a box that the emulation does not know");
  return swizzled(base + row * 128 + col * 2);
}
void load_box(const Map& map, u32 to, u32 bar, int x, int y) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c) {
      const bool inside = y + r >= 0 && y + r < map.rows && x + c >= 0 && x + c < map.cols;
      element(in_box(map, to, r, c)) = inside ? map.data[static_cast<size_t>(y + r) * map.cols + x + c] : 0;
    }
  Mbarrier& b = mbarrier(bar);
  b.bytes -= map.box_rows * map.box_cols * 2;
  advance(b);
}
void store_box(const Map& map, u32 from, int x, int y) {
  for (int r = 0; r < map.box_rows; ++r)
    for (int c = 0; c < map.box_cols; ++c)
      if (y + r < map.rows && x + c < map.cols)
        map.data[static_cast<size_t>(y + r) * map.cols + x + c] = element(in_box(map, from, r, c));
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


// --- what a kernel's text calls ------------------------------------------------------------------------------------------
const dim3& thread_index() { return self().index; }
const dim3& block_index() { return cta().index; }
const dim3& grid_size() { return machine().grid; }
const dim3& block_size() { return machine().block; }
unsigned char* shared_window() { return cta().shared; }
void warp_barrier() { warp_together(nullptr, nullptr); }
u32 shuffle(u32 value, int from_lane) {
  struct Mine {
    u32 value, got;
    int from;
  } mine{value, value, from_lane};
  warp_together(&mine, [](void** slots) {
    for (int i = 0; i < 32; ++i) {
      Mine* to = static_cast<Mine*>(slots[i]);
      to->got = static_cast<Mine*>(slots[to->from])->value;
    }
  });
  return mine.got;
}
struct Tiles {
  u32 addr;
  u32* r;
};
void matrices(u32 addr, u32 (&r)[4], bool transposed, bool store) {
  Tiles mine{addr, r};
  warp_together(&mine, [=](void** slots) {
    for (int t = 0; t < 4; ++t)
      for (int lane = 0; lane < 32; ++lane) {
        u32& r = static_cast<Tiles*>(slots[lane])->r[t];
        for (int half = 0; half < 2; ++half) {
          const int second = lane % 4 * 2 + half;
          const int row = transposed ? second : lane / 4, col = transposed ? lane / 4 : second;
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
void mma(float* d, const u32* a, u32 b0, u32 b1, bool bf16) {
  struct Mine {
    float* d;
    const u32* a;
    u32 b[2];
  } mine{d, a, {b0, b1}};
  warp_together(&mine, [bf16](void** slots) {
    const auto of = [&](int lane) { return static_cast<Mine*>(slots[lane]); };
    float sum[16][8], left[16][16], right[8][16];
    for (int k = 0; k < 16; ++k) {
      for (int r = 0; r < 16; ++r)
        left[r][k] = widened(of(r % 8 * 4 + k % 8 / 2)->a[r / 8 + k / 8 * 2] >> k % 2 * 16 & 0xFFFF, bf16);
      for (int c = 0; c < 8; ++c) right[c][k] = widened(of(c * 4 + k % 8 / 2)->b[k / 8] >> k % 2 * 16 & 0xFFFF, bf16);
    }
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 8; ++c) {
        sum[r][c] = 0;
        for (int k = 0; k < 16; ++k) sum[r][c] += left[r][k] * right[c][k];
      }
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 8; ++c) of(r % 8 * 4 + c / 2)->d[r / 8 * 2 + c % 2] += sum[r][c];
  });
}
void copy(u32 dst, const void* src, int bytes, bool valid) {
  enqueue(self().copies, [=] {
    if (valid)
      std::memcpy(address(dst), src, bytes);
    else
      std::memset(address(dst), 0, bytes);
  });
}
void copy_commit() { self().copies.emplace_back(); }
void copy_wait(int groups) { drain(self().copies, groups); }
u32 count(u32* counter, u32 last) {
  const u32 before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
void mbarrier_init(u32 bar, u32 count) {
  Mbarrier b;
  b.count = b.pending = count;
  cta().mbarriers[bar] = b;
}
void mbarrier_expect(u32 bar, u32 bytes) {
  mbarrier(bar).bytes += bytes;
  arrive(bar);
}
void mbarrier_arrive(u32 bar, int to_rank) { arrive(to_rank < 0 ? bar : bar + (to_rank - cta().rank) * WINDOW); }
void mbarrier_wait(u32 bar, u32 parity) {
  wait_until([=] { return (mbarrier(bar).completed & 1) != parity; });
}
void box_load(u32 dst, const TensorMap* map, u32 bar, int x, int y, u32 mask) {
  for (u32 to = 0; to < machine().ctas.size(); ++to) {
    const u32 apart = (to - cta().rank) * WINDOW;
    if (mask >> to & 1 || (mask == 0 && apart == 0)) load_box(map_of(map), dst + apart, bar + apart, x, y);
  }
}
void box_store(const TensorMap* map, u32 src, int x, int y) {
  enqueue(self().stores, [=] { store_box(map_of(map), src, x, y); });
}
void store_commit() { self().stores.emplace_back(); }
void store_wait(int groups) { drain(self().stores, groups); }
void wgmma_close() {
  warpgroup_together(nullptr, [](void**) { warpgroup().groups.emplace_back(); });
}
void wgmma_drain(int groups) {
  warpgroup_together(nullptr, [groups](void**) { drain(warpgroup(), groups); });
}
u32 rank() { return cta().rank; }
void arrive_at_cluster() {
  Machine& m = machine();
  self().cluster_phase = m.cluster_completed;
  ++m.progress;
  if (++m.cluster_arrived == static_cast<int>(m.threads.size())) m.cluster_arrived = 0, ++m.cluster_completed;
}
void wait_for_cluster() {
  wait_until([] { return machine().cluster_completed != self().cluster_phase; });
}
}  // namespace emu

// M N K, grid, block, cluster, bytes of workspace, calls; A and B on stdin, C on stdout.
int main(int argc, char** argv) {
  if (argc != 15) return 2;
  int v[15];
  for (int i = 1; i < 15; ++i) v[i] = std::atoi(argv[i]);
  const int M = v[1], N = v[2], K = v[3], workspace_bytes = v[13], calls = v[14];
  const size_t sizes[3] = {static_cast<size_t>(M) * K, static_cast<size_t>(N) * K, static_cast<size_t>(M) * N};
  std::vector<u16> data[3];
  for (int i = 0; i < 3; ++i) data[i].assign(sizes[i] + 64, 0x7FFF);  // NaN, and behind C the canary
  for (int i = 0; i < 2; ++i)
    if (std::fread(data[i].data(), 2, sizes[i], stdin) != sizes[i]) return 2;
  std::vector<unsigned char> workspace(workspace_bytes + 64, 0);
  const int rows[3] = {M, emu::nn ? K : N, M}, cols[3] = {K, emu::nn ? N : K, N};
  TensorMap maps[8];
  for (int i = 0; i < emu::described_count; ++i) {
    const int* d = emu::described[i];
    const emu::Map map{data[d[0]].data(), rows[d[0]], cols[d[0]], d[1], d[2], d[3]};
    std::memcpy(maps + i, &map, sizeof map);
  }
  const auto dim = [&](int i) {
    return dim3{static_cast<u32>(v[i]), static_cast<u32>(v[i + 1]), static_cast<u32>(v[i + 2])};
  };
  for (int call = 0; call < calls; ++call)
    emu::launch(dim(4), dim(7), dim(10), [&] {
      emu::run_kernel(data[0].data(), data[1].data(), data[2].data(), M, N, K, workspace.data(), maps);
    });
  for (int i = 0; i < 64; ++i)
    if (data[2][sizes[2] + i] != 0x7FFF || workspace[workspace_bytes + i] != 0) emu::fail("a write past the end");
  std::fwrite(data[2].data(), 2, sizes[2], stdout);
  return 0;
}
