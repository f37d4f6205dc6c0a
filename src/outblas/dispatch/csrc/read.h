// The reading of a call: what of it decides the answer.
#ifndef OUTBLAS_READ_H
#define OUTBLAS_READ_H

#include "object.h"

// Takes from the hooks what is used by every call; -1 with an error.
int prepare_reading(TableObject *self);

// Whether an object is exactly a tensor or a parameter.
int is_plain(const TableObject *self, PyObject *object);

// Whether a tensor is of inference mode, by torch's state or, where that is NULL, by a method; -1 for an error.
int is_inference(const TableObject *self, const TorchState *state, PyObject *tensor);

// Returns the index of a tensor's device in the table, and adds it on request; -1 if it is absent, perhaps with an error.
int device_of(TableObject *self, PyObject *tensor, int add);

// The address of a tensor; -1: it has none, perhaps with an error.
int address_of(const TableObject *self, PyObject *tensor, uint64_t *address);

// Fills the key and the addresses from (a, b, out, option). Below autograd it does not look for gradients. Returns 0, and
// leaves no error, if the table cannot serve the call.
int read_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3], int below);

// Does the same for a call that the table learns, and adds its device. If the exchange contradicts torch's methods, the
// exchange is given up, and all that was learned through it. The same holds for the state that torch tells, but nothing is
// learned through that.
int read_new_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3]);

#endif
