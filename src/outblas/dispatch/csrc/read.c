// What of a call decides the answer: the Python dispatch reads the same (product_operands.py, decide.py).
//
// An operand is read as DLPack has it where this torch has an exchange, else by methods of tensors, which cost several times
// as much. The methods have the last word: nothing is learned of operands of which the exchange says otherwise.
#include "read.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

// A matrix as torch tells it. `dtype`: see Key.
typedef struct {
    uint64_t address, dtype;
    int64_t shape[2], strides[2];
    int device;
} Matrix;

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

int device_of(TableObject *self, PyObject *tensor, int add) {
    PyObject *device = PyObject_GetAttr(tensor, names.device);
    if (!device) return -1;
    int found = -1;
    for (int i = 0; i < self->device_count && found < 0; i++)
        if (PyObject_RichCompareBool(device, self->devices[i].object, Py_EQ) == 1) found = i;
    if (found < 0 && add && self->device_count < MAX_DEVICES) {
        PyObject *index = PyObject_GetAttr(device, names.index);
        if (index) {
            found = self->device_count++;
            self->devices[found] = (Device){device, index == Py_None ? 0 : PyLong_AsLong(index), 0, 0};
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

int is_inference(const TableObject *self, const TorchState *state, PyObject *tensor) {
    if (state) return state_is_inference(state, tensor);
    return truth(PyObject_CallFunctionObjArgs(self->hooks.is_inference, tensor, NULL));
}

// Wrapped, functional and zero tensors have no address: torch raises, or says 0.
static int address_by_method(const TableObject *self, PyObject *tensor, uint64_t *address) {
    PyObject *number = PyObject_CallFunctionObjArgs(self->hooks.data_ptr, tensor, NULL);
    if (!number) return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *address && !PyErr_Occurred() ? 0 : -1;
}

// What DLPack says of a tensor, by torch's own function if its state has it; 0 for success, -1 perhaps with an error.
static int describe(const Exchange *exchange, const TorchState *state, PyObject *tensor, DlTensor *out) {
    return state && state->describe ? state_describe(state, tensor, out) : exchange->tensor_from_object(tensor, out);
}

int address_of(const TableObject *self, PyObject *tensor, uint64_t *address) {
    DlTensor t;
    if (!self->exchange) return address_by_method(self, tensor, address);
    if (describe(self->exchange, self->state, tensor, &t)) return -1;
    *address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    return 0;
}

// -1: it is not a plain strided matrix in memory of its own, or is where no call was learned.
static int read_by_methods(TableObject *self, PyObject *tensor, Matrix *matrix) {
    matrix->device = device_of(self, tensor, 0);
    if (matrix->device < 0) return -1;
    if (address_by_method(self, tensor, &matrix->address)) return -1;
    if (pair_of(PyObject_GetAttr(tensor, names.shape), matrix->shape)) return -1;
    if (pair_of(PyObject_CallFunctionObjArgs(self->hooks.stride, tensor, NULL), matrix->strides)) return -1;
    PyObject *dtype = PyObject_GetAttr(tensor, names.dtype);
    if (!dtype) return -1;
    matrix->dtype = (uint64_t)(uintptr_t)dtype;  // torch has one object per dtype, for as long as it lives
    Py_DECREF(dtype);
    return 0;
}

// The same by one call. Like the methods it raises for what has no address, or gives none.
static int read_by_exchange(const TableObject *self, const Exchange *exchange, const TorchState *state, PyObject *tensor,
                            Matrix *matrix) {
    DlTensor t;
    if (describe(exchange, state, tensor, &t) || t.ndim != 2 || !t.shape || !t.strides || !t.data) return -1;
    matrix->device = 0;
    while (matrix->device < self->device_count && (self->devices[matrix->device].type != t.device_type ||
                                                   self->devices[matrix->device].id != t.device_id))
        matrix->device++;
    if (matrix->device == self->device_count) return -1;
    matrix->address = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    memcpy(matrix->shape, t.shape, sizeof matrix->shape);
    memcpy(matrix->strides, t.strides, sizeof matrix->strides);
    matrix->dtype = t.type_code | (uint64_t)t.type_bits << 8 | (uint64_t)t.type_lanes << 16;
    return 0;
}

// Whether torch must see an operand, lazily negated, with names or with a gradient to be kept; -1 for an error.
static int is_torchs(const TableObject *self, const TorchState *state, PyObject *tensor, int grad) {
    const Hooks *hooks = &self->hooks;
    if (state) {
        if (state_is_strange(state, tensor)) return 1;
        if (!state_may_want_gradient(state, tensor)) return 0;
    } else {
        const int negated = truth(PyObject_CallFunctionObjArgs(hooks->is_neg, tensor, NULL));
        if (negated) return negated;
        const int named = hooks->has_names == Py_None ? 0 : truth(PyObject_CallFunctionObjArgs(hooks->has_names, tensor, NULL));
        if (named) return named;
    }
    if (!grad) return 0;
    return truth(self->get_requires_grad(hooks->requires_grad, tensor, (PyObject *)Py_TYPE(tensor)));
}

// Whether an output is one that torch does not let anyone write here: an inference tensor outside of inference mode.
static int is_frozen(const TableObject *self, const TorchState *state, PyObject *out) {
    const int inference = is_inference(self, state, out);
    if (inference <= 0) return inference;
    const int mode = truth(PyObject_CallNoArgs(self->hooks.inference_mode));
    return mode < 0 ? -1 : !mode;
}

int prepare_reading(TableObject *self) {
    const Hooks *hooks = &self->hooks;
    self->get_requires_grad = (descrgetfunc)PyType_GetSlot(Py_TYPE(hooks->requires_grad), Py_tp_descr_get);
    if (!PyTuple_Check(hooks->watchers) || !PyDict_Check(hooks->forward_ad) || !self->get_requires_grad ||
        (hooks->compiling != Py_None && !PyDict_Check(hooks->compiling))) {
        PyErr_SetString(PyExc_TypeError, "watchers is a tuple, forward_ad and compiling are dicts, requires_grad a descriptor");
        return -1;
    }
    if (PyCapsule_IsValid(hooks->exchange, EXCHANGE_CAPSULE))
        self->exchange = exchange_of(PyCapsule_GetPointer(hooks->exchange, EXCHANGE_CAPSULE));
    if (PyDict_Check(hooks->state)) {
        if (state_open(&self->numbers, hooks->state)) return -1;
        self->state = &self->numbers;
    }
    return 0;
}

// Whether torch must see a call whatever its operands; -1 for an error.
static int is_watched(const TableObject *self, const TorchState *state, int *grad) {
    const Hooks *hooks = &self->hooks;
    if (state) {
        if (state_is_watched(state, grad)) return 1;
    } else {
        for (Py_ssize_t i = 0; i < PyTuple_Size(hooks->watchers); i++) {
            const int found = truth(PyObject_CallNoArgs(PyTuple_GetItem(hooks->watchers, i)));
            if (found) return found;
        }
        *grad = truth(PyObject_CallNoArgs(hooks->grad_enabled));
        if (*grad < 0) return -1;
    }
    if (hooks->compiling != Py_None && PyDict_GetItemWithError(hooks->compiling, names._is_compiling_flag) != Py_False)
        return 1;
    PyObject *level = PyDict_GetItemWithError(hooks->forward_ad, names._current_level);
    return !level || PyLong_AsLong(level) >= 0 || PyErr_Occurred();
}

// As the Python dispatch reads a switch: the environment may change between calls.
static int is_on(const TableObject *self, PyObject *variable) {
    const char *text;
    if (PyDict_Check(self->hooks.environment)) {
        PyObject *found = PyDict_GetItemWithError(self->hooks.environment, variable);
        text = found && PyBytes_Check(found) ? PyBytes_AsString(found) : NULL;
    } else {
        text = getenv(PyBytes_AsString(variable));
    }
    if (!text) return 0;
    const char *const yes[] = {"1", "true", "yes", "on"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(text, yes[i]) == 0) return 1;
    return 0;
}

// The option of a call, with its guarantee: a number, or None for what the environment says; -1: neither.
static int option_of(const TableObject *self, PyObject *option) {
    if (option == Py_None) {
        if (is_on(self, switches.OUTBLAS_WEIGHTS)) return CONSTANT_WEIGHTS;
        return is_on(self, switches.OUTBLAS_PDL) ? DEPENDENT : PLAIN;
    }
    const long number = PyLong_AsLong(option);
    return number < PLAIN || number > LAST_OPTION ? -1 : (int)number;
}

// Reads a call by the exchange and torch's state, or by methods where they are NULL. 0: it is not for the table; an error
// may be left. Below autograd no gradient is lost.
static int read_by(TableObject *self, const Exchange *exchange, const TorchState *state, PyObject *const *args, Key *key,
                   uint64_t addresses[3], int below) {
    const int operands = args[2] == Py_None ? 2 : 3;
    int grad = 0;
    for (int i = 0; i < operands; i++)
        if (!is_plain(self, args[i])) return 0;
    if (is_watched(self, state, &grad)) return 0;
    if (operands == 3 && is_frozen(self, state, args[2])) return 0;
    if (below) grad = 0;
    memset(key, 0, sizeof *key);
    addresses[2] = 0;
    for (int i = 0; i < operands; i++) {
        Matrix matrix;
        if (exchange ? read_by_exchange(self, exchange, state, args[i], &matrix)
                     : read_by_methods(self, args[i], &matrix))
            return 0;
        if ((i > 0 && matrix.device != key->device) || is_torchs(self, state, args[i], grad)) return 0;
        addresses[i] = matrix.address;
        key->offset[i] = (int32_t)(matrix.address % ROW_ALIGN_BYTES);
        memcpy(key->shape[i], matrix.shape, sizeof matrix.shape);
        memcpy(key->strides[i], matrix.strides, sizeof matrix.strides);
        key->dtype[i] = matrix.dtype;
        key->device = (int16_t)matrix.device;
    }
    const int option = option_of(self, args[3]);
    key->option = (int16_t)option;
    return option >= 0;
}

int read_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3], int below) {
    const int read = read_by(self, self->exchange, self->state, args, key, addresses, below);
    if (!read) PyErr_Clear();  // the Python dispatch, asked next, meets the same error and tells it
    return read;
}

// The number that the exchange has for a device goes to those of the table; 0: it is that of another one.
static int match_device(TableObject *self, const Exchange *exchange, PyObject *tensor, int device) {
    DlTensor t;
    if (describe(exchange, self->state, tensor, &t) || t.device_type <= 0) return 0;
    for (int i = 0; i < self->device_count; i++)
        if (i != device && self->devices[i].type == t.device_type && self->devices[i].id == t.device_id) return 0;
    Device *known = &self->devices[device];
    if (known->type && (known->type != t.device_type || known->id != t.device_id)) return 0;
    known->type = t.device_type;
    known->id = t.device_id;
    if (t.device_type != DLPACK_CUDA) return 1;
    void *ours, *theirs;
    return !stream_of(self, NULL, known, &theirs) && !stream_of(self, exchange, known, &ours) && ours == theirs;
}

// Whether the exchange says of a call what methods said; its own key takes the place of theirs.
static int exchange_agrees(TableObject *self, const Exchange *exchange, PyObject *const *args, Key *key,
                           const uint64_t addresses[3]) {
    Key other;
    uint64_t others[3];
    if (!match_device(self, exchange, args[0], key->device) ||
        !read_by(self, exchange, self->state, args, &other, others, 0))
        return 0;
    uint64_t dtype[3];
    memcpy(dtype, other.dtype, sizeof dtype);
    memcpy(other.dtype, key->dtype, sizeof dtype);
    if (memcmp(&other, key, sizeof other) || memcmp(others, addresses, sizeof others)) return 0;
    memcpy(key->dtype, dtype, sizeof dtype);
    return 1;
}

// Whether a call is read by torch's state as it was by methods.
static int state_agrees(TableObject *self, PyObject *const *args, int read) {
    Key key;
    uint64_t addresses[3];
    const int by_state = read_by(self, NULL, self->state, args, &key, addresses, 0);
    PyErr_Clear();
    return by_state == read;
}

int read_new_call(TableObject *self, PyObject *const *args, Key *key, uint64_t addresses[3]) {
    const Exchange *exchange = self->exchange;
    int read = 0;
    if (is_plain(self, args[0]) && device_of(self, args[0], 1) >= 0) {
        read = read_by(self, NULL, NULL, args, key, addresses, 0);
        PyErr_Clear();
        if (self->state && !state_agrees(self, args, read)) self->state = NULL;  // we do not understand it
    }
    if (read && exchange && !exchange_agrees(self, exchange, args, key, addresses)) {
        self->exchange = NULL;  // a torch whose exchange we do not understand; keys of the two ways never meet
        table_clear(&self->table, let_go);
    }
    PyErr_Clear();
    return read;
}
