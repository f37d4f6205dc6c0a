// Epilogue without shared memory: every thread writes its own pairs. Shortest latency, 16-byte
// segments; for small outputs.
#pragma once
#include "epilogue/fragment.cuh"

template <int MI>
__device__ __forceinline__ void epilogue_direct(const AccReg (&acc)[MI][ACC_REGS], u16* c, int x0, int y0, int m, int n,
                                                int wg_thread) {
  const int lane = wg_thread % 32, warp = wg_thread / 32;
#pragma unroll
  for (int mi = 0; mi < MI; ++mi) {
    const int row = y0 + mi * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int nb = 0; nb < BN / 8; ++nb) {
      const int col = x0 + nb * 8 + 2 * (lane % 4);
      store_pair(c, row, col, m, n, packed_pair(acc[mi], nb, 0));
      store_pair(c, row + 8, col, m, n, packed_pair(acc[mi], nb, 1));
    }
  }
}
