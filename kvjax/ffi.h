/* XLA's foreign function interface, as far as kvjax's compiled parts use it: what a call's operands and results are, work
 * shared among XLA's threads, and how Python comes by the functions.
 */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

/* ---- XLA's threads */

typedef void Piece(const void *job, int64_t piece);

typedef struct {
    Piece *run;
    const void *job;
    int64_t pieces;
    _Atomic int64_t next, done;
    _Atomic int64_t users;
} Shared;

static inline void leave(Shared *shared) {
    if (atomic_fetch_sub(&shared->users, 1) == 1) free(shared);
}

static inline void work(Shared *shared) {
    int64_t piece;
    while ((piece = atomic_fetch_add(&shared->next, 1)) < shared->pieces) {
        shared->run(shared->job, piece);
        atomic_fetch_add(&shared->done, 1);
    }
}

static inline void help(void *shared) {
    work(shared);
    leave(shared);
}

/* Whether there was no error, which is forgotten. */
static inline int fine(const XLA_FFI_CallFrame *call, XLA_FFI_Error *error) {
    XLA_FFI_Error_Destroy_Args args = {.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, .error = error};
    if (error) call->api->XLA_FFI_Error_Destroy(&args);
    return !error;
}

#define WORTH_SHARING (1 << 18) /* numbers that take longer than a thread takes to come */

/* Does all pieces of a job, if it is of many numbers with the help of as many of XLA's threads as there are. One that
 * comes when nothing is left touches no more than `Shared`, which the last to leave frees. */
static inline void in_pieces(const XLA_FFI_CallFrame *call, Piece *run, const void *job, int64_t pieces, int64_t numbers) {
    int64_t threads = 1;
    XLA_FFI_ThreadPool_NumThreads_Args ask = {.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
                                              .ctx = call->ctx, .num_threads = &threads};
    int shares = pieces > 1 && numbers >= WORTH_SHARING && fine(call, call->api->XLA_FFI_ThreadPool_NumThreads(&ask));
    Shared *shared = shares && threads > 1 ? malloc(sizeof *shared) : NULL;
    if (!shared) {
        for (int64_t piece = 0; piece < pieces; piece++) run(job, piece);
        return;
    }
    *shared = (Shared){.run = run, .job = job, .pieces = pieces, .users = 1};
    for (int64_t i = 1; i < threads && i < pieces; i++) {
        XLA_FFI_ThreadPool_Schedule_Args later = {.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
                                                  .ctx = call->ctx, .task = help, .data = shared};
        atomic_fetch_add(&shared->users, 1);
        if (!fine(call, call->api->XLA_FFI_ThreadPool_Schedule(&later))) leave(shared);
    }
    work(shared);
    while (atomic_load(&shared->done) < pieces) sched_yield();
    leave(shared);
}

/* ---- calls */

static inline XLA_FFI_Error *refused(const XLA_FFI_CallFrame *call, const char *why) {
    XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = why,
                                      .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT};
    return call->api->XLA_FFI_Error_Create(&args);
}

#if XLA_FFI_API_MINOR < 4
typedef XLA_FFI_Extension_Base Extension;
#else
typedef XLA_FFI_InternalExtension Extension; /* JAX 0.11 */
#endif

/* Whether the call only asks which version of the interface this was compiled for; then it is answered. */
static inline int asks_version(const XLA_FFI_CallFrame *call) {
    for (Extension *one = call->extension_start; one; one = one->next)
        if (one->type == XLA_FFI_Extension_Metadata) {
            XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)one)->metadata;
            metadata->api_version.major_version = XLA_FFI_API_MAJOR;
            metadata->api_version.minor_version = XLA_FFI_API_MINOR;
            metadata->traits = 0;
            metadata->state_type_id = (XLA_FFI_TypeId){0};
            return 1;
        }
    return 0;
}

static inline const XLA_FFI_Buffer *operand(const XLA_FFI_CallFrame *call, int64_t i) { return call->args.args[i]; }

static inline const XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *call, int64_t i) { return call->rets.rets[i]; }

static inline int is_of(const XLA_FFI_Buffer *buffer, XLA_FFI_DataType type, int64_t rank) {
    return buffer->dtype == type && buffer->rank == rank;
}

/* Whether a buffer has a type and these sizes, as many as there are before a negative one. */
static inline int has(const XLA_FFI_Buffer *buffer, XLA_FFI_DataType type, const int64_t *sizes) {
    int64_t rank = 0;
    for (; sizes[rank] >= 0; rank++)
        if (rank >= buffer->rank || buffer->dims[rank] != sizes[rank]) return 0;
    return buffer->dtype == type && buffer->rank == rank;
}

#define HAS(buffer, type, ...) has(buffer, XLA_FFI_DataType_##type, (const int64_t[]){__VA_ARGS__, -1})

/* The product of all but the last `count` sizes: heads, and whatever is mapped over. */
static inline int64_t leading(const XLA_FFI_Buffer *buffer, int64_t count) {
    int64_t size = 1;
    for (int64_t i = 0; i < buffer->rank - count; i++) size *= buffer->dims[i];
    return size;
}

static inline int64_t last(const XLA_FFI_Buffer *buffer, int64_t i) { return buffer->dims[buffer->rank - i]; }

/* ---- for Python */

typedef struct {
    const char *name;
    XLA_FFI_Handler *handler;
} Target;

/* {name: capsule} of targets, the last one without a name. */
static inline PyObject *capsules(const Target *targets) {
    PyObject *found = PyDict_New();
    for (; found && targets->name; targets++) {
        PyObject *capsule = PyCapsule_New((void *)targets->handler, NULL, NULL);
        if (!capsule || PyDict_SetItemString(found, targets->name, capsule) < 0) Py_CLEAR(found);
        Py_XDECREF(capsule);
    }
    return found;
}

/* The module, which tells the version of the interface that it was compiled for. */
static inline PyObject *with_version(PyObject *made) {
    if (made && (PyModule_AddIntConstant(made, "XLA_FFI_API_MAJOR", XLA_FFI_API_MAJOR) < 0 ||
                 PyModule_AddIntConstant(made, "XLA_FFI_API_MINOR", XLA_FFI_API_MINOR) < 0))
        Py_CLEAR(made);
    return made;
}
