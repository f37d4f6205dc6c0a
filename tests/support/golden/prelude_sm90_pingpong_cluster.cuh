#define ACC_FP16 0
#define SPLIT_WORKSPACE 0
constexpr int BM = 64;
constexpr int A_ROWS = 64;
constexpr bool A_FITS = false;
constexpr int BN = 256;
constexpr int BK = 64;
constexpr int STAGES = 4;
constexpr int CONSUMERS = 2;
constexpr bool PINGPONG = true;
constexpr bool STAGGER = false;
constexpr int CLUSTER_M = 2;
constexpr int CLUSTER_N = 1;
constexpr int SPLIT = 1;
constexpr int OWNERS = 1;
constexpr bool PERSISTENT = true;
constexpr bool RASTER_M = true;
constexpr int GROUP = 8;
constexpr bool STREAM_C = false;
constexpr bool STREAM_B = false;
constexpr bool STREAM_A = false;
constexpr bool STORE_TMA = true;
constexpr int EPI_W = 64;
constexpr int EPI_BUFS = 4;
constexpr int MIN_BLOCKS = 1;
constexpr int PRODUCER_REGS = 40;
constexpr int CONSUMER_REGS = 232;
constexpr bool B_K_MAJOR = true;
constexpr int B_WIDTH = 64;
constexpr bool PDL = false;
constexpr bool EARLY_B = false;
constexpr bool SHIFT = false;
constexpr bool SWAP = false;
constexpr bool BF16 = false;
#include "sm90_wgmma_gemm.cuh"
