// outblas._native: `matmul(a, b, out, pdl)` for products that the Python dispatch has answered before.
//
// A call reads of its operands what the Python dispatch reads, looks that up, and launches: no allocation besides the
// output, no synchronisation, no Python code. It returns None for everything that it does not know, or that may be
// torch's to see; the caller then asks the Python dispatch, whose errors are the ones that a user meets.
//
// Only the limited API of Python 3.10 is used; neither torch nor CUDA is linked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "table.h"

#ifndef OUTBLAS_SOURCE_ID
#define OUTBLAS_SOURCE_ID ""
#endif

enum { MAX_DEVICES = 64, ROW_ALIGN_BYTES = 16 };

// What a Table is given at its making, by keyword: torch's own functions, called as Python objects.
#define HOOKS(X)                                                                                       \
    X(tensor)            /* torch.Tensor: operands are exactly this */                                 \
    X(parameter)         /* or torch.nn.Parameter */                                                   \
    X(data_ptr)          /* method of tensors */                                                       \
    X(is_neg)            /* method of tensors */                                                       \
    X(is_inference)      /* method of tensors */                                                       \
    X(stride)            /* method of tensors */                                                       \
    X(watchers)          /* tuple of callables () -> truth: something must see the call */             \
    X(grad_enabled)      /* () -> bool */                                                              \
    X(forward_ad)        /* module; a level >= 0 in its _current_level: forward-mode differentiation */ \
    X(current_device)    /* () -> int */                                                               \
    X(current_stream)    /* (device) -> raw stream */                                                  \
    X(empty)             /* (shape, strides, dtype) -> tensor on the current device */                 \
    X(increment_version) /* (tensors) -> None */                                                       \
    X(product)           /* torch.matmul */                                                            \
    X(refused)           /* (driver's call, status) -> never returns: raises */

#define NAMES(X) X(shape) X(dtype) X(device) X(index) X(requires_grad) X(_current_level)

#define FIELD(name) PyObject *name;
#define KEYWORD(name) #name,
#define ADDRESS(name) &hooks.name,
#define OBJECT(name) "O"
#define HOLD(name) Py_INCREF(hooks.name);
#define DROP(name) Py_CLEAR(self->hooks.name);

typedef struct {
    HOOKS(FIELD)
} Hooks;

static struct {
    NAMES(FIELD)
} names;

typedef struct {
    PyObject_HEAD
    Driver driver;
    Table table;
    Hooks hooks;
    PyObject *devices[MAX_DEVICES];
    long device_index[MAX_DEVICES];
    int device_count;
    unsigned long long launches;
} TableObject;

static void release(void *object) { Py_DECREF((PyObject *)object); }

// -- reading ---------------------------------------------------------------------------------------------------------

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

// The truth of a new reference, -1 for an error; gives the reference back.
static int truth(PyObject *object) {
    if (!object) return -1;
    const int found = PyObject_IsTrue(object);
    Py_DECREF(object);
    return found;
}

static int device_of(TableObject *self, PyObject *tensor, int add) {
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

static int is_plain(const TableObject *self, PyObject *object) {
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

// As the Python dispatch reads it: the environment may change between calls.
static int dependent_by_default(void) {
    const char *text = getenv("OUTBLAS_PDL");
    if (!text) return 0;
    const char *const yes[] = {"1", "true", "yes", "on"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcasecmp(text, yes[i]) == 0) return 1;
    return 0;
}

// Fills the key and the addresses from (a, b, out, pdl). 0: this is not a call for the table; no error is left.
static int read_call(TableObject *self, PyObject *const *args, int add, Key *key, uint64_t addresses[3]) {
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
        const int dependent = args[3] == Py_None ? dependent_by_default() : PyObject_IsTrue(args[3]);
        key->dependent = (int16_t)dependent;
        wrong = dependent < 0;
    }
    if (wrong) PyErr_Clear();  // the Python dispatch, asked next, meets the same error and tells it
    return !wrong;
}

// -- doing -----------------------------------------------------------------------------------------------------------

static PyObject *torch_product(TableObject *self, PyObject *const *args) {
    if (args[2] == Py_None) return PyObject_CallFunctionObjArgs(self->hooks.product, args[0], args[1], NULL);
    PyObject *operands = PyTuple_Pack(2, args[0], args[1]), *named = Py_BuildValue("{sO}", "out", args[2]);
    PyObject *result = operands && named ? PyObject_Call(self->hooks.product, operands, named) : NULL;
    Py_XDECREF(operands);
    Py_XDECREF(named);
    return result;
}

// The raw current stream of a device, 0 for success.
static int stream_of(TableObject *self, long device, void **stream) {
    PyObject *index = PyLong_FromLong(device);
    if (!index) return -1;
    PyObject *number = PyObject_CallFunctionObjArgs(self->hooks.current_stream, index, NULL);
    Py_DECREF(index);
    if (!number) return -1;
    *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

// A new output, where torch's current device is that of the operands; NULL without an error where it is not.
static PyObject *allocate(TableObject *self, PyObject *allocation, long device) {
    PyObject *current = PyObject_CallNoArgs(self->hooks.current_device);
    if (!current) return NULL;
    const long index = PyLong_AsLong(current);
    Py_DECREF(current);
    if (index != device || PyErr_Occurred()) return NULL;
    return PyObject_CallObject(self->hooks.empty, allocation);
}

// Tells autograd that a tensor was written behind its back, as torch's own operators do.
static int written(TableObject *self, PyObject *tensor) {
    const int inference = truth(PyObject_CallFunctionObjArgs(self->hooks.is_inference, tensor, NULL));
    if (inference) return inference < 0 ? -1 : 0;
    PyObject *tensors = PyTuple_Pack(1, tensor);
    PyObject *done = tensors ? PyObject_CallFunctionObjArgs(self->hooks.increment_version, tensors, NULL) : NULL;
    Py_XDECREF(tensors);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static void *refuse(TableObject *self, const char *call, int status) {
    PyObject *nothing = PyObject_CallFunction(self->hooks.refused, "si", call, status);
    Py_XDECREF(nothing);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s failed with %d", call, status);
    return NULL;
}

// Enqueues the kernel of an entry; a new reference to what was written, NULL for an error. Without an error, and
// NULL: the current device is another.
static PyObject *launch(TableObject *self, const Entry *entry, PyObject *out, uint64_t addresses[3]) {
    // All that is needed is copied first: whatever calls Python may let another thread clear the table, and no two
    // threads share what the driver reads.
    const Launch copied = entry->launch;
    const uint64_t serial = entry->serial;
    const long device = self->device_index[entry->key.device];
    PyObject *allocation = out ? NULL : entry->allocation;
    PyObject *result = out;
    Py_XINCREF(result);
    if (!out) {
        Py_INCREF(allocation);
        result = allocate(self, allocation, device);
        Py_DECREF(allocation);
        if (!result) return NULL;
        PyObject *number = PyObject_CallFunctionObjArgs(self->hooks.data_ptr, result, NULL);
        addresses[2] = number ? PyLong_AsUnsignedLongLong(number) : 0;
        Py_XDECREF(number);
    }
    void *stream = NULL;
    TensorMap maps[3];
    if (PyErr_Occurred() || stream_of(self, device, &stream)) goto failed;
    for (int i = 0; copied.maps && i < 3; i++) {
        const int status = table_map(&self->table, &self->driver, &copied.map[i], 3 * serial + (uint64_t)i, addresses[i], &maps[i]);
        if (status) {
            refuse(self, "cuTensorMapEncodeTiled", status);
            goto failed;
        }
    }
    int status;
    // A full queue makes the driver wait, perhaps for a host function that needs the interpreter.
    Py_BEGIN_ALLOW_THREADS
    status = driver_launch(&self->driver, &copied, maps, addresses, stream);
    Py_END_ALLOW_THREADS
    if (status) {
        refuse(self, "cuLaunchKernelEx", status);
        goto failed;
    }
    self->launches++;
    if (out && written(self, out)) goto failed;
    return result;
failed:
    Py_DECREF(result);
    return NULL;
}

static PyObject *table_matmul(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    TableObject *self = (TableObject *)object;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "matmul(a, b, out, pdl) takes 4 arguments");
        return NULL;
    }
    Key key;
    uint64_t addresses[3];
    if (self->table.count && read_call(self, args, 0, &key, addresses)) {
        PyObject *out = args[2] == Py_None ? NULL : args[2];
        const Entry *entry = table_find(&self->table, &key);
        if (!entry || (out && entry_overlap(entry, addresses))) Py_RETURN_NONE;
        if (entry->torch) return torch_product(self, args);
        if (driver_context(&self->driver) == entry->launch.context) {
            PyObject *result = launch(self, entry, out, addresses);
            if (result || PyErr_Occurred()) return result;
        }
    }
    Py_RETURN_NONE;
}

// -- learning --------------------------------------------------------------------------------------------------------

static int parse_launch(PyObject *tuple, Launch *launch, PyObject **allocation) {
    unsigned long long function, context;
    PyObject *maps;
    if (!PyArg_ParseTuple(tuple, "KK(III)IIIp(iii)O!O!", &function, &context, &launch->grid[0], &launch->grid[1],
                          &launch->grid[2], &launch->threads, &launch->shared_bytes, &launch->cluster,
                          &launch->dependent, &launch->extents[0], &launch->extents[1], &launch->extents[2],
                          &PyTuple_Type, &maps, &PyTuple_Type, allocation))
        return -1;
    launch->function = (void *)(uintptr_t)function;
    launch->context = (void *)(uintptr_t)context;
    launch->maps = PyTuple_Size(maps) > 0;
    if (launch->maps && PyTuple_Size(maps) != 3) {
        PyErr_SetString(PyExc_ValueError, "a launch has the TMA maps of three operands, or none");
        return -1;
    }
    for (int i = 0; launch->maps && i < 3; i++) {
        MapSpec *spec = &launch->map[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(maps, i), "IIIIiii", &spec->rows, &spec->cols, &spec->box_rows,
                              &spec->box_cols, &spec->type, &spec->swizzle, &spec->promotion))
            return -1;
    }
    return 0;
}

static PyObject *table_learn(PyObject *object, PyObject *args) {
    TableObject *self = (TableObject *)object;
    PyObject *call[4], *launched, *allocation = NULL;
    Py_ssize_t element_bytes;
    if (!PyArg_ParseTuple(args, "OOOOnO", &call[0], &call[1], &call[2], &call[3], &element_bytes, &launched)) return NULL;
    Launch launch = {0};
    if (launched != Py_None) {
        if (!PyTuple_Check(launched)) {
            PyErr_SetString(PyExc_TypeError, "a launch is a tuple");
            return NULL;
        }
        if (parse_launch(launched, &launch, &allocation)) return NULL;
    }
    Key key;
    uint64_t addresses[3];
    if (!read_call(self, call, 1, &key, addresses)) Py_RETURN_FALSE;
    // Spans are compared in elements of one size.
    if (key.dtype[0] != key.dtype[1] || (call[2] != Py_None && key.dtype[2] != key.dtype[0])) Py_RETURN_FALSE;
    if (table_find(&self->table, &key)) Py_RETURN_TRUE;  // another thread was first
    if (self->table.count == TABLE_LIMIT) table_clear(&self->table, release);  // rare, and learned again call by call
    if (table_find(&self->table, &key)) Py_RETURN_TRUE;  // letting go of objects may have run other code
    Entry *entry = table_add(&self->table, &key);
    if (!entry) return PyErr_NoMemory();
    entry->torch = launched == Py_None;
    entry->element_bytes = element_bytes;
    entry->launch = launch;
    entry->allocation = allocation;
    Py_XINCREF(allocation);
    Py_RETURN_TRUE;
}

static PyObject *table_forget(PyObject *object, PyObject *unused) {
    (void)unused;
    table_clear(&((TableObject *)object)->table, release);
    Py_RETURN_NONE;
}

static PyObject *table_counts(PyObject *object, PyObject *unused) {
    (void)unused;
    const TableObject *self = (TableObject *)object;
    return Py_BuildValue("{sIsK}", "remembered", self->table.count, "launches", self->launches);
}

// -- the type --------------------------------------------------------------------------------------------------------

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *keywords[] = {"libcuda", HOOKS(KEYWORD) NULL};
    Hooks hooks;
    const char *path;
    if (!PyArg_ParseTupleAndKeywords(args, named, "s" HOOKS(OBJECT), keywords, &path, HOOKS(ADDRESS) NULL)) return NULL;
    if (!PyTuple_Check(hooks.watchers)) {
        PyErr_SetString(PyExc_TypeError, "watchers is a tuple of callables");
        return NULL;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    TableObject *self = (TableObject *)make(type, 0);
    if (!self) return NULL;
    HOOKS(HOLD)
    self->hooks = hooks;
    const char *missing = driver_open(&self->driver, path);
    if (missing) {
        PyErr_Format(PyExc_OSError, "%s cannot be loaded from %s", missing, path);
    } else if (table_open(&self->table)) {
        PyErr_NoMemory();
    } else {
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static void table_dealloc(PyObject *object) {
    TableObject *self = (TableObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    table_close(&self->table, release);
    driver_close(&self->driver);
    for (int i = 0; i < self->device_count; i++) Py_DECREF(self->devices[i]);
    HOOKS(DROP)
    freefunc give_back = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give_back(object);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"matmul", (PyCFunction)(void (*)(void))table_matmul, METH_FASTCALL,
     "matmul(a, b, out, pdl): the product of a call that was learned, None for any other."},
    {"learn", table_learn, METH_VARARGS,
     "learn(a, b, out, pdl, element_bytes, launch): answer such calls; launch None: by torch. Whether it could be."},
    {"forget", table_forget, METH_NOARGS, "forget(): all that was learned."},
    {"counts", table_counts, METH_NOARGS, "counts(): calls remembered, kernels launched."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_tp_doc, "Calls that were answered before."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    "outblas._native.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, table_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "outblas._native", "The hot path of outblas.matmul.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
#define INTERN(name) \
    if (!(names.name = PyUnicode_InternFromString(#name))) return NULL;
    NAMES(INTERN)
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&table_spec);
    if (!made || !type || PyModule_AddObject(made, "Table", type) < 0 ||
        PyModule_AddStringConstant(made, "SOURCE_ID", OUTBLAS_SOURCE_ID) < 0)
        return NULL;
    return made;
}
