// See torch_state.h.
#include "torch_state.h"

#include <string.h>

enum { ON_CPU = 0, ON_CUDA = 1 };  // c10::DeviceType

// An at::Tensor within a tensor object.
static const char *at_tensor(const TorchState *state, PyObject *tensor) { return (const char *)tensor + state->tensor; }

static uint64_t field(const TorchState *state, PyObject *tensor, uint64_t offset) {
    const char *impl;
    uint64_t value;
    memcpy(&impl, at_tensor(state, tensor), sizeof impl);
    memcpy(&value, impl + offset, sizeof value);
    return value;
}

static int number_of(PyObject *numbers, const char *name, int optional, void *into) {
    PyObject *number = PyDict_GetItemString(numbers, name);
    const uint64_t value = number ? PyLong_AsUnsignedLongLong(number) : 0;
    if (!value && !optional && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "torch's state lacks %s", name);
    memcpy(into, &value, sizeof value);
    return PyErr_Occurred() ? -1 : 0;
}

int state_open(TorchState *state, PyObject *numbers) {
#define READ_NUMBER(name) || number_of(numbers, #name, &state->name == &state->strange, &state->name)
#define READ_FUNCTION(name, returned, arguments) || number_of(numbers, #name, 0, &state->name)
    if (0 STATE_NUMBERS(READ_NUMBER) STATE_FUNCTIONS(READ_FUNCTION)) return -1;
    if (number_of(numbers, "describe", 1, &state->describe)) return -1;
#ifndef OUTBLAS_CXX
    state->describe = NULL;
#endif
    return 0;
}

int state_is_watched(const TorchState *state, int *grad) {
    *grad = state->gradients();
    return state->function_modes() || state->dispatch_modes() || *state->tracing() || state->autocast(ON_CUDA) ||
           state->autocast(ON_CPU);
}

#ifdef OUTBLAS_CXX
int state_describe(const TorchState *state, PyObject *tensor, DlTensor *out) {
    return describe_tensor(state->describe, at_tensor(state, tensor), out);
}
#else
int state_describe(const TorchState *state, PyObject *tensor, DlTensor *out) {
    (void)state, (void)tensor, (void)out;
    return -1;
}
#endif

int state_is_strange(const TorchState *state, PyObject *tensor) {
    return (field(state, tensor, state->keys) & state->strange) != 0;
}

int state_may_want_gradient(const TorchState *state, PyObject *tensor) {
    return field(state, tensor, state->gradient) != 0;
}

int state_is_inference(const TorchState *state, PyObject *tensor) {
    return (field(state, tensor, state->keys) & state->versioned) == 0;
}

void state_bump_version(const TorchState *state, PyObject *tensor) { state->bump_version(at_tensor(state, tensor)); }
