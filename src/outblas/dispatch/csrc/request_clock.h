// The clock of server mode, a function of the extension's module.
#ifndef OUTBLAS_REQUEST_CLOCK_H
#define OUTBLAS_REQUEST_CLOCK_H

// serve_requests(libcuda, stream, calls, arrivals, refused): times of requests that come at given moments.
//
// Request i uses call i modulo their number. A call is a Python callable, which is given the stream. Or it is a tuple: the
// name of a C function, its address, and a tuple of its arguments as integers. `arrivals` are bytes of int64: nanoseconds
// after the first moment, rising. A request that arrives while another is served starts late. If a call fails, `refused`
// is called with its name and status, and raises.
//
// Returns bytes of int64, three for each request, in nanoseconds of CLOCK_MONOTONIC: the arrival, the begin of the call,
// and its observed completion.
PyObject *serve_requests(PyObject *module, PyObject *args);

#endif
