// The gated store of a family, run by the package's own code, thread by thread over a grid of tiles.
// FAMILY 0: wgmma (fuse); 1: sm80_mma_gemm; 2: sm80_gemv_mma (FusedStore).
// FAMILY 3: sm80_direct_gemm (fuse, and store_fused_row).
// The test puts a kernel's prelude and includes in front of this file, and defines EXTENT_M, EXTENT_N, TILES_M and
// TILES_N. Sums are functions of row and column. Accumulators have the layout of PTX's D fragment. The program prints C
// with a guard behind it. It writes all of C twice, over two patterns, which shows how often each element was written.
#include <cstdio>
#include <vector>

inline float sum_of(int row, int col) { return static_cast<float>((row * 7 + col * 5) % 23 - 11) * 0.25f; }

// What a lane's fragment at (row0, col0) holds: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
inline void fill(float* v, int row0, int col0, int lane) {
  for (int e = 0; e < 4; ++e) v[e] = sum_of(row0 + lane / 4 + 8 * (e / 2), col0 + 2 * (lane % 4) + e % 2);
}

inline void run_thread(const Fused& fused, u16* c, int tile_row, int tile_col, int thread) {
  const int lane = thread % 32, warp = thread / 32;
#if FAMILY == 0
  constexpr int MI = BM / 64;
  AccReg acc[MI][ACC_REGS];
  for (int i = 0; i < MI; ++i)
    for (int nb = 0; nb < BN / 8; ++nb)
      fill(acc[i] + 4 * nb, tile_row + 64 * i + 16 * warp, tile_col + 8 * nb, lane);
  fuse<MI>(acc, fused, c, tile_col, tile_row, EXTENT_M, EXTENT_N, thread);
#elif FAMILY == 1
  if (warp >= WM * WN) return;
  const int row0 = tile_row + warp / WN * MT * 16, col0 = tile_col + warp % WN * NT * 8;
  const FusedStore store{fused, c, row0 + lane / 4, col0 + 2 * (lane % 4), EXTENT_M, EXTENT_N};
  for (int unit = 0; unit < MT * NT; ++unit) {
    float v[4];
    fill(v, row0 + unit / NT * 16, col0 + unit % NT * 8, lane);
    store(unit, v, store.extras(unit));
  }
#elif FAMILY == 2
  if (warp >= WN) return;
  const int row0 = tile_col + warp * ROWS;  // of the weights: columns of C
  const FusedStore store{fused, c, row0, EXTENT_M, EXTENT_N, lane};
  for (int unit = 0; unit < MT * NT; ++unit) {
    // Rows g and g + 8 of a fragment are two neighbouring rows of weights, its columns are tokens.
    const int token = unit % NT * 8 + 2 * (lane % 4), col = row0 + pair_row(unit / NT, lane);
    float v[4] = {sum_of(token, col), sum_of(token + 1, col), sum_of(token, col + 1), sum_of(token + 1, col + 1)};
    store(unit, v, store.extras(unit));
  }
#else
  if (warp >= WM * WN) return;
  const int row0 = tile_row + warp / WN * 16 * MT + lane / 4, col = tile_col + warp % WN * 8 * NT + OWN * (lane % 4);
  Fragment acc[MT][NT];
  for (int i = 0; i < MT; ++i)
    for (int j = 0; j < NT; ++j)
      for (int e = 0; e < 4; ++e) acc[i][j][e] = sum_of(row0 + 16 * i + 8 * (e / 2), col + 2 * j + e % 2);
  if (WK == 1) return fuse(acc, fused, c, row0, col, EXTENT_M, EXTENT_N);
  for (int r = 0; r < 2 * MT; ++r) {
    float v[OWN];
    lane_row(acc, r, v);
    store_fused_row(c, v, fused, row0 + 8 * r, col, EXTENT_M, EXTENT_N);
  }
#endif
}

int main() {
  std::vector<u16> bias(EXTENT_N);
  for (int i = 0; i < EXTENT_N; ++i) bias[i] = half_bits(static_cast<float>(i % 5 - 2) * 0.5f);
  const Fused fused{bias.data(), nullptr, 0};
  for (const u16 pattern : {u16{0x7FED}, u16{0x3C01}}) {
    std::vector<u16> c(EXTENT_M * (EXTENT_N / 2) + 64, pattern);
    for (int i = 0; i < TILES_M; ++i)
      for (int j = 0; j < TILES_N; ++j)
        for (int thread = 0; thread < 512; ++thread)
          if (FAMILY != 0 || thread < 128) run_thread(fused, c.data(), i * BM, j * BN, thread);
    for (const u16 each : c) std::printf("%u\n", each);
  }
}
