#define ACC_FP16 0
#define SPLIT_WORKSPACE 1
constexpr int BM = 128;
constexpr int BN = 96;
constexpr int BK = 32;
constexpr int STAGES = 4;
constexpr int WM = 2;
constexpr int WN = 2;
constexpr int SPLIT = 3;
constexpr int VEC = 8;
constexpr int GROUP = 8;
constexpr bool PERSISTENT = false;
constexpr int MIN_BLOCKS = 1;
constexpr bool B_K_MAJOR = true;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
constexpr int COUNTERS_BYTES = 65536;
#include "sm80_pipelined_gemm.cuh"
