// What torch knows of a tensor and of a thread, by loads and C calls that make no Python object. The same questions in
// Python take several times as long. torch_state.py finds the places and functions, and proves them on tensors.
#ifndef OUTBLAS_TORCH_STATE_H
#define OUTBLAS_TORCH_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "describe.h"

// `tensor`: bytes from a tensor object to its at::Tensor, which is the address of a TensorImpl. `keys`, `gradient`: bytes
// from there to its dispatch keys, and to the record of its gradient. `strange`, `versioned`: dispatch keys of tensors
// that torch must see, and of those that are not of inference mode.
#define STATE_NUMBERS(X) X(tensor) X(keys) X(gradient) X(strange) X(versioned)

// Functions of torch: the modes of the thread, its tracing (the address of a pointer), and whether gradients are recorded.
// Then whether autocast is on for a device type. The last one tells autograd that a tensor was written.
#define STATE_FUNCTIONS(X)                             \
    X(function_modes, int64_t, (void))                 \
    X(dispatch_modes, int64_t, (void))                 \
    X(tracing, const void *const *, (void))            \
    X(gradients, bool, (void))                         \
    X(autocast, bool, (int8_t device_type))            \
    X(bump_version, void, (const void *tensor))

#define STATE_NUMBER(name) uint64_t name;
#define STATE_FUNCTION(name, returned, arguments) returned(*name) arguments;

typedef struct {
    STATE_NUMBERS(STATE_NUMBER)
    STATE_FUNCTIONS(STATE_FUNCTION)
    Describe describe;  // NULL: torch or this extension lacks it
} TorchState;

// From a dict of name -> number; -1 with an error where one is missing or 0, except for `strange` and `describe`.
int state_open(TorchState *state, PyObject *numbers);

// Whether something of this thread must see all products. `*grad`: whether gradients are recorded.
int state_is_watched(const TorchState *state, int *grad);

// What DLPack says of a tensor; 0 for success. Only with `describe`.
int state_describe(const TorchState *state, PyObject *tensor, DlTensor *out);

// Whether torch must see the products of a tensor: lazily negated, or with names.
int state_is_strange(const TorchState *state, PyObject *tensor);

// 0: it wants no gradient. 1: torch has to be asked.
int state_may_want_gradient(const TorchState *state, PyObject *tensor);

int state_is_inference(const TorchState *state, PyObject *tensor);

// Not of a tensor of inference mode, which has no version.
void state_bump_version(const TorchState *state, PyObject *tensor);

#endif
