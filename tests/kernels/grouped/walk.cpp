// Runs group_walk.cuh on a CPU, for test_group_walk.py: a warp is 32 threads, which meet at its exchanges.
//
// Reads lines "groups rows n ctas" and the groups' ends. Writes each tile of each CTA as "group begin end row", and "done".
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
static unsigned long long __cvta_generic_to_shared(const void* p) { return reinterpret_cast<unsigned long long>(p); }
static struct { int x, y, z; } blockIdx;
static float __fdividef(float a, float b) { return a / b; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

static std::barrier<> meeting(32);
static int slots[32];
static thread_local int own_lane;

static int exchange(int value, int from) {
  slots[own_lane] = value;
  meeting.arrive_and_wait();
  const int got = slots[from];
  meeting.arrive_and_wait();
  return got;
}
static int __shfl_sync(unsigned, int value, int from) { return exchange(value, from); }
static int __shfl_up_sync(unsigned, int value, int by) {
  return exchange(value, own_lane >= by ? own_lane - by : own_lane);
}
static unsigned __ballot_sync(unsigned, bool value) {
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(exchange(value, lane)) << lane;
  return all;
}

constexpr int BN = TEST_BN, ROWS = TEST_ROWS, CLUSTER = TEST_CLUSTER, GROUP = TEST_GROUP;
#include "group_walk.cuh"

static void walk_all(std::vector<int>& table, const std::vector<int>& ends, int rows, int n, int ctas, int lane) {
  own_lane = lane;
  const int groups = static_cast<int>(ends.size()), row_tiles = (n + ROWS * CLUSTER - 1) / (ROWS * CLUSTER);
  make_group_table<BN>(table.data(), ends.data(), groups, rows, lane);
  meeting.arrive_and_wait();
  for (int cta = 0; cta < ctas; ++cta) {
    GroupWalk walk(table.data(), groups, row_tiles, cta / CLUSTER, ctas / CLUSTER, cta % CLUSTER, lane);
    GroupTile at;
    bool more = walk.has_next();
    while (walk.next(at)) {
      if (!more) std::exit(3);
      if (lane == 0) std::printf("%d %d %d %d\n", at.group, at.begin, at.end, at.row);
      more = walk.has_next();
    }
    if (more) std::exit(3);
  }
}

int main() {
  int groups, rows, n, ctas;
  while (std::scanf("%d %d %d %d", &groups, &rows, &n, &ctas) == 4) {
    std::vector<int> ends(groups), table(1 + 4 * groups, -7);
    for (int& end : ends)
      if (std::scanf("%d", &end) != 1) return 2;
    std::vector<std::thread> warp;
    for (int lane = 0; lane < 32; ++lane) warp.emplace_back([&, lane] { walk_all(table, ends, rows, n, ctas, lane); });
    for (std::thread& thread : warp) thread.join();
    std::printf("done\n");
  }
}
