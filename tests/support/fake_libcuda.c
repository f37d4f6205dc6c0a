// A libcuda and a cuBLASLt that record their calls. A kernel's handle encodes its parameters. An odd handle takes three
// maps, an address and three extents. An even handle takes three addresses and three extents. From 5000 on, a workspace
// follows. Handle 4001 takes eight maps of each of two operands, two addresses and three extents.
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    const unsigned char *attributes;
    uint32_t count;
} Config;

typedef struct {
    uint64_t function, stream, addresses[3];
    uint32_t grid[3], block[3], shared_bytes, attribute_count;
    int32_t extents[3];
    unsigned char attributes[2][72];
    uint64_t maps[3][16], workspace;
} Launch;

typedef struct {
    uint64_t pointers[13];
    float alpha, beta;
    uint64_t algo[8], bytes;
} Product;

enum { KEPT = 65536, PRODUCTS = 64, WITH_WORKSPACE = 5000, WITH_COMBS = 4001 };
static Launch launches[KEPT];
static Product products[PRODUCTS];
static _Atomic int launched, encoded, multiplied;
static _Atomic int asked;
// Of cuStreamQuery: an error, and how many more questions find the stream busy.
int fake_query_status, fake_busy;
int fake_status, fake_encode_status, fake_blas_status, fake_capture, fake_capture_status;
uint64_t fake_capture_id = 1;
uint64_t fake_context = 77;

// Counts calls with a workspace that come while another call is in cublasLtMatmul. It waits for them up to fake_wait_ms.
static _Atomic int inside, met;
int fake_wait_ms;

static void meet(void) {
    const int others = inside++;
    met += others > 0;
    for (int i = 0; i < fake_wait_ms && !met; i++) nanosleep(&(struct timespec){0, 1000000}, NULL);
    inside--;
}

int fake_met(void) { return met; }
int fake_inside(void) { return inside; }

int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
    if (fake_status) return fake_status;
    Launch *made = &launches[launched++ % KEPT];
    memset(made, 0, sizeof *made);
    made->function = (uint64_t)function;
    made->stream = (uint64_t)config->stream;
    memcpy(made->grid, config->grid, sizeof made->grid);
    memcpy(made->block, config->block, sizeof made->block);
    made->shared_bytes = config->shared_bytes;
    made->attribute_count = config->count;
    memcpy(made->attributes, config->attributes, 72 * config->count);
    int next = 3;
    if (made->function == WITH_COMBS) {
        for (int i = 0; i < 2; i++) memcpy(made->maps[i], params[i], sizeof made->maps[i]);
        for (int i = 1; i < 3; i++) made->addresses[i] = *(uint64_t *)params[i + 1];
        next = 4;
    } else if (made->function % 2) {
        for (int i = 0; i < 3; i++) memcpy(made->maps[i], params[i], sizeof made->maps[i]);
        made->addresses[2] = *(uint64_t *)params[next++];
    } else {
        for (int i = 0; i < 3; i++) made->addresses[i] = *(uint64_t *)params[i];
    }
    for (int i = 0; i < 3; i++) made->extents[i] = *(int32_t *)params[next++];
    if (made->function >= WITH_WORKSPACE) {
        made->workspace = *(uint64_t *)params[next++];
        met += inside > 0;
    }
    return extra ? 1 : 0;
}

int cuStreamQuery(void *stream) {
    (void)stream;
    if (fake_query_status) return fake_query_status;
    return fake_busy-- > 0 ? 600 : (fake_busy = 0);
}

int cuStreamIsCapturing(void *stream, int *status) {
    *status = fake_capture;
    (void)stream;
    asked++;
    return fake_capture_status;
}

int cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void *graph, void *dependencies, void *count) {
    *id = fake_capture_id;
    if (graph || dependencies || count) return 1;
    return cuStreamIsCapturing(stream, status);
}

int cublasLtMatmul(void *handle, void *descriptor, const float *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const float *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const void *algo, void *workspace, size_t bytes, void *stream) {
    if (fake_blas_status) return fake_blas_status;
    if (workspace) meet();
    Product *made = &products[multiplied++ % PRODUCTS];
    const void *pointers[13] = {handle, descriptor, a, a_layout, b, b_layout, c, c_layout, d, d_layout, workspace, stream};
    memcpy(made->pointers, pointers, sizeof pointers);
    memcpy(made->algo, algo, sizeof made->algo);
    made->alpha = *alpha;
    made->beta = *beta;
    made->bytes = bytes;
    return 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                           const uint64_t *pitches, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    const uint64_t words[16] = {(uint64_t)address, rank, extents[0], extents[1], pitches[0], box[0], box[1], steps[0],
                                steps[1], type, interleave, swizzle, promotion, fill, (uint64_t)map % 64};
    memcpy(map, words, sizeof words);
    encoded++;
    return fake_encode_status;
}

int cuCtxGetCurrent(void **context) {
    *context = (void *)fake_context;
    return 0;
}

int fake_launched(void) { return launched; }
int fake_encoded(void) { return encoded; }
int fake_multiplied(void) { return multiplied; }
int fake_asked(void) { return asked; }
const Product *fake_product(int index) { return &products[index % PRODUCTS]; }
const Launch *fake_launch(int index) { return &launches[index % KEPT]; }
void fake_reset(void) {
    launched = encoded = multiplied = asked = inside = met = fake_wait_ms = 0;
    fake_capture_id = 1;
    fake_query_status = fake_busy = 0;
    fake_status = fake_encode_status = fake_blas_status = fake_capture = fake_capture_status = 0;
    fake_context = 77;
}
