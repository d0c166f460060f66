/* Rows in memory that are newer than a block in the file: `Staged` of lineage.py. */
#include "staged.h"

#include <string.h>

/* Returns whether a `Staged` has the whole block; -1 on an exception. */
static int is_complete(PyObject *staged) {
    PyObject *complete = PyObject_GetAttr(staged, names.complete);
    int answer = complete ? PyObject_IsTrue(complete) : -1;
    Py_XDECREF(complete);
    return answer;
}

/* Appends the `Staged` of one block to a list, the older one first, and the block's slot for each to `slots`; returns
 * how many, -1 on an exception. */
static int add_staged(const Window *window, int64_t id, int64_t slot, PyObject *list, int64_t *slots) {
    PyObject *key = PyLong_FromLongLong(id);
    if (!key) return -1;
    PyObject *older = PyDict_GetItemWithError(window->flight, key);
    PyObject *newer = PyErr_Occurred() ? NULL : PyDict_GetItemWithError(window->queue, key);
    Py_DECREF(key);
    if (PyErr_Occurred()) return -1;
    int whole = newer ? is_complete(newer) : 0, count = 0;
    if (whole < 0) return -1;
    PyObject *layers[] = {whole ? NULL : older, newer};
    for (int i = 0; i < 2; i++)
        if (layers[i]) {
            if (PyList_Append(list, layers[i]) < 0) return -1;
            slots[count++] = slot;
        }
    return count;
}

PyObject *list_staged(const Window *window, Wanted *to) {
    PyObject *list = PyList_New(0);
    int64_t *slots = to->staged; /* never overtakes the ids and slots there: a block has two `Staged` at most */
    for (int64_t i = 0; list && i < to->marked; i++) {
        int added = add_staged(window, to->staged[2 * i], to->staged[2 * i + 1], list, slots);
        if (added < 0)
            Py_CLEAR(list);
        else
            slots += added;
    }
    return list;
}

/* Copies the rows that were put in a `Staged` over a block; returns whether there was no exception. The volume's lock
 * is not needed: nothing is committed while a token reads, and the writer, which completes the rows before it sets
 * `complete`, needs the GIL. */
static int lay_rows(PyObject *staged, char *block, int64_t rows, int64_t row_bytes) {
    Buffers buffers = {.count = 0};
    Py_ssize_t count = 0;
    int complete = is_complete(staged);
    PyObject *address = complete < 0 ? NULL : PyObject_GetAttr(staged, names.address);
    PyObject *mask = address ? PyObject_GetAttr(staged, names.mask) : NULL;
    const char *from = address ? PyLong_AsVoidPtr(address) : NULL;
    const uint8_t *put = from && mask ? take(&buffers, mask, sizeof *put, PyBUF_SIMPLE, &count) : NULL;
    if (put && complete) memcpy(block, from, rows * row_bytes);
    for (int64_t row = 0; put && !complete && row < rows && row < count; row++)
        if (put[row]) memcpy(block + row * row_bytes, from + row * row_bytes, row_bytes);
    release(&buffers);
    Py_XDECREF(mask);
    Py_XDECREF(address);
    return put != NULL;
}

int lay_over(PyObject *staged, const Window *window, const Wanted *wanted) {
    int64_t rows = window->block_rows, row_bytes = wanted->block_bytes / rows;
    for (Py_ssize_t i = 0; staged && i < PyList_GET_SIZE(staged); i++)
        if (!lay_rows(PyList_GET_ITEM(staged, i), wanted->out + wanted->staged[i] * wanted->block_bytes, rows, row_bytes))
            return 0;
    return 1;
}
