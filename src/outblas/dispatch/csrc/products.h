// Kernels of ours for torch's aten::mm and aten::bmm, called by torch's dispatcher without the interpreter's lock.
//
// Nothing of torch is linked, and none of its headers is needed. aten_native.py looks up torch's functions by name.
#ifndef OUTBLAS_PRODUCTS_H
#define OUTBLAS_PRODUCTS_H

#include <pthread.h>
#include <stdbool.h>

#include "table.h"

// torch's AtenTensorHandle: the address of an at::Tensor on the heap.
typedef void *Handle;

// An at::Tensor that a C++ function returns: a class of one address with a copy constructor and a destructor. In every
// processor's ABI the caller passes an address for such a result. On x86-64 this is the first argument; on arm64 it is not.
#ifdef __cplusplus
struct Returned {
    void *implementation;
    Returned(const Returned &);
    ~Returned();
};
#else
typedef struct Returned Returned;  // never called from C
#endif

// Functions of torch's C interface for extensions, where 0 is success. The headers are torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h. The last four are C++ functions: torch's own kernels at::cuda::mm and bmm, and
// the functions redispatch of at::_ops::mm and at::_ops::bmm.
#define TORCH(X)                                                                                            \
    X(library_init, int, (const char *space, const char *key, const char *file, uint32_t line, void **out)) \
    X(library_impl, int, (void *library, const char *name, void (*kernel)(uint64_t *, uint64_t, uint64_t), uint64_t version)) \
    X(library_delete, int, (void *library))                                                                 \
    X(delete_tensor, int, (Handle tensor))                                                                  \
    X(dtype, int, (Handle tensor, int32_t *out))                                                            \
    X(dim, int, (Handle tensor, int64_t *out))                                                              \
    X(sizes, int, (Handle tensor, int64_t **out))                                                           \
    X(strides, int, (Handle tensor, int64_t **out))                                                         \
    X(data_ptr, int, (Handle tensor, void **out))                                                           \
    X(device_type, int, (Handle tensor, int32_t *out))                                                      \
    X(device_index, int, (Handle tensor, int32_t *out))                                                     \
    X(empty_strided, int, (int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type, \
                           int32_t device_index, Handle *out))                                              \
    X(float16, int32_t, (void))                                                                             \
    X(bfloat16, int32_t, (void))                                                                            \
    X(mm, Returned, (const void *a, const void *b))                                                         \
    X(bmm, Returned, (const void *a, const void *b))                                                        \
    X(mm_redispatch, Returned, (uint64_t keys, const void *a, const void *b))                               \
    X(bmm_redispatch, Returned, (uint64_t keys, const void *a, const void *b))

// Functions that are 0 in a CPU build of torch, which has one stream and no current device. The last one is
// at::impl::has_names of a TensorImpl. It is 0 from torch 2.13 on, where tensors have no names.
#define TORCH_OPTIONAL(X)                                      \
    X(has_names, bool, (const void *implementation))           \
    X(current_stream, int, (int32_t device_index, void **out)) \
    X(guard_create, int, (int32_t device_index, void **out))   \
    X(guard_delete, int, (void *guard))

#define FUNCTION(name, returned, arguments) returned(*name) arguments;

typedef struct {
    TORCH(FUNCTION)
    TORCH_OPTIONAL(FUNCTION)
} Torch;

typedef struct {
    Torch torch;
    Driver driver;
    Table table;
    // Readers hold it over a launch. A launch may wait for the GPU, and so for a thread with the interpreter's lock.
    // No thread waits for one of these two locks while it holds the other.
    pthread_rwlock_t lock;
    pthread_mutex_t maps_lock;
    int32_t device_type, half, bfloat;
    uint64_t ask_keys;  // where the kernels in Python are registered that know what to do with what is new
    int option;         // see Key
    unsigned long long ours, torchs;
} Products;

// In place of torch's kernels from now on, under a dispatch key, and of outblas::mm's; NULL, or the name of what torch
// refuses. One at a time; the libraries are what library_delete takes to undo it. The products must live until no call
// can be under way.
const char *products_install(Products *products, const char *key, void *libraries[2]);

// The key of this thread's last call that went to Python, so that the call can be learned. 0 without such a call, and
// after the key was taken.
int products_take(Key *key);

#endif
