// What DLPack says of a tensor, by torch's C++ function itself. Its exchange (exchange.h) takes three more steps around it.
#ifndef OUTBLAS_DESCRIBE_H
#define OUTBLAS_DESCRIBE_H

#include "exchange.h"

// at::toDLPackNonOwning, from torch 2.10 on: fills the record of an at::Tensor, or throws.
typedef void (*Describe)(const void *tensor, DlTensor *out);

// 0 for success, -1 for a tensor that DLPack cannot express. It is C++, and missing without a C++ compiler.
int describe_tensor(Describe describe, const void *tensor, DlTensor *out);

#endif
