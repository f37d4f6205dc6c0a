// What native.c, read.c and products.c share: names, streams, and answers as Python gives them.
#include "object.h"

#include <string.h>

Names names;
Switches switches;

void let_go(void *object) { Py_DECREF((PyObject *)object); }

int truth(PyObject *object) {
    if (!object) return -1;
    const int found = PyObject_IsTrue(object);
    Py_DECREF(object);
    return found;
}

int stream_of(const TableObject *self, const Exchange *exchange, const Device *device, void **stream) {
    if (exchange && device->type == DLPACK_CUDA) return exchange->current_stream(device->type, device->id, stream);
    PyObject *index = PyLong_FromLong(device->index);
    if (!index) return -1;
    PyObject *number = PyObject_CallFunctionObjArgs(self->hooks.current_stream, index, NULL);
    Py_DECREF(index);
    if (!number) return -1;
    *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int parse_launch(PyObject *tuple, Entry *entry) {
    Launch *launch = &entry->launch;
    unsigned long long function, context;
    PyObject *maps, *allocation;
    if (!PyArg_ParseTuple(tuple, "KK(III)IIIp(iii)O!KO!", &function, &context, &launch->grid[0], &launch->grid[1],
                          &launch->grid[2], &launch->threads, &launch->shared_bytes, &launch->cluster,
                          &launch->dependent, &launch->extents[0], &launch->extents[1], &launch->extents[2],
                          &PyTuple_Type, &maps, &entry->workspace_bytes, &PyTuple_Type, &allocation))
        return -1;
    entry->maker = BY_KERNEL;
    entry->context = (void *)(uintptr_t)context;
    entry->allocation = allocation;
    launch->function = (void *)(uintptr_t)function;
    const Py_ssize_t count = PyTuple_Size(maps);
    if (count != 0 && count != 3 && count != MAX_MAPS) {
        PyErr_SetString(PyExc_ValueError, "a launch has three TMA maps, eight of each of two operands, or none");
        return -1;
    }
    launch->maps = (int)count;
    for (int i = 0; i < launch->maps; i++) {
        MapSpec *spec = &launch->map[i];
        unsigned long long offset = 0;
        spec->pitch = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(maps, i), "IIIIiii|IK", &spec->rows, &spec->cols, &spec->box_rows,
                              &spec->box_cols, &spec->type, &spec->swizzle, &spec->promotion, &spec->pitch, &offset))
            return -1;
        if (!spec->pitch) spec->pitch = spec->cols;
        spec->offset = offset;
    }
    return 0;
}

static int parse_product(PyObject *tuple, Entry *entry) {
    Product *product = &entry->product;
    unsigned long long context, number[6];
    const char *algo;
    Py_ssize_t algo_bytes;
    PyObject *keep, *allocation;
    if (!PyArg_ParseTuple(tuple, "K(KKKKKKII)y#KOO!", &context, &number[0], &number[1], &number[2], &number[3],
                          &number[4], &number[5], &product->alpha, &product->beta, &algo, &algo_bytes,
                          &entry->workspace_bytes, &keep, &PyTuple_Type, &allocation))
        return -1;
    if (algo_bytes != sizeof product->algo || !number[0]) {
        PyErr_SetString(PyExc_ValueError, "a product has a function and an algorithm of 64 bytes");
        return -1;
    }
    if (entry->workspace_bytes && entry->workspace_bytes <= COUNTERS_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a workspace begins with the counters of kernels");
        return -1;
    }
    void **into[6] = {&product->matmul, &product->handle, &product->descriptor,
                      &product->first,  &product->second, &product->out};
    for (int i = 0; i < 6; i++) *into[i] = (void *)(uintptr_t)number[i];
    memcpy(product->algo, algo, sizeof product->algo);
    entry->maker = BY_CUBLASLT;
    entry->context = (void *)(uintptr_t)context;
    entry->allocation = allocation;
    entry->keep = keep;
    return 0;
}

int parse_answer(PyObject *launch, PyObject *product, Entry *entry) {
    memset(entry, 0, sizeof *entry);
    PyObject *tuple = launch != Py_None ? launch : product;
    if (tuple == Py_None) return 0;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a launch, or a product of cuBLASLt, is a tuple");
        return -1;
    }
    return launch != Py_None ? parse_launch(tuple, entry) : parse_product(tuple, entry);
}
