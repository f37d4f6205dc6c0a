// outblas.dispatch._native: `matmul(a, b, out, option)` for products that the Python dispatch has answered before.
//
// A call reads the same fields of its operands as the Python dispatch, looks them up, and launches. It allocates the
// output only, does not synchronise, and runs no Python code. It returns None for an unknown product, and for a product
// that torch must see. The caller then asks the Python dispatch, whose errors are the ones that a user meets.
//
// Only the limited API of Python 3.10 is used; neither torch nor CUDA is linked.
#include "object.h"
#include "read.h"
#include "request_clock.h"

#ifndef OUTBLAS_SOURCE_ID
#define OUTBLAS_SOURCE_ID ""
#endif

#define KEYWORD(name) #name,
#define ADDRESS(name) &hooks.name,
#define OBJECT(name) "O"
#define HOLD(name) Py_INCREF(hooks.name);
#define DROP(name) Py_CLEAR(self->hooks.name);

// -- doing -----------------------------------------------------------------------------------------------------------

static PyObject *torch_product(TableObject *self, PyObject *const *args) {
    if (args[2] == Py_None) return PyObject_CallFunctionObjArgs(self->hooks.product, args[0], args[1], NULL);
    PyObject *operands = PyTuple_Pack(2, args[0], args[1]), *named = Py_BuildValue("{sO}", "out", args[2]);
    PyObject *result = operands && named ? PyObject_Call(self->hooks.product, operands, named) : NULL;
    Py_XDECREF(operands);
    Py_XDECREF(named);
    return result;
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
    const TorchState *state = self->state;
    if (state || self->hooks.spares_inference != Py_True) {
        const int inference = is_inference(self, state, tensor);
        if (inference) return inference < 0 ? -1 : 0;
    }
    if (state) {
        state_bump_version(state, tensor);
        return 0;
    }
    PyObject *tensors = PyTuple_Pack(1, tensor);
    PyObject *done = tensors ? PyObject_CallFunctionObjArgs(self->hooks.increment_version, tensors, NULL) : NULL;
    Py_XDECREF(tensors);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// Raises; always -1.
static int refuse(TableObject *self, const char *call, int status) {
    PyObject *nothing = PyObject_CallFunction(self->hooks.refused, "si", call, status);
    Py_XDECREF(nothing);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s failed with %d", call, status);
    return -1;
}

// Enqueues what an entry says, 0 for success.
static int enqueue(TableObject *self, const Entry *entry, const uint64_t addresses[3], uint64_t workspace, void *stream) {
    TensorMap maps[MAX_MAPS];
    int status;
    if (entry->maker == BY_KERNEL) {
        status = table_maps(&self->table, &self->driver, entry, addresses, maps);
        if (status) return refuse(self, "cuTensorMapEncodeTiled", status);
    }
    // A full queue makes the driver wait, perhaps for a host function that needs the interpreter.
    Py_BEGIN_ALLOW_THREADS
    workspace_hold(workspace);
    if (entry->maker == BY_KERNEL)
        status = driver_launch(&self->driver, &entry->launch, maps, addresses, workspace, stream);
    else
        status = blas_product(&entry->product, addresses, workspace, entry->workspace_bytes, stream);
    workspace_release(workspace);
    Py_END_ALLOW_THREADS
    return status ? refuse(self, entry->maker == BY_KERNEL ? "cuLaunchKernelEx" : "cublasLtMatmul", status) : 0;
}

// Finds the workspace for an entry, with a reference to its owner. It belongs to the stream, or to the capture that
// records the stream: graphs of one stream may be replayed on two streams at once. Returns 0 if Python must see the
// call, because Python makes workspaces.
static uint64_t borrow(TableObject *self, const Entry *entry, void *stream, PyObject **owner) {
    const uint64_t capture = driver_capture(&self->driver, stream);
    if (capture == UNKNOWN_CAPTURE) return 0;
    const Lent *lent = table_lent(&self->table, entry->key.device, stream, capture, entry->workspace_bytes);
    if (!lent) return 0;
    *owner = lent->owner;
    Py_INCREF(*owner);
    return lent->address;
}

// Where C is: of `out`, or of a new tensor; a new reference. NULL without an error: the current device is another.
static PyObject *output_of(TableObject *self, const Entry *entry, PyObject *out, uint64_t *address) {
    if (out) {
        Py_INCREF(out);
        return out;
    }
    PyObject *made = allocate(self, entry->allocation, self->devices[entry->key.device].index);
    if (made && address_of(self, made, address)) Py_CLEAR(made);
    return made;
}

// Enqueues the product of an entry; a new reference to what was written, NULL for an error. Without an error, and
// NULL: the Python dispatch has to see the call.
static PyObject *answer(TableObject *self, const Entry *entry, PyObject *out, uint64_t addresses[3]) {
    // Copy and hold everything first. A call of Python may let another thread clear the table, and two threads must not
    // share the records that the driver reads.
    const Entry copied = *entry;
    PyObject *result = NULL, *owner = NULL;
    uint64_t workspace = 0;
    void *stream = NULL;
    Py_XINCREF((PyObject *)copied.allocation);
    Py_XINCREF((PyObject *)copied.keep);
    if (stream_of(self, self->exchange, &self->devices[copied.key.device], &stream)) goto done;
    if (copied.workspace_bytes && !(workspace = borrow(self, &copied, stream, &owner))) goto done;
    result = output_of(self, &copied, out, &addresses[2]);
    if (!result) goto done;
    if (enqueue(self, &copied, addresses, workspace, stream)) {
        Py_CLEAR(result);
        goto done;
    }
    self->launches++;
    if (out && written(self, out)) Py_CLEAR(result);
done:
    Py_XDECREF((PyObject *)copied.allocation);
    Py_XDECREF((PyObject *)copied.keep);
    Py_XDECREF(owner);
    return result;
}

// Returns the product of a learned call, None for any other. Below autograd the caller itself calls torch, so a product
// that torch computes gives NotImplemented.
static PyObject *known(TableObject *self, PyObject *const *args, Py_ssize_t count, int below) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "matmul and ours take 4 arguments: a, b, out, option");
        return NULL;
    }
    Key key;
    uint64_t addresses[3];
    if (self->table.count && read_call(self, args, &key, addresses, below)) {
        PyObject *out = args[2] == Py_None ? NULL : args[2];
        const Entry *entry = table_find(&self->table, &key);
        if (!entry || (out && entry_overlap(entry, addresses))) Py_RETURN_NONE;
        if (entry->maker == BY_TORCH) {
            if (!below) return torch_product(self, args);
            Py_INCREF(Py_NotImplemented);
            return Py_NotImplemented;
        }
        if (driver_context(&self->driver) == entry->context && driver_met(entry->context)) {
            PyObject *result = answer(self, entry, out, addresses);
            if (result || PyErr_Occurred()) return result;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *table_matmul(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    return known((TableObject *)object, args, count, 0);
}

static PyObject *table_ours(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    return known((TableObject *)object, args, count, 1);
}

// -- learning --------------------------------------------------------------------------------------------------------

static PyObject *table_learn(PyObject *object, PyObject *args) {
    TableObject *self = (TableObject *)object;
    PyObject *call[4], *launch, *product = Py_None;
    Py_ssize_t element_bytes;
    if (!PyArg_ParseTuple(args, "OOOOnO|O", &call[0], &call[1], &call[2], &call[3], &element_bytes, &launch, &product))
        return NULL;
    Entry made;
    Key key;
    uint64_t addresses[3];
    if (parse_answer(launch, product, &made)) return NULL;
    if (!read_new_call(self, call, &key, addresses)) Py_RETURN_FALSE;
    // Spans are compared in elements of one size.
    if (key.dtype[0] != key.dtype[1] || (call[2] != Py_None && key.dtype[2] != key.dtype[0])) Py_RETURN_FALSE;
    if (table_find(&self->table, &key)) Py_RETURN_TRUE;  // another thread was first
    if (self->table.count == TABLE_LIMIT) table_clear(&self->table, let_go);  // rare, and learned again call by call
    if (table_find(&self->table, &key)) Py_RETURN_TRUE;  // letting go of objects may have run other code
    made.element_bytes = element_bytes;
    driver_met(made.context);  // by the product that Python has just computed
    if (!table_add(&self->table, &key, &made)) return PyErr_NoMemory();
    Py_XINCREF((PyObject *)made.allocation);
    Py_XINCREF((PyObject *)made.keep);
    Py_RETURN_TRUE;
}

static PyObject *table_lend_method(PyObject *object, PyObject *args) {
    TableObject *self = (TableObject *)object;
    PyObject *tensor, *owner;
    unsigned long long stream, address, bytes, capture = NO_CAPTURE;
    if (!PyArg_ParseTuple(args, "OKKKO|K", &tensor, &stream, &address, &bytes, &owner, &capture)) return NULL;
    if (!is_plain(self, tensor)) Py_RETURN_NONE;
    const int device = device_of(self, tensor, 1);
    if (device < 0) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    const Lent lent = {(int16_t)device, (void *)(uintptr_t)stream, capture, address, bytes, owner};
    Py_INCREF(owner);
    PyObject *replaced = table_lend(&self->table, &lent);
    Py_XDECREF(replaced);
    Py_RETURN_NONE;
}

static PyObject *table_forget(PyObject *object, PyObject *unused) {
    (void)unused;
    table_clear(&((TableObject *)object)->table, let_go);
    Py_RETURN_NONE;
}

static PyObject *table_counts(PyObject *object, PyObject *unused) {
    (void)unused;
    const TableObject *self = (TableObject *)object;
    const int described = self->state && self->state->describe;
    const char *reads_by = !self->exchange ? "methods" : described ? "tensors" : "exchange";
    return Py_BuildValue("{sIsKssss}", "remembered", self->table.count, "launches", self->launches, "reads_by",
                         reads_by, "state_by", self->state ? "loads" : "methods");
}

// -- the type --------------------------------------------------------------------------------------------------------

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *keywords[] = {"libcuda", HOOKS(KEYWORD) NULL};
    Hooks hooks;
    const char *path;
    if (!PyArg_ParseTupleAndKeywords(args, named, "s" HOOKS(OBJECT), keywords, &path, HOOKS(ADDRESS) NULL)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    TableObject *self = (TableObject *)make(type, 0);
    if (!self) return NULL;
    HOOKS(HOLD)
    self->hooks = hooks;
    if (prepare_reading(self)) {
        Py_DECREF(self);
        return NULL;
    }
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
    table_close(&self->table, let_go);
    driver_close(&self->driver);
    for (int i = 0; i < self->device_count; i++) Py_DECREF(self->devices[i].object);
    HOOKS(DROP)
    freefunc give_back = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give_back(object);
    Py_DECREF(type);
}

static PyMethodDef table_methods[] = {
    {"matmul", (PyCFunction)(void (*)(void))table_matmul, METH_FASTCALL,
     "matmul(a, b, out, option): the product of a call that was learned, None for any other."},
    {"ours", (PyCFunction)(void (*)(void))table_ours, METH_FASTCALL,
     "ours(a, b, out, option): as matmul, for callers below autograd, which look after gradients and call torch "
     "themselves: NotImplemented for what is torch's."},
    {"learn", table_learn, METH_VARARGS,
     "learn(a, b, out, option, element_bytes, launch, product=None): answer such calls by a launch or by a product of "
     "cuBLASLt, both None: by torch. Whether it could be."},
    {"lend", table_lend_method, METH_VARARGS,
     "lend(tensor, stream, address, bytes, owner, capture=0): the workspace of a stream of the tensor's device, or in "
     "the driver's capture of that number, in place of the one it had; the owner is held."},
    {"forget", table_forget, METH_NOARGS, "forget(): all that was learned and lent."},
    {"counts", table_counts, METH_NOARGS,
     "counts(): calls remembered, products launched, how operands are read, and what torch knows of them."},
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
    "outblas.dispatch._native.Table", sizeof(TableObject), 0, Py_TPFLAGS_DEFAULT, table_slots,
};

static PyMethodDef module_methods[] = {
    {"serve_requests", serve_requests, METH_VARARGS,
     "serve_requests(libcuda, stream, calls, arrivals, refused): times of single requests, see request_clock.h."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "outblas.dispatch._native", "The hot path of outblas.matmul.", -1, module_methods, NULL, NULL,
    NULL, NULL,
};

#ifdef OUTBLAS_CXX
extern PyType_Spec products_spec;

static int add_products(PyObject *made) {
    PyObject *type = PyType_FromSpec(&products_spec);
    return type ? PyModule_AddObject(made, "Products", type) : -1;
}
#else  // without a C++ compiler
static int add_products(PyObject *made) {
    (void)made;
    return 0;
}
#endif

PyMODINIT_FUNC PyInit__native(void) {
#define INTERN(name) \
    if (!(names.name = PyUnicode_InternFromString(#name))) return NULL;
    NAMES(INTERN)
#define AS_BYTES(name) \
    if (!(switches.name = PyBytes_FromString(#name))) return NULL;
    SWITCHES(AS_BYTES)
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&table_spec);
    if (!made || !type || PyModule_AddObject(made, "Table", type) < 0 ||
        PyModule_AddStringConstant(made, "SOURCE_ID", OUTBLAS_SOURCE_ID) < 0 || add_products(made) < 0)
        return NULL;
    return made;
}
