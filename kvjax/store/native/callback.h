/* Compiled programs that call Python (callback.c), for the module (native.c). */
#pragma once
#include "../../ffi.h"

XLA_FFI_Error *on_callback(XLA_FFI_CallFrame *call);
PyObject *serve(PyObject *self, PyObject *args);
