#define ACC_FP16 1
constexpr int BM = 64;
constexpr int BN = 64;
constexpr int BK = 64;
constexpr int STAGES = 3;
constexpr int WM = 2;
constexpr int WN = 2;
constexpr int WK = 1;
constexpr int SPLIT = 1;
constexpr int WARP_OWNERS = 1;
constexpr int OWNERS = 1;
constexpr int GROUP = 8;
constexpr int VEC = 1;
constexpr bool B_K_MAJOR = false;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
#include "sm80_mma_gemm.cuh"
