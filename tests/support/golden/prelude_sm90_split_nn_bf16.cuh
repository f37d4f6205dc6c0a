#define ACC_FP16 0
#define SPLIT_WORKSPACE 0
constexpr int BM = 64;
constexpr int A_ROWS = 64;
constexpr bool A_FITS = false;
constexpr int BN = 96;
constexpr int BK = 128;
constexpr int STAGES = 3;
constexpr int CONSUMERS = 1;
constexpr bool PINGPONG = false;
constexpr bool STAGGER = false;
constexpr int CLUSTER_M = 1;
constexpr int CLUSTER_N = 1;
constexpr int SPLIT = 4;
constexpr int OWNERS = 4;
constexpr bool PERSISTENT = false;
constexpr bool RASTER_M = true;
constexpr int GROUP = 8;
constexpr bool STREAM_C = false;
constexpr bool STREAM_B = false;
constexpr bool STREAM_A = false;
constexpr bool STORE_TMA = false;
constexpr int EPI_W = 32;
constexpr int EPI_BUFS = 1;
constexpr int MIN_BLOCKS = 1;
constexpr int PRODUCER_REGS = 0;
constexpr int CONSUMER_REGS = 0;
constexpr bool B_K_MAJOR = false;
constexpr int B_WIDTH = 32;
constexpr bool PDL = true;
constexpr bool EARLY_B = false;
constexpr bool SHIFT = false;
constexpr bool SWAP = false;
constexpr bool BF16 = true;
#include "sm90_wgmma_gemm.cuh"
