// Torch's DLPack exchange: what a tensor is, and a device's current stream, by C calls that make no Python object.
//
// The records are those of dlpack.h 1.3 (https://github.com/dmlc/dlpack/blob/v1.3/include/dlpack/dlpack.h), whose layout
// is the same for all of major version 1. The caller holds the interpreter's lock.
#ifndef OUTBLAS_EXCHANGE_H
#define OUTBLAS_EXCHANGE_H

#include <stdint.h>

// The name of the capsule torch.Tensor.__dlpack_c_exchange_api__.
#define EXCHANGE_CAPSULE "dlpack_exchange_api"

enum { DLPACK_MAJOR = 1, DLPACK_CUDA = 2 };

typedef struct {  // DLTensor, with DLDevice and DLDataType in place
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;  // of the tensor itself: valid while it is not changed
    uint64_t byte_offset;
} DlTensor;

typedef struct ExchangeHeader {  // DLPackExchangeAPIHeader
    uint32_t major, minor;
    struct ExchangeHeader *previous;
} ExchangeHeader;

typedef struct {  // DLPackExchangeAPI
    ExchangeHeader header;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, DlTensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);  // both: 0, or -1 with an exception
} Exchange;

// Returns a library's exchange of major version 1 that has both functions, NULL without one.
const Exchange *exchange_of(const void *header);

#endif
