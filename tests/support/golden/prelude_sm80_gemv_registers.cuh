#define ACC_FP16 0
constexpr int BM = 8;
constexpr int BN = 32;
constexpr int WN = 1;
constexpr int WK = 8;
constexpr int UNROLL = 2;
constexpr bool RING_SHARED = false;
constexpr int SPLIT = 2;
constexpr int WARP_OWNERS = 2;
constexpr int OWNERS = 1;
constexpr int PREFETCH = 256;
constexpr bool STREAM_B = false;
constexpr bool PERSISTENT = false;
constexpr int WARM_K = 0;
constexpr int KEPT_STEPS = 0;
constexpr int MIN_BLOCKS = 0;
constexpr bool B_K_MAJOR = true;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool BF16 = false;
#include "sm80_gemv_mma.cuh"
