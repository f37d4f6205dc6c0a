// What a kernel's text calls, and the program around it; compiled once and linked to every kernel.
#include <set>

#include "machine.hpp"

namespace emu {
const dim3& thread_index() { return self().index; }
const dim3& block_index() { return cta().index; }
const dim3& grid_size() { return machine().grid; }
const dim3& block_size() { return machine().block; }
unsigned char* shared_window() { return cta().shared; }
void store(u32 addr, u16 value) { element(addr) = value; }
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
bool strict_banks() {  // fail at a bank conflict
  static const bool is = std::getenv("EMULATE_STRICT_BANKS") != nullptr;
  return is;
}
std::set<u32> banks(const std::vector<u32>& addresses) {  // of 16 bytes each
  std::set<u32> found;
  for (const u32 at : addresses) found.insert(at / 16 % 8);
  return found;
}
struct Tiles {
  u32 addr;
  u32* r;
};
void matrices(u32 addr, u32 (&r)[4], bool transposed, bool store) {
  Tiles mine{addr, r};
  warp_together(&mine, [=](void** slots) {
    for (int t = 0; t < 4; ++t) {
      std::vector<u32> rows;
      for (int i = 8 * t; i < 8 * t + 8; ++i) rows.push_back(static_cast<Tiles*>(slots[i])->addr);
      if (strict_banks() && banks(rows).size() < 8) fail("rows of a matrix in the same banks");
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
    }
  });
}
void check_aligned(const void* address, int bytes) {
  if (reinterpret_cast<u64>(address) % bytes) fail("a vector in global memory that is not aligned");
}
void vector(u32 addr, u32 (&r)[4], bool store) {
  if (addr % 16) fail("a vector that is not aligned");
  if (store)
    std::memcpy(address(addr), r, 16);
  else
    std::memcpy(r, address(addr), 16);
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
void turns_load(u32 dst, const TensorMap* map, u32 bar, int x, int y, int z, int w, u32 mask) {
  for (u32 to = 0; to < machine().ctas.size(); ++to) {
    const u32 apart = (to - cta().rank) * WINDOW;
    if (mask >> to & 1 || (mask == 0 && apart == 0)) load_turns(map_of(map), dst + apart, bar + apart, x, y, z, w);
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
  static TensorMap maps[16];
  if (emu::described_count > 16) return 2;
  for (int i = 0; i < emu::described_count; ++i) {
    const int* d = emu::described[i];
    const emu::Map map = emu::described_map(data[d[0]].data(), rows[d[0]], cols[d[0]], d + 1, d[4]);
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
