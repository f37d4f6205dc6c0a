// cublasLtMatmul, called by the numbers that Python gives: nothing is linked, and no header of cuBLAS is needed.
#ifndef OUTBLAS_BLAS_H
#define OUTBLAS_BLAS_H

#include <stdint.h>

// Of the stream's workspace, what kernels count in: cuBLASLt gets the rest (geometry.COUNTERS_BYTES).
enum { COUNTERS_BYTES = 65536 };

// All of a product but its addresses, its workspace and its stream. As BLAS sees it, column by column, the first
// operand is our B and the second our A.
typedef struct {
    void *matmul, *handle, *descriptor, *first, *second, *out;
    uint32_t alpha, beta;  // bits of the scale type, in the low half where that has 16 bits
    uint64_t algo[8];      // cublasLtMatmulAlgo_t
} Product;

// The status of cuBLASLt, 0 for success. `workspace`: address and bytes of a stream's, 0 for an algorithm that needs none.
int blas_product(const Product *product, const uint64_t addresses[3], uint64_t workspace, uint64_t bytes, void *stream);

// Hold a workspace over the call that uses it, cublasLtMatmul's or a launch; 0 is none. cublasLtMatmul enqueues several
// kernels that pass sums on in the workspace. Another thread's call on the same stream must not come between them. The
// caller must not wait for the interpreter's lock until the release.
void workspace_hold(uint64_t workspace);
void workspace_release(uint64_t workspace);

#endif
