// Eight elements that lie across two 16-byte units.
#pragma once
#include "ptx/permute.cuh"

template <int N>
struct Shift {};

// Calls `f` with Shift<shift>, for a shift of 0 to 7 that is the same in all lanes: the code of each is its own.
template <class F>
__device__ __forceinline__ void with_shift(int shift, const F& f) {
  switch (shift) {
    case 0: return f(Shift<0>{});
    case 1: return f(Shift<1>{});
    case 2: return f(Shift<2>{});
    case 3: return f(Shift<3>{});
    case 4: return f(Shift<4>{});
    case 5: return f(Shift<5>{});
    case 6: return f(Shift<6>{});
    default: return f(Shift<7>{});
  }
}

// Elements FROM to FROM + 7 of the 16 in `low` and `high`; FROM is 0 to 8.
template <int FROM>
__device__ __forceinline__ void eight_from(const u32 (&low)[4], const u32 (&high)[4], u32 (&eight)[4]) {
  const u32 words[9] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = i + FROM / 2;
    eight[i] = FROM % 2 == 0 ? words[at] : halves_between(words[at], words[at + 1]);
  }
}
