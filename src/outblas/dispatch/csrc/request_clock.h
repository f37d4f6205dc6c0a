// The clock of server mode, a function of the extension's module.
#ifndef OUTBLAS_REQUEST_CLOCK_H
#define OUTBLAS_REQUEST_CLOCK_H

// serve_requests(libcuda, stream, calls, arrivals, refused): times of requests that come at given moments.
//
// Request i uses call i modulo their number: a Python callable that is given the stream, or a tuple (name of a C function,
// its address, a tuple of its arguments as integers). `arrivals` are bytes of int64: nanoseconds after the first moment,
// rising. Returns bytes of int64, three for each request: the arrival, the begin of the call and its observed completion,
// in nanoseconds of CLOCK_MONOTONIC. A request that arrives while another is served starts late. `refused` is called with
// the name of a call and its status if one fails, and raises.
PyObject *serve_requests(PyObject *module, PyObject *args);

#endif
