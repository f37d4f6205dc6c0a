#define ACC_FP16 1
constexpr int BM = 64;
constexpr int BN = 64;
constexpr int WM = 2;
constexpr int WN = 2;
constexpr int WK = 1;
constexpr int UNROLL = 2;
constexpr int GROUP = 8;
constexpr bool B_K_MAJOR = false;
constexpr bool PDL = true;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
#include "sm80_direct_gemm.cuh"
