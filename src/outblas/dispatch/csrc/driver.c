#include "driver.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

enum { ELEMENT_BYTES = 2, ATTRIBUTE_CLUSTER_DIMENSION = 4, ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef struct {  // CUlaunchAttribute
    int id;
    char pad[4];
    union {
        uint32_t cluster[3];
        int allowed;
        char bytes[64];
    } value;
} LaunchAttribute;

typedef struct {  // CUlaunchConfig
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    LaunchAttribute *attributes;
    uint32_t count;
} LaunchConfig;

_Static_assert(sizeof(TensorMap) == 128, "CUtensorMap");
_Static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute");
_Static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32, "CUlaunchConfig");

const char *driver_open(Driver *driver, const char *path) {
    driver->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!driver->library) return path;
    struct {
        const char *name;
        void **into;
    } wanted[] = {
        {"cuLaunchKernelEx", (void **)&driver->launch_kernel},
        {"cuTensorMapEncodeTiled", (void **)&driver->encode_tiled},
        {"cuCtxGetCurrent", (void **)&driver->current_context},
        {"cuStreamIsCapturing", (void **)&driver->is_capturing},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *wanted[i].into = dlsym(driver->library, wanted[i].name);
        if (!*wanted[i].into) return wanted[i].name;
    }
    *(void **)&driver->capture_info = dlsym(driver->library, "cuStreamGetCaptureInfo_v2");  // CUDA 11.3
    return NULL;
}

void driver_close(Driver *driver) {
    if (driver->library) dlclose(driver->library);
    driver->library = NULL;
}

void *driver_context(const Driver *driver) {
    void *context = NULL;
    return driver->current_context(&context) == 0 ? context : NULL;
}

int driver_met(const void *context) {
    enum { LIMIT = 64 };  // of contexts: one for each GPU
    static _Thread_local const void *met[LIMIT];
    for (int i = 0; i < LIMIT; i++) {
        if (met[i] == context) return 1;
        if (met[i]) continue;
        met[i] = context;
        return 0;
    }
    return 1;
}

uint64_t driver_capture(const Driver *driver, void *stream) {
    enum { NONE = 0, ACTIVE = 1 };  // CU_STREAM_CAPTURE_STATUS_
    int status = NONE;
    uint64_t id = 0;
    if (driver->is_capturing(stream, &status)) return UNKNOWN_CAPTURE;
    if (status == NONE) return NO_CAPTURE;
    if (!driver->capture_info || driver->capture_info(stream, &status, &id, NULL, NULL, NULL)) return UNKNOWN_CAPTURE;
    return status == ACTIVE && id ? id : UNKNOWN_CAPTURE;
}

int driver_encode(const Driver *driver, const MapSpec *spec, uint64_t address, TensorMap *map) {
    const uint64_t extents[2] = {spec->cols, spec->rows};
    const uint64_t pitches[1] = {(uint64_t)spec->pitch * ELEMENT_BYTES};
    const uint32_t box[2] = {spec->box_cols, spec->box_rows}, steps[2] = {1, 1};
    return driver->encode_tiled(map, spec->type, 2, (void *)(uintptr_t)(address + spec->offset), extents, pitches, box,
                                steps, 0, spec->swizzle, spec->promotion, 0);
}

int driver_launch(const Driver *driver, const Launch *launch, const TensorMap *maps, const uint64_t addresses[3],
                  uint64_t workspace, void *stream) {
    LaunchAttribute attributes[2];
    LaunchConfig config;
    memset(attributes, 0, sizeof attributes);
    memset(&config, 0, sizeof config);
    memcpy(config.grid, launch->grid, sizeof config.grid);
    config.block[0] = launch->threads;
    config.block[1] = config.block[2] = 1;
    config.shared_bytes = launch->shared_bytes;
    config.stream = stream;
    config.attributes = attributes;
    if (launch->cluster > 1) {
        LaunchAttribute *cluster = &attributes[config.count++];
        cluster->id = ATTRIBUTE_CLUSTER_DIMENSION;
        cluster->value.cluster[0] = launch->cluster;
        cluster->value.cluster[1] = cluster->value.cluster[2] = 1;
    }
    if (launch->dependent) {
        LaunchAttribute *dependent = &attributes[config.count++];
        dependent->id = ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        dependent->value.allowed = 1;
    }
    void *params[8];
    int count = 0;
    const int each = maps_of_operand(launch);
    for (int i = 0; i < launch->maps; i += each) params[count++] = (void *)&maps[i];
    for (int i = each == 0 ? 0 : each == 1 ? 2 : 1; i < 3; i++) params[count++] = (void *)&addresses[i];
    for (int i = 0; i < 3; i++) params[count++] = (void *)&launch->extents[i];
    if (workspace) params[count++] = (void *)&workspace;
    return driver->launch_kernel(&config, launch->function, params, NULL);
}
