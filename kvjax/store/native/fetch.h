/* The Python functions that read a layer's blocks (fetch.c), for the module (native.c). */
#pragma once
#include "../../ffi.h"

PyObject *guess(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *fetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
