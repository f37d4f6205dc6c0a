// What the extension's files share: the Table as Python has it, and the answers that it is given.
#ifndef OUTBLAS_OBJECT_H
#define OUTBLAS_OBJECT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "exchange.h"
#include "table.h"
#include "torch_state.h"

enum { MAX_DEVICES = 64, ROW_ALIGN_BYTES = 16 };

// What a Table is given at its making, by keyword: torch's own functions, called as Python objects.
#define HOOKS(X)                                                                                       \
    X(exchange)          /* torch's DLPack exchange, a capsule; anything else: no exchange */        \
    X(state)             /* dict of numbers, see torch_state.h; None: the methods and callables below are asked */ \
    X(tensor)            /* torch.Tensor: operands are exactly this */                                 \
    X(parameter)         /* or torch.nn.Parameter */                                                   \
    X(data_ptr)          /* method of tensors */                                                       \
    X(is_neg)            /* method of tensors */                                                       \
    X(has_names)         /* method of tensors; None: no tensor has names */                            \
    X(is_inference)      /* method of tensors */                                                       \
    X(inference_mode)    /* () -> bool */                                                              \
    X(spares_inference)  /* bool: increment_version leaves out tensors of inference mode itself */     \
    X(stride)            /* method of tensors */                                                       \
    X(watchers)          /* tuple of callables () -> truth: something must see the call */             \
    X(compiling)         /* dict of torch.compiler, with its flag; None: the caller asks torch */     \
    X(environment)       /* dict of bytes behind os.environ, for two look-ups; None: the system is asked, which reads all */ \
    X(grad_enabled)      /* () -> bool */                                                              \
    X(requires_grad)     /* attribute of tensors: its descriptor */                                    \
    X(forward_ad)        /* dict of a module; a level >= 0 in its _current_level: forward-mode differentiation */ \
    X(current_device)    /* () -> int */                                                               \
    X(current_stream)    /* (device) -> raw stream */                                                  \
    X(empty)             /* (shape, strides, dtype) -> tensor on the current device */                 \
    X(increment_version) /* (tensors) -> None */                                                       \
    X(product)           /* torch.matmul */                                                            \
    X(refused)           /* (call of the driver or of cuBLASLt, status) -> never returns: raises */

#define NAMES(X) X(shape) X(dtype) X(device) X(index) X(_current_level) X(_is_compiling_flag)

#define FIELD(name) PyObject *name;

typedef struct {
    HOOKS(FIELD)
} Hooks;

typedef struct {
    NAMES(FIELD)
} Names;

// Interned when the module is made.
extern Names names;

// Environment variables of a call, as bytes, made with the module.
#define SWITCHES(X) X(OUTBLAS_PDL) X(OUTBLAS_WEIGHTS)

typedef struct {
    SWITCHES(FIELD)
} Switches;

extern Switches switches;

typedef struct {
    PyObject *object;  // torch.device
    long index;
    int32_t type, id;  // in DLPack, 0 and 0 while they are not known
} Device;

typedef struct {
    PyObject_HEAD
    Driver driver;
    Table table;
    Hooks hooks;
    descrgetfunc get_requires_grad;
    const Exchange *exchange;  // NULL: operands are read by methods
    const TorchState *state;  // NULL: torch is asked by methods
    TorchState numbers;
    Device devices[MAX_DEVICES];
    int device_count;
    unsigned long long launches;
} TableObject;

// The truth of a new reference, -1 for an error; gives the reference back.
int truth(PyObject *object);

// The raw current stream of a device, by the exchange if there is one; 0 for success.
int stream_of(const TableObject *self, const Exchange *exchange, const Device *device, void **stream);

// Gives an object back that the table held.
void let_go(void *object);

// An answer without its key, from the launch and the product that `learn` is given; -1 for an error.
int parse_answer(PyObject *launch, PyObject *product, Entry *entry);

#endif
