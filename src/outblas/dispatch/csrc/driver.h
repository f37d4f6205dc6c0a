// The few calls of the CUDA driver that a launch needs. Nothing is linked, and no CUDA header is needed.
// The records below are those of cuda.h. The driver keeps their layout from version to version; a test compares them.
#ifndef OUTBLAS_DRIVER_H
#define OUTBLAS_DRIVER_H

#include <stdint.h>

#ifdef __cplusplus
#define _Alignas alignas
#endif

// CUtensorMap: opaque, filled by the driver, passed to a kernel by value.
typedef struct {
    _Alignas(64) uint64_t words[16];
} TensorMap;

// A row-major matrix of two-byte elements, read or written in boxes whose row is one swizzle span.
typedef struct {
    uint32_t rows, cols, box_rows, box_cols;  // elements
    int type, swizzle, promotion;             // values of the driver's enumerations
    uint32_t pitch;                           // elements from a row to the next
    uint64_t offset;                          // bytes from the operand's address
} MapSpec;

enum { COMBS = 8, MAX_MAPS = 2 * COMBS };

// All of a launch except its addresses and its stream. A kernel with maps takes the TMA maps of A, B and C, the address
// of C, and M, N, K. Or it takes COMBS maps of A in one parameter, as many of B, and the addresses of B and C. A kernel
// without maps takes the three addresses and M, N, K. A workspace comes last.
typedef struct {
    void *function;
    uint32_t grid[3], threads, shared_bytes, cluster;
    int dependent;  // programmatic dependent launch
    int32_t extents[3];
    int maps;  // 0, 3 or MAX_MAPS
    MapSpec map[MAX_MAPS];
} Launch;

// Maps of an operand that has maps; 0 without maps.
static inline int maps_of_operand(const Launch *launch) { return launch->maps == MAX_MAPS ? COMBS : launch->maps != 0; }

typedef struct {
    void *library;
    int (*launch_kernel)(const void *config, void *function, void **params, void **extra);
    int (*encode_tiled)(TensorMap *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                        const uint64_t *pitches, const uint32_t *box, const uint32_t *steps, int interleave,
                        int swizzle, int promotion, int fill);
    int (*current_context)(void **context);
    int (*is_capturing)(void *stream, int *status);
    // NULL if the driver lacks the function, or if nobody needs it.
    int (*capture_info)(void *stream, int *status, uint64_t *id, void *graph, void *dependencies, void *count);
} Driver;

// Fills `driver` from a shared library; NULL, or the name of what is missing.
const char *driver_open(Driver *driver, const char *path);
void driver_close(Driver *driver);

// Returns the current context of this thread, NULL without one.
void *driver_context(const Driver *driver);

// Notes that this thread works in a context; returns whether it did before. Python sees a thread's first product there,
// because torch's handle of cuBLAS has to exist before a graph is captured (device_state.py).
int driver_met(const void *context);

// The capture that records a stream, by the driver's number that no other capture of the process has. No capture:
// one question to the driver; there is one: two.
#define NO_CAPTURE ((uint64_t)0)
#define UNKNOWN_CAPTURE UINT64_MAX  // one that has failed, or the driver does not say
uint64_t driver_capture(const Driver *driver, void *stream);

// These return the driver's status, 0 for success. `workspace`: address, 0 for a kernel that takes none.
int driver_encode(const Driver *driver, const MapSpec *spec, uint64_t address, TensorMap *map);
int driver_launch(const Driver *driver, const Launch *launch, const TensorMap *maps, const uint64_t addresses[3],
                  uint64_t workspace, void *stream);

#endif
