#include "blas.h"

#include <pthread.h>
#include <stddef.h>

// Streams have workspaces of their own, so few of them share a lock by chance. torch's large blocks are of whole 2 MiB.
enum { LOCKS = 64, BLOCK_BITS = 21 };
static pthread_mutex_t locks[LOCKS] = {[0 ... LOCKS - 1] = PTHREAD_MUTEX_INITIALIZER};

static pthread_mutex_t *lock_of(uint64_t workspace) { return &locks[(workspace >> BLOCK_BITS) % LOCKS]; }

void workspace_hold(uint64_t workspace) {
    if (workspace) pthread_mutex_lock(lock_of(workspace));
}

void workspace_release(uint64_t workspace) {
    if (workspace) pthread_mutex_unlock(lock_of(workspace));
}

typedef int (*Matmul)(void *handle, void *descriptor, const void *alpha, const void *first, void *first_layout,
                      const void *second, void *second_layout, const void *beta, const void *in, void *in_layout,
                      void *out, void *out_layout, const void *algo, void *workspace, size_t bytes, void *stream);

int blas_product(const Product *product, const uint64_t addresses[3], uint64_t workspace, uint64_t bytes, void *stream) {
    const Product *p = product;
    const void *a = (const void *)(uintptr_t)addresses[0], *b = (const void *)(uintptr_t)addresses[1];
    void *c = (void *)(uintptr_t)addresses[2];
    void *space = workspace ? (void *)(uintptr_t)(workspace + COUNTERS_BYTES) : NULL;
    return ((Matmul)p->matmul)(p->handle, p->descriptor, &p->alpha, b, p->first, a, p->second, &p->beta, c, p->out, c,
                               p->out, p->algo, space, space ? bytes - COUNTERS_BYTES : 0, stream);
}
