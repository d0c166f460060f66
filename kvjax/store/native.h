/* What native.c and callback.c, which are one module, know of each other. */
#pragma once
#include "../ffi.h"

XLA_FFI_Error *on_callback(XLA_FFI_CallFrame *call);
PyObject *serve(PyObject *self, PyObject *args);
