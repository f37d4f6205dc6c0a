// outblas.dispatch._native.serve_requests: the clock of server mode, the same for every entry.
//
// It waits for each arrival, makes one call, polls the stream until the call has completed, and reads the time around
// both. A call is a Python callable, or the address of a C function such as cublasLtMatmul with all its arguments.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "request_clock.h"

// The longest C call, cublasGemmEx, has 19 arguments.
enum { MOST_WORDS = 19, NOT_READY = 600, COLUMNS = 3 };
// The interpreter is taken this long before an arrival, so that no request waits for another thread to release it.
static const int64_t HOLD_BEFORE_NS = 50 * 1000;
// A request that takes longer is a kernel that hangs.
static const int64_t LONGEST_NS = 30 * (int64_t)1000000000;

typedef struct {
    PyObject *callable;  // NULL: a C function
    const char *name;
    void *function;
    uint64_t words[MOST_WORDS];
} Call;

typedef struct {
    int (*query)(void *stream);
    void *stream;
    PyObject *stream_number, *refused;
} Server;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void wait_until(int64_t due) {
    if (now_ns() < due - HOLD_BEFORE_NS) {
        Py_BEGIN_ALLOW_THREADS
        while (now_ns() < due - HOLD_BEFORE_NS) {
        }
        Py_END_ALLOW_THREADS
    }
    while (now_ns() < due) {
    }
}

// Raises by the caller's function; always -1.
static int refuse(const Server *server, const char *call, int status) {
    PyObject *nothing = PyObject_CallFunction(server->refused, "si", call, status);
    Py_XDECREF(nothing);
    if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s failed with %d", call, status);
    return -1;
}

// All arguments are integers or pointers. On x86-64 and arm64 each of them takes one word, and a function ignores the
// words after its last argument.
static int call_words(const Call *call) {
    typedef uint64_t W;
    const W *w = call->words;
    int (*function)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);
    memcpy(&function, &call->function, sizeof function);
    return function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
                    w[16], w[17], w[18]);
}

static int make_call(const Server *server, const Call *call) {
    if (!call->callable) {
        const int status = call_words(call);
        return status ? refuse(server, call->name, status) : 0;
    }
    PyObject *nothing = PyObject_CallFunctionObjArgs(call->callable, server->stream_number, NULL);
    Py_XDECREF(nothing);
    return nothing ? 0 : -1;
}

// Polls: a sleeping wait would add the time of waking up.
static int wait_for_completion(const Server *server, int64_t begin) {
    for (;;) {
        const int status = server->query(server->stream);
        if (!status) return 0;
        if (status != NOT_READY || now_ns() - begin > LONGEST_NS) return refuse(server, "cuStreamQuery", status);
    }
}

static int serve(const Server *server, const Call *calls, Py_ssize_t call_count, const int64_t *arrivals,
                 Py_ssize_t count, int64_t *times) {
    const int64_t begin = now_ns();
    for (Py_ssize_t i = 0; i < count; i++, times += COLUMNS) {
        times[0] = begin + arrivals[i];
        wait_until(times[0]);
        times[1] = now_ns();
        if (make_call(server, &calls[i % call_count]) || wait_for_completion(server, times[1])) return -1;
        times[2] = now_ns();
        if (PyErr_CheckSignals()) return -1;
    }
    return 0;
}

// -1 with an error for what is neither a callable nor (name, address, words).
static int parse_call(PyObject *object, Call *call) {
    memset(call, 0, sizeof *call);
    if (PyCallable_Check(object)) {
        call->callable = object;
        return 0;
    }
    unsigned long long function;
    PyObject *words;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a call is a callable, or a tuple (name, address, words)");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "sKO!", &call->name, &function, &PyTuple_Type, &words)) return -1;
    const Py_ssize_t count = PyTuple_Size(words);
    if (!function || count > MOST_WORDS) {
        PyErr_Format(PyExc_ValueError, "a C call has an address and at most %d words", (int)MOST_WORDS);
        return -1;
    }
    call->function = (void *)(uintptr_t)function;
    for (Py_ssize_t i = 0; i < count; i++) call->words[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(words, i));
    return PyErr_Occurred() ? -1 : 0;
}

// The calls of a tuple, which the caller frees; NULL with an error.
static Call *parse_calls(PyObject *tuple) {
    const Py_ssize_t count = PyTuple_Size(tuple);
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "no calls");
        return NULL;
    }
    Call *calls = PyMem_Malloc((size_t)count * sizeof *calls);
    if (!calls) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!parse_call(PyTuple_GetItem(tuple, i), &calls[i])) continue;
        PyMem_Free(calls);
        return NULL;
    }
    return calls;
}

static PyObject *serve_all(const Server *server, const Call *calls, Py_ssize_t call_count, const char *arrivals,
                           Py_ssize_t bytes) {
    const Py_ssize_t count = bytes / (Py_ssize_t)sizeof(int64_t);
    int64_t *due = PyMem_Malloc((size_t)bytes + 1), *times = PyMem_Malloc((size_t)bytes * COLUMNS + 1);
    PyObject *found = NULL;
    if (!due || !times) {
        PyErr_NoMemory();
    } else {
        memcpy(due, arrivals, (size_t)bytes);
        if (!serve(server, calls, call_count, due, count, times))
            found = PyBytes_FromStringAndSize((const char *)times, bytes * COLUMNS);
    }
    PyMem_Free(due);
    PyMem_Free(times);
    return found;
}

PyObject *serve_requests(PyObject *module, PyObject *args) {
    (void)module;
    const char *path, *arrivals;
    Py_ssize_t bytes;
    PyObject *tuple;
    Server server;
    if (!PyArg_ParseTuple(args, "sOO!y#O", &path, &server.stream_number, &PyTuple_Type, &tuple, &arrivals, &bytes,
                          &server.refused))
        return NULL;
    if (bytes % (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "arrivals are 64-bit integers");
        return NULL;
    }
    server.stream = PyLong_AsVoidPtr(server.stream_number);
    if (PyErr_Occurred()) return NULL;
    Call *calls = parse_calls(tuple);
    if (!calls) return NULL;
    PyObject *found = NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL), *query = library ? dlsym(library, "cuStreamQuery") : NULL;
    memcpy(&server.query, &query, sizeof query);
    if (query)
        found = serve_all(&server, calls, PyTuple_Size(tuple), arrivals, bytes);
    else
        PyErr_Format(PyExc_OSError, "cuStreamQuery cannot be loaded from %s", path);
    if (library) dlclose(library);
    PyMem_Free(calls);
    return found;
}
