#define ACC_FP16 0
constexpr int BM = 16;
constexpr int BN = 32;
constexpr int BK = 128;
constexpr int STAGES = 3;
constexpr int WM = 1;
constexpr int WN = 1;
constexpr int WK = 4;
constexpr int SPLIT = 8;
constexpr int WARP_OWNERS = 4;
constexpr int OWNERS = 1;
constexpr int GROUP = 8;
constexpr int VEC = 8;
constexpr bool B_K_MAJOR = true;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
#include "sm80_mma_gemm.cuh"
