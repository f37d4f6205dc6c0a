// The reading of a call: what of it decides the answer.
#ifndef OUTBLAS_READ_H
#define OUTBLAS_READ_H

#include "object.h"

// Takes from the hooks what is used by every call; -1 with an error.
int prepare_reading(TableObject *self);

// Whether an object is exactly a tensor or a parameter.
int is_plain(const TableObject *self, PyObject *object);

// Where the table has a tensor's device, which it adds if asked to; -1: nowhere, perhaps with an error.
int device_of(TableObject *self, PyObject *tensor, int add);

// The address of a tensor; -1: it has none, perhaps with an error.
int address_of(const TableObject *self, PyObject *tensor, uint64_t *address);

// Fills the key and the addresses from (a, b, out, option); below autograd, gradients are not asked for. 0: this is not a
// call for the table; no error is left.
int read_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3], int below);

// The same for a call that is to be learned, whose device is added. The exchange is given up, and all that was learned
// by it, where it does not say of the call what torch's methods say.
int read_new_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3]);

#endif
