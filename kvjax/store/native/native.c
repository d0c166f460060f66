/* The module kvjax.store.native._compiled: reads and writes that have to be fast. Signatures are in _compiled.pyi. */
#include "arguments.h"
#include "blocks.h"
#include "callback.h"
#include "fetch.h"
#include "reads.h"
#include "rows.h"

/* control(extents, sums, control, starts, piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor)
 * -> reads */
static PyObject *control(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[7];
    if (nargs != 11) return refuse(&buffers, "control takes 11 arguments");
    if (!integers(args + 4, 7, number)) return NULL;
    READ(int32_t, extents, args[0]);
    READ(uint64_t, sums, args[1]);
    WRITE(struct iocb, blocks, args[2]);
    WRITE(int64_t, starts, args[3]);
    if (sums_size != extents_size || blocks_size < extents_size || starts_size < extents_size || number[0] < 1 ||
        number[1] < number[0])
        return refuse(&buffers, "control: sizes do not agree");
    Reading from = {number[0], number[1], number[2], number[3], number[4], number[5], number[6]};
    Py_ssize_t reads = fill_control(extents, sums, extents_size, &from, blocks, starts);
    release(&buffers);
    return PyLong_FromSsize_t(reads);
}

/* land(events, control, starts, sums, targets, results, done, out,
 *      count, reads, arena, places, extent_bytes, block_bytes, page_bytes, hash) -> blocks copied */
static PyObject *land(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[8];
    if (nargs != 16) return refuse(&buffers, "land takes 16 arguments");
    if (!integers(args + 8, 8, number)) return NULL;
    int64_t count = number[0], reads = number[1];
    READ(struct io_event, events, args[0]);
    READ(struct iocb, blocks, args[1]);
    READ(int64_t, starts, args[2]);
    READ(uint64_t, sums, args[3]);
    READ(int64_t, targets, args[4]);
    WRITE(int64_t, results, args[5]);
    WRITE(uint8_t, done, args[6]);
    WRITE(char, out, args[7]);
    if (count > events_size || reads > blocks_size || reads > starts_size || reads > results_size ||
        targets_size != sums_size || done_size != sums_size || number[3] < 1 || number[5] > number[4] || number[5] < 1 ||
        !number[7])
        return refuse(&buffers, "land: sizes do not agree");
    Landing to = {
        .reads = reads, .extents = sums_size, .slots = out_size / number[5], .places = number[3],
        .extent_bytes = number[4], .block_bytes = number[5], .page_bytes = number[6],
        .arena = (const char *)(intptr_t)number[2], .hash = (Hash)(intptr_t)number[7], .control = blocks,
        .starts = starts, .targets = targets, .sums = sums, .results = results, .done = done, .out = out};
    int64_t copied;
    Py_BEGIN_ALLOW_THREADS
    copied = land_events(&to, events, count);
    Py_END_ALLOW_THREADS
    release(&buffers);
    return PyLong_FromLongLong(copied);
}

static const Target targets[] = {{"callback", on_callback}, {NULL, NULL}};

/* handlers() -> {name: capsule} */
static PyObject *handlers(PyObject *self, PyObject *none) { return capsules(targets); }

static PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, NULL},
    {"serve", serve, METH_VARARGS, NULL},
    {"control", (PyCFunction)(void (*)(void))control, METH_FASTCALL, NULL},
    {"land", (PyCFunction)(void (*)(void))land, METH_FASTCALL, NULL},
    {"guess", (PyCFunction)(void (*)(void))guess, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, NULL},
    {"put_rows", put_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_compiled", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return intern_names() ? with_version(PyModule_Create(&module)) : NULL; }
