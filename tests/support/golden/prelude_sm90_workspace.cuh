#define ACC_FP16 0
#define SPLIT_WORKSPACE 1
#define REDUCE_ALL 0
constexpr int BM = 128;
constexpr int A_ROWS = 128;
constexpr bool A_FITS = false;
constexpr int BN = 128;
constexpr int BK = 64;
constexpr int STAGES = 6;
constexpr int CONSUMERS = 2;
constexpr bool PINGPONG = false;
constexpr bool STAGGER = false;
constexpr int CLUSTER_M = 2;
constexpr int CLUSTER_N = 1;
constexpr int SPLIT = 5;
constexpr int OWNERS = 1;
constexpr bool PERSISTENT = false;
constexpr bool RASTER_M = true;
constexpr int GROUP = 8;
constexpr bool STREAM_C = false;
constexpr bool STREAM_B = false;
constexpr bool STREAM_A = false;
constexpr bool STORE_TMA = false;
constexpr int EPI_W = 64;
constexpr int EPI_BUFS = 1;
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
constexpr int COUNTERS_BYTES = 65536;
constexpr int LOADS = 32;
#include "sm90_wgmma_gemm.cuh"
