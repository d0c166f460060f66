/* Arguments of functions that Python calls: arrays and integers. */
#pragma once
#include "../../ffi.h"

#include <string.h>

#define MOST_BUFFERS 10

typedef struct {
    Py_buffer views[MOST_BUFFERS];
    int count;
} Buffers;

static inline void release(Buffers *buffers) {
    while (buffers->count)
        PyBuffer_Release(&buffers->views[--buffers->count]);
}

/* Returns the memory of the next argument, and the number of its items of `size` bytes; NULL on an exception, with all
 * buffers released. */
static inline void *take(Buffers *buffers, PyObject *argument, size_t size, int flags, Py_ssize_t *items) {
    Py_buffer *view = &buffers->views[buffers->count];
    if (PyObject_GetBuffer(argument, view, flags) < 0) {
        release(buffers);
        return NULL;
    }
    buffers->count++;
    if (view->itemsize != 1 && view->itemsize != (Py_ssize_t)size) {
        release(buffers);
        PyErr_Format(PyExc_ValueError, "an array has items of %zd bytes, not %zu", view->itemsize, size);
        return NULL;
    }
    *items = view->len / (Py_ssize_t)size;
    return view->buf;
}

/* Returns the memory of an array with this format of the buffer protocol and this shape, in which -1 is any size; NULL,
 * without an exception, for any other. `size`: bytes of an item. */
static inline void *take_shaped(Buffers *buffers, PyObject *array, size_t size, int flags, const char *format, int rank,
                                const long long *shape) {
    Py_ssize_t items;
    const Py_buffer *view = &buffers->views[buffers->count];
    void *memory = take(buffers, array, size, PyBUF_ND | PyBUF_FORMAT | flags, &items);
    if (!memory) PyErr_Clear();
    if (!memory || view->ndim != rank || strcmp(view->format, format)) return NULL;
    for (int i = 0; i < rank; i++)
        if (shape[i] >= 0 && view->shape[i] != shape[i]) return NULL;
    return memory;
}

#define READ(type, name, from)                                                      \
    Py_ssize_t name##_size;                                                         \
    const type *name = take(&buffers, from, sizeof(type), PyBUF_SIMPLE, &name##_size); \
    if (!name) return NULL
#define WRITE(type, name, from)                                                     \
    Py_ssize_t name##_size;                                                         \
    type *name = take(&buffers, from, sizeof(type), PyBUF_WRITABLE, &name##_size);     \
    if (!name) return NULL

static inline PyObject *refuse(Buffers *buffers, const char *why) {
    release(buffers);
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

/* Converts arguments from[0..count-1] to integers; returns 0 on an exception. */
static inline int integers(PyObject *const *from, Py_ssize_t count, int64_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(from[i]);
        if (to[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}
