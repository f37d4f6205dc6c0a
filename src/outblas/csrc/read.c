// What of a call decides the answer: the Python dispatch reads the same (tensors.py, decide.py).
#include "object.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static int pair_of(PyObject *tuple, int64_t into[2]) {
    if (!tuple) return -1;
    int status = -1;
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) == 2) {
        into[0] = PyLong_AsLongLong(PyTuple_GetItem(tuple, 0));
        into[1] = PyLong_AsLongLong(PyTuple_GetItem(tuple, 1));
        status = PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(tuple);
    return status;
}

int truth(PyObject *object) {
    if (!object) return -1;
    const int found = PyObject_IsTrue(object);
    Py_DECREF(object);
    return found;
}

int device_of(TableObject *self, PyObject *tensor, int add) {
    PyObject *device = PyObject_GetAttr(tensor, names.device);
    if (!device) return -1;
    int found = -1;
    for (int i = 0; i < self->device_count && found < 0; i++)
        if (PyObject_RichCompareBool(device, self->devices[i], Py_EQ) == 1) found = i;
    if (found < 0 && add && self->device_count < MAX_DEVICES) {
        PyObject *index = PyObject_GetAttr(device, names.index);
        if (index) {
            found = self->device_count++;
            self->device_index[found] = index == Py_None ? 0 : PyLong_AsLong(index);
            self->devices[found] = device;
            Py_DECREF(index);
            return found;
        }
    }
    Py_DECREF(device);
    return found;
}

int is_plain(const TableObject *self, PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == self->hooks.tensor || type == self->hooks.parameter;
}

// One operand into its place of the key. -1: it is not a plain strided matrix in memory of its own.
static int read_operand(TableObject *self, PyObject *tensor, int which, int grad, Key *key, uint64_t *address) {
    // Wrapped, functional and zero tensors have no address: torch raises, or says 0.
    PyObject *number = PyObject_CallFunctionObjArgs(self->hooks.data_ptr, tensor, NULL);
    if (!number) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (!*address || PyErr_Occurred()) return -1;
    key->offset[which] = (int32_t)(*address % ROW_ALIGN_BYTES);
    if (pair_of(PyObject_GetAttr(tensor, names.shape), key->shape[which])) return -1;
    if (pair_of(PyObject_CallFunctionObjArgs(self->hooks.stride, tensor, NULL), key->strides[which])) return -1;
    PyObject *dtype = PyObject_GetAttr(tensor, names.dtype);
    if (!dtype) return -1;
    key->dtype[which] = (uint64_t)(uintptr_t)dtype;  // torch has one object per dtype, for as long as it lives
    Py_DECREF(dtype);
    if (truth(PyObject_CallFunctionObjArgs(self->hooks.is_neg, tensor, NULL))) return -1;
    return grad && truth(PyObject_GetAttr(tensor, names.requires_grad)) ? -1 : 0;
}

// Whether torch must see a call whatever its operands; -1 for an error.
static int is_watched(TableObject *self, int *grad) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(self->hooks.watchers); i++) {
        const int found = truth(PyObject_CallNoArgs(PyTuple_GetItem(self->hooks.watchers, i)));
        if (found) return found;
    }
    PyObject *level = PyObject_GetAttr(self->hooks.forward_ad, names._current_level);
    if (!level) return -1;
    const long number = PyLong_AsLong(level);
    Py_DECREF(level);
    if (PyErr_Occurred()) return -1;
    *grad = truth(PyObject_CallNoArgs(self->hooks.grad_enabled));
    return *grad < 0 ? -1 : number >= 0;
}

// As the Python dispatch reads a switch: the environment may change between calls.
static int is_on(const char *variable) {
    const char *text = getenv(variable);
    if (!text) return 0;
    const char *const yes[] = {"1", "true", "yes", "on"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(text, yes[i]) == 0) return 1;
    return 0;
}

// The launch option that a call allows: a number, or None for what the environment says; -1: neither.
static int option_of(PyObject *option) {
    if (option == Py_None) return is_on("OUTBLAS_WEIGHTS") ? CONSTANT_WEIGHTS : is_on("OUTBLAS_PDL") ? DEPENDENT : PLAIN;
    const long number = PyLong_AsLong(option);
    return number < PLAIN || number > CONSTANT_WEIGHTS ? -1 : (int)number;
}

int read_call(TableObject *self, PyObject *const *args, int add, Key *key, uint64_t addresses[3]) {
    PyObject *out = args[2];
    const int operands = out == Py_None ? 2 : 3;
    int grad = 0;
    for (int i = 0; i < operands; i++)
        if (!is_plain(self, args[i])) return 0;
    memset(key, 0, sizeof *key);
    addresses[2] = 0;
    int wrong = is_watched(self, &grad);
    for (int i = 0; i < operands && !wrong; i++) {
        const int device = device_of(self, args[i], add && i == 0);
        wrong = device < 0 || (i > 0 && device != key->device);
        key->device = (int16_t)device;
        wrong = wrong || read_operand(self, args[i], i, grad, key, &addresses[i]);
    }
    if (!wrong) {
        const int option = option_of(args[3]);
        key->option = (int16_t)option;
        wrong = option < 0;
    }
    if (wrong) PyErr_Clear();  // the Python dispatch, asked next, meets the same error and tells it
    return !wrong;
}
