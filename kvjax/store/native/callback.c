/* Calls of Python functions from compiled programs, with less overhead than JAX's own callbacks: operands become
 * numbers and views of XLA's memory, which are valid until the function returns, and the result is a number. */
#include "callback.h"
#include "blocks.h"
#include "fetch.h"

#define MOST_OPERANDS 8
#define READ_FUNCTION 0 /* rows, handle, generation, layer, block, slot: see kvjax/cache/callbacks.py */

static PyObject *branches; /* a dictionary of weak references by handle */
static PyObject *functions; /* a tuple; the attribute of a call is an index */
static PyObject *failed; /* called with the exception that a function raised */

/* serve(functions, failed, branches) */
PyObject *serve(PyObject *self, PyObject *args) {
    PyObject *given, *teller, *living;
    if (!PyArg_ParseTuple(args, "O!OO!", &PyTuple_Type, &given, &teller, &PyDict_Type, &living)) return NULL;
    Py_INCREF(given);
    Py_INCREF(teller);
    Py_INCREF(living);
    Py_XSETREF(branches, living);
    Py_XSETREF(functions, given);
    Py_XSETREF(failed, teller);
    Py_RETURN_NONE;
}

/* Returns the format of a type in the buffer protocol; NULL for types that no cache has. */
static const char *format_of(XLA_FFI_DataType type) {
    switch (type) {
    case XLA_FFI_DataType_S32: return "i";
    case XLA_FFI_DataType_F32: return "f";
    case XLA_FFI_DataType_F16: return "e";
    case XLA_FFI_DataType_U16: return "H";
    case XLA_FFI_DataType_S8: return "b";
    case XLA_FFI_DataType_U8: return "B";
    default: return NULL;
    }
}

static Py_ssize_t item_size(char format) { return format == 'i' || format == 'f' ? 4 : format == 'e' || format == 'H' ? 2 : 1; }

/* Returns whether an operand shares the memory of a result. */
static int is_result(const XLA_FFI_CallFrame *call, const XLA_FFI_Buffer *buffer) {
    for (int64_t i = 0; i < call->rets.size; i++)
        if (result(call, i)->data == buffer->data) return 1;
    return 0;
}

/* Returns an int32 scalar as a number, anything else as a view, which is writable if it is also a result. */
static PyObject *as_python(const XLA_FFI_CallFrame *call, const XLA_FFI_Buffer *buffer) {
    static char nothing;
    if (is_of(buffer, XLA_FFI_DataType_S32, 0)) return PyLong_FromLong(*(const int32_t *)buffer->data);
    const char *format = format_of(buffer->dtype);
    if (!format) return PyErr_Format(PyExc_TypeError, "a callback got an array of XLA's type %d", buffer->dtype);
    Py_ssize_t item = item_size(*format), bytes = item * leading(buffer, 0);
    Py_buffer view = {.buf = bytes ? buffer->data : &nothing, .len = bytes, .itemsize = item, .ndim = buffer->rank,
                      .readonly = !is_result(call, buffer), .format = (char *)format, .shape = (Py_ssize_t *)buffer->dims};
    return PyMemoryView_FromBuffer(&view);
}

/* Calls `failed` with the exception that is set and the operands of the function that raised it; returns whether that
 * succeeded. If not, the new exception is printed. */
static int tell(PyObject *const *operands, int64_t count) {
    PyObject *kind, *value, *trace, *with[MOST_OPERANDS + 1];
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    with[0] = value;
    for (int64_t i = 0; i < count; i++) with[i + 1] = operands[i];
    PyObject *told = PyObject_Vectorcall(failed, with, count + 1, NULL);
    if (!told) PyErr_WriteUnraisable(failed);
    Py_XDECREF(told);
    Py_XDECREF(kind);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return told != NULL;
}

/* Reads blocks without a detour through Python, if the branch can: 1, 0 if Python has to, -1 on an exception. */
static int read_at_once(PyObject *const *operands, int64_t count) {
    PyObject *reference = count == 6 ? PyDict_GetItemWithError(branches, operands[1]) : NULL;
    if (!reference) return PyErr_Occurred() ? -1 : 0;
    PyObject *branch = PyWeakref_GetObject(reference);
    if (!branch || branch == Py_None) return branch ? 0 : -1;
    Py_INCREF(branch);
    PyObject *able = PyObject_GetAttr(branch, names.reads_in_c), *done = NULL;
    if (able == Py_True) {
        PyObject *args[] = {branch, operands[3], operands[2], operands[4], operands[5], operands[0]};
        done = fetch(NULL, args, 6);
    }
    int found = PyErr_Occurred() ? -1 : done == Py_True;
    Py_XDECREF(done);
    Py_XDECREF(able);
    Py_DECREF(branch);
    return found;
}

/* Returns the result of a function, 0 if it raises; -1 if the exception could not be reported to `failed`. */
static int32_t answer(const XLA_FFI_CallFrame *call, int32_t which, PyObject *function) {
    PyObject *operands[MOST_OPERANDS], *found = NULL;
    int64_t count = 0;
    while (count < call->args.size && (operands[count] = as_python(call, operand(call, count)))) count++;
    long number = 0;
    if (count == call->args.size) number = which == READ_FUNCTION ? read_at_once(operands, count) : 0;
    if (count == call->args.size && number == 0) found = PyObject_Vectorcall(function, operands, count, NULL);
    if (found) number = PyLong_AsLong(found);
    Py_XDECREF(found);
    if (PyErr_Occurred()) number = tell(operands, count) ? 0 : -1;
    while (count) Py_DECREF(operands[--count]);
    return (int32_t)number;
}

/* Takes the GIL. A thread keeps its Python thread state from call to call: creating it anew takes as long as a read. */
static PyGILState_STATE enter_python(void) {
    if (!PyGILState_GetThisThreadState()) {
        PyGILState_Ensure();
        PyEval_SaveThread();
    }
    return PyGILState_Ensure();
}

/* XLA's handler: any operands; the last result, int32 [], becomes the function's result. The attribute is the
 * function's index. */
XLA_FFI_Error *on_callback(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size > MOST_OPERANDS || call->rets.size < 1 || call->attrs.size != 1 ||
        !is_of(result(call, call->rets.size - 1), XLA_FFI_DataType_S32, 0))
        return refused(call, "callback: operands or results");
    int32_t which = *(const int32_t *)((const XLA_FFI_Scalar *)call->attrs.attrs[0])->value, number = -1;
    PyGILState_STATE state = enter_python();
    int known = functions && which >= 0 && which < PyTuple_GET_SIZE(functions);
    if (known) {
        PyObject *function = PyTuple_GET_ITEM(functions, which);
        Py_INCREF(function);
        number = answer(call, which, function);
        Py_DECREF(function);
    }
    PyGILState_Release(state);
    if (number < 0) return refused(call, known ? "callback: it raised" : "callback: there is no such function");
    *(int32_t *)result(call, call->rets.size - 1)->data = number;
    return NULL;
}
