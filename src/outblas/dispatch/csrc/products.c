// outblas.dispatch._native.Products: the kernels of products.h as Python has them, which teaches them.
#include "products.h"

#include <string.h>

#include "object.h"

typedef struct {
    PyObject_HEAD
    Products products;
    void *libraries[2];  // of aten and of outblas; NULL: not in place
} ProductsObject;

// The one that is in place or was last, which calls may still use: never given back before another takes its place.
static PyObject *installed;

// A writer waits without the interpreter's lock, and others wait for it. Between these two only C code runs.
#define BEGIN_WRITING(products) \
    Py_BEGIN_ALLOW_THREADS      \
    pthread_rwlock_wrlock(&(products)->lock);
#define END_WRITING(products)                 \
    pthread_rwlock_unlock(&(products)->lock); \
    Py_END_ALLOW_THREADS

// Everything out of the table, given back when nobody can meet it any more.
static int empty(Products *products) {
    Table fresh, old;
    if (table_open(&fresh)) {
        table_close(&fresh, let_go);
        PyErr_NoMemory();
        return -1;
    }
    BEGIN_WRITING(products)
    fresh.serial = products->table.serial;
    old = products->table;
    products->table = fresh;
    END_WRITING(products)
    table_close(&old, let_go);
    return 0;
}

static PyObject *products_install_method(PyObject *object, PyObject *args) {
    ProductsObject *self = (ProductsObject *)object;
    unsigned long long keys;
    const char *key;
    int option;
    if (!PyArg_ParseTuple(args, "siK", &key, &option, &keys)) return NULL;
    if (self->libraries[0] || (installed && ((ProductsObject *)installed)->libraries[0])) {
        PyErr_SetString(PyExc_RuntimeError, "kernels of ours are in place already");
        return NULL;
    }
    self->products.option = option;
    self->products.ask_keys = keys;
    const char *refused = products_install(&self->products, key, self->libraries);
    if (refused) {
        self->libraries[0] = self->libraries[1] = NULL;
        return PyErr_Format(PyExc_RuntimeError, "torch refuses %s for %s", refused, key);
    }
    Py_INCREF(object);
    Py_XDECREF(installed);
    installed = object;
    Py_RETURN_NONE;
}

static PyObject *products_remove(PyObject *object, PyObject *unused) {
    (void)unused;
    ProductsObject *self = (ProductsObject *)object;
    for (int i = 0; i < 2; i++) {
        void *library = self->libraries[i];
        self->libraries[i] = NULL;
        if (library) self->products.torch.library_delete(library);
    }
    Py_RETURN_NONE;
}

static PyObject *products_sent(PyObject *object, PyObject *unused) {
    (void)object;
    (void)unused;
    Key key;
    if (!products_take(&key)) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)&key, sizeof key);
}

static PyObject *products_learn(PyObject *object, PyObject *args) {
    Products *products = &((ProductsObject *)object)->products;
    PyObject *launch, *product;
    const char *bytes;
    Py_ssize_t count, element_bytes;
    if (!PyArg_ParseTuple(args, "y#nOO", &bytes, &count, &element_bytes, &launch, &product)) return NULL;
    Key key;
    Entry made;
    if (count != sizeof key) {
        PyErr_SetString(PyExc_ValueError, "a call is what sent() gave");
        return NULL;
    }
    memcpy(&key, bytes, sizeof key);
    if (parse_answer(launch, product, &made)) return NULL;
    made.element_bytes = element_bytes;
    driver_met(made.context);  // by the product that Python has just computed
    if (products->table.count >= TABLE_LIMIT && empty(products)) return NULL;  // rare, and learned again call by call
    Py_XINCREF((PyObject *)made.allocation);
    Py_XINCREF((PyObject *)made.keep);
    int adds, added;
    BEGIN_WRITING(products)
    // Another thread may have been first, or have filled it.
    adds = products->table.count < TABLE_LIMIT && !table_find(&products->table, &key);
    added = adds && table_add(&products->table, &key, &made);
    END_WRITING(products)
    if (!added) {
        Py_XDECREF((PyObject *)made.allocation);
        Py_XDECREF((PyObject *)made.keep);
    }
    if (adds && !added) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *products_lend(PyObject *object, PyObject *args) {
    Products *products = &((ProductsObject *)object)->products;
    unsigned long long stream, address, bytes;
    PyObject *owner;
    int device;
    if (!PyArg_ParseTuple(args, "iKKKO", &device, &stream, &address, &bytes, &owner)) return NULL;
    const Lent lent = {(int16_t)device, (void *)(uintptr_t)stream, NO_CAPTURE, address, bytes, owner};
    Py_INCREF(owner);
    PyObject *replaced;
    BEGIN_WRITING(products)
    replaced = table_lend(&products->table, &lent);
    END_WRITING(products)
    Py_XDECREF(replaced);
    Py_RETURN_NONE;
}

static PyObject *products_forget(PyObject *object, PyObject *unused) {
    (void)unused;
    if (empty(&((ProductsObject *)object)->products)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *products_counts(PyObject *object, PyObject *unused) {
    (void)unused;
    const Products *products = &((ProductsObject *)object)->products;
    return Py_BuildValue("{sIsKsK}", "remembered", products->table.count, "ours",
                         __atomic_load_n(&products->ours, __ATOMIC_RELAXED), "torchs",
                         __atomic_load_n(&products->torchs, __ATOMIC_RELAXED));
}

// The address that a dict has under a name; -1 with an error where a function is missing that has to be there.
static int function_of(PyObject *addresses, const char *name, int optional, void *into) {
    PyObject *number = PyDict_GetItemString(addresses, name);
    void *address = number ? PyLong_AsVoidPtr(number) : NULL;
    if (!address && !PyErr_Occurred() && !optional) PyErr_Format(PyExc_ValueError, "%s has no address", name);
    memcpy(into, &address, sizeof address);
    return PyErr_Occurred() ? -1 : 0;
}

static int locks_open(Products *products) {
    pthread_rwlockattr_t kind;
    if (pthread_rwlockattr_init(&kind)) return -1;
#ifdef __GLIBC__
    pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    const int failed = pthread_rwlock_init(&products->lock, &kind) || pthread_mutex_init(&products->maps_lock, NULL);
    pthread_rwlockattr_destroy(&kind);
    return failed ? -1 : 0;
}

static PyObject *products_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static char *keywords[] = {"libcuda", "device_type", "torch", NULL};
    const char *path;
    PyObject *addresses;
    int device_type;
    if (!PyArg_ParseTupleAndKeywords(args, named, "siO!", keywords, &path, &device_type, &PyDict_Type, &addresses)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    ProductsObject *self = (ProductsObject *)make(type, 0);
    if (!self) return NULL;
    Products *products = &self->products;
    Torch *torch = &products->torch;
#define NEEDED(name, returned, arguments) || function_of(addresses, #name, 0, &torch->name)
#define OPTIONAL(name, returned, arguments) || function_of(addresses, #name, 1, &torch->name)
    if (0 TORCH(NEEDED) TORCH_OPTIONAL(OPTIONAL)) goto failed;
    const char *missing = driver_open(&products->driver, path);
    if (missing) {
        PyErr_Format(PyExc_OSError, "%s cannot be loaded from %s", missing, path);
        goto failed;
    }
    if (table_open(&products->table) || locks_open(products)) {
        PyErr_NoMemory();
        goto failed;
    }
    products->device_type = device_type;
    products->half = torch->float16();
    products->bfloat = torch->bfloat16();
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

// While it is in place it is held, see `installed`: nobody can be reading.
static void products_dealloc(PyObject *object) {
    ProductsObject *self = (ProductsObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    table_close(&self->products.table, let_go);
    driver_close(&self->products.driver);
    freefunc give_back = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give_back(object);
    Py_DECREF(type);
}

static PyMethodDef products_methods[] = {
    {"install", products_install_method, METH_VARARGS,
     "install(key, option, keys): in place of torch's aten::mm and aten::bmm under a dispatch key, and of outblas::mm; what "
     "is new is asked of the kernels under the raw set of dispatch keys. While nobody multiplies."},
    {"remove", products_remove, METH_NOARGS, "remove(): the kernels that were there before are back. While nobody multiplies."},
    {"sent", products_sent, METH_NOARGS,
     "sent(): the call that this thread was asked, for learn; None: there is none, or it was told before."},
    {"learn", products_learn, METH_VARARGS,
     "learn(call, element_bytes, launch, product): answer such calls by a launch or by a product of cuBLASLt, both None: "
     "by torch."},
    {"lend", products_lend, METH_VARARGS,
     "lend(device, stream, address, bytes, owner): the workspace of a stream, in place of the one it had; the owner is "
     "held."},
    {"forget", products_forget, METH_NOARGS, "forget(): all that was learned and lent."},
    {"counts", products_counts, METH_NOARGS, "counts(): calls remembered; products so far by whom they were made here."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot products_slots[] = {
    {Py_tp_new, products_new},
    {Py_tp_dealloc, products_dealloc},
    {Py_tp_methods, products_methods},
    {Py_tp_doc, "Kernels for torch's products."},
    {0, NULL},
};

PyType_Spec products_spec = {
    "outblas.dispatch._native.Products", sizeof(ProductsObject), 0, Py_TPFLAGS_DEFAULT, products_slots,
};
