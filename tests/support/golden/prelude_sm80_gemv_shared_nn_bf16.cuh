#define ACC_FP16 0
constexpr int BM = 16;
constexpr int BN = 128;
constexpr int WN = 2;
constexpr int WK = 4;
constexpr int UNROLL = 4;
constexpr bool RING_SHARED = true;
constexpr int SPLIT = 1;
constexpr int WARP_OWNERS = 4;
constexpr int OWNERS = 1;
constexpr int PREFETCH = 128;
constexpr bool STREAM_B = false;
constexpr bool PERSISTENT = false;
constexpr int WARM_K = 0;
constexpr int KEPT_STEPS = 0;
constexpr int MIN_BLOCKS = 0;
constexpr bool B_K_MAJOR = false;
constexpr bool PDL = true;
constexpr bool EARLY_B = true;
constexpr bool BF16 = true;
#include "sm80_gemv_mma.cuh"
