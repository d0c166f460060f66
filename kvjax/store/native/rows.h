/* Appending the rows of a token (rows.c), for the module (native.c). */
#pragma once
#include "../../ffi.h"

PyObject *put_rows(PyObject *self, PyObject *args);
