#define ACC_FP16 0
constexpr int BM = 16;
constexpr int BN = 16;
constexpr int WM = 1;
constexpr int WN = 1;
constexpr int WK = 4;
constexpr int UNROLL = 4;
constexpr int GROUP = 8;
constexpr bool B_K_MAJOR = true;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
#include "sm80_direct_gemm.cuh"
