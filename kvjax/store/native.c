/* The part of asynchronous reads that has to be quick. Between a block's landing and its place in the caller's memory no
 * Python object is touched, and other Python threads run; before the first request, what takes NumPy a dozen calls is one
 * pass. What goes wrong is found here and dealt with in kvjax/store/aio.py. Signatures are in native.pyi.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NOWAIT 8 /* RWF_NOWAIT: a read that would block its submission fails with EAGAIN instead */

typedef uint64_t (*Hash)(const void *, size_t);

/* ---- arguments */

#define MOST_BUFFERS 10

typedef struct {
    Py_buffer views[MOST_BUFFERS];
    int count;
} Buffers;

static void release(Buffers *buffers) {
    while (buffers->count)
        PyBuffer_Release(&buffers->views[--buffers->count]);
}

/* Memory of the next argument and how many items of `size` bytes it has; NULL, with everything released, on an error. */
static void *take(Buffers *buffers, PyObject *argument, size_t size, int flags, Py_ssize_t *items) {
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

#define READ(type, name, index)                                                          \
    Py_ssize_t name##_size;                                                              \
    const type *name = take(&buffers, args[index], sizeof(type), PyBUF_SIMPLE, &name##_size); \
    if (!name) return NULL
#define WRITE(type, name, index)                                                         \
    Py_ssize_t name##_size;                                                              \
    type *name = take(&buffers, args[index], sizeof(type), PyBUF_WRITABLE, &name##_size); \
    if (!name) return NULL

static PyObject *refuse(Buffers *buffers, const char *why) {
    release(buffers);
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

/* Arguments from[0..count-1] as integers; 0 on an error. */
static int integers(PyObject *const *from, Py_ssize_t count, int64_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(from[i]);
        if (to[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* ---- resolve */

#define WHOLE 2 /* of `pending`: all of a block is staged, so that it is not read */

typedef struct {
    int32_t extent;
    int32_t place; /* in the order asked for */
} Found;

static int by_extent(const void *a, const void *b) {
    int32_t left = ((const Found *)a)->extent, right = ((const Found *)b)->extent;
    return (left > right) - (left < right);
}

/* resolve(block, slot, rows, shift, pending, checksums, extents, sums, targets, staged,
 *         lanes, num_blocks, slots, first_lane) -> count, staged */
static PyObject *resolve(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[4];
    if (nargs != 14) return refuse(&buffers, "resolve takes 14 arguments");
    if (!integers(args + 10, 4, number)) return NULL;
    int64_t lanes = number[0], num_blocks = number[1], slots = number[2], first_lane = number[3];
    READ(int32_t, block, 0);
    READ(int32_t, slot, 1);
    READ(int32_t, rows, 2);
    READ(int64_t, shift, 3);
    READ(uint8_t, pending, 4);
    READ(uint64_t, checksums, 5);
    WRITE(int32_t, extents, 6);
    WRITE(uint64_t, sums, 7);
    WRITE(int64_t, targets, 8);
    WRITE(int64_t, staged, 9);
    Py_ssize_t most = block_size;
    if (slot_size != most || lanes < 1 || most % lanes || extents_size < most || sums_size < most || targets_size < most ||
        staged_size < 2 * most || first_lane < 0 || first_lane + lanes > shift_size ||
        (first_lane + lanes) * num_blocks > pending_size)
        return refuse(&buffers, "resolve: sizes do not agree");
    Found *found = malloc((most + 1) * sizeof(Found));
    if (!found) {
        release(&buffers);
        return PyErr_NoMemory();
    }
    Py_ssize_t count = 0, marked = 0, asked = most / lanes;
    for (Py_ssize_t i = 0; i < most; i++) {
        if (block[i] < 0 || block[i] >= num_blocks) continue;
        int64_t lane = first_lane + i / asked, id = lane * num_blocks + block[i], at = id + shift[lane];
        int32_t extent = at >= 0 && at < rows_size ? rows[at] : -1;
        int read = pending[id] != WHOLE;
        if ((read && (extent < 0 || extent >= checksums_size)) || slot[i] < 0 || slot[i] >= slots) {
            count = -1; /* never written, or a bad slot */
            break;
        }
        if (read) found[count++] = (Found){extent, (int32_t)i};
        if (pending[id]) {
            staged[marked++] = id;
            staged[marked++] = i / asked * slots + slot[i];
        }
    }
    if (count > 0) qsort(found, count, sizeof(Found), by_extent);
    for (Py_ssize_t k = 0; k < count; k++) {
        int32_t i = found[k].place;
        extents[k] = found[k].extent;
        sums[k] = checksums[found[k].extent];
        targets[k] = i / asked * slots + slot[i];
    }
    free(found);
    release(&buffers);
    return Py_BuildValue("nn", count, marked / 2);
}

/* ---- control */

#define PAGES 0xffff /* the bits of a checksum that are not the hash's: pages that a block takes as it is, 0 for all */

/* Bytes of the pages that a block takes, `whole` if all, or if it claims more. */
static int64_t size_of(uint64_t sum, int64_t page_bytes, int64_t whole) {
    int64_t size = (int64_t)(sum & PAGES) * page_bytes;
    return size && size < whole ? size : whole;
}

typedef struct { /* which memory and which part of the file reads are of */
    int64_t piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor;
} Reading;

/* Control blocks that read extents[n], neighbours in one; starts[reads] and the number of reads. */
static Py_ssize_t fill_control(const int32_t *extents, const uint64_t *sums, Py_ssize_t n, const Reading *from,
                               struct iocb *control, int64_t *starts) {
    Py_ssize_t reads = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t size = size_of(sums[i], from->page_bytes, from->extent_bytes);
        if (i % from->piece && extents[i] == extents[i - 1] + 1) {
            control[reads - 1].aio_nbytes = (i - starts[reads - 1]) * from->extent_bytes + size;
            continue;
        }
        starts[reads] = i;
        control[reads] = (struct iocb){
            .aio_data = reads, .aio_rw_flags = NOWAIT, .aio_lio_opcode = IOCB_CMD_PREAD,
            .aio_fildes = from->descriptor, .aio_buf = from->arena + i % from->places * from->extent_bytes,
            .aio_nbytes = size, .aio_offset = from->header_bytes + extents[i] * from->extent_bytes};
        reads++;
    }
    return reads;
}

/* control(extents, sums, control, starts, piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor)
 * -> reads */
static PyObject *control(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[7];
    if (nargs != 11) return refuse(&buffers, "control takes 11 arguments");
    if (!integers(args + 4, 7, number)) return NULL;
    READ(int32_t, extents, 0);
    READ(uint64_t, sums, 1);
    WRITE(struct iocb, blocks, 2);
    WRITE(int64_t, starts, 3);
    if (sums_size != extents_size || blocks_size < extents_size || starts_size < extents_size || number[0] < 1 ||
        number[1] < number[0])
        return refuse(&buffers, "control: sizes do not agree");
    Reading from = {number[0], number[1], number[2], number[3], number[4], number[5], number[6]};
    Py_ssize_t reads = fill_control(extents, sums, extents_size, &from, blocks, starts);
    release(&buffers);
    return PyLong_FromSsize_t(reads);
}

/* ---- land */

typedef struct { /* what is being read, and where to */
    int64_t reads, extents, slots, places, extent_bytes, block_bytes, page_bytes;
    const char *arena;
    Hash hash;
    const struct iocb *control;
    const int64_t *starts, *targets;
    const uint64_t *sums;
    int64_t *results;
    uint8_t *done;
    char *out;
    int64_t bytes; /* of the reads that came whole */
    int64_t useful; /* of the blocks that were copied */
} Landing;

/* Notes the results of events, verifies the blocks of reads that came whole and copies them; how many. */
static int64_t land_events(Landing *to, const struct io_event *events, int64_t count) {
    int64_t copied = 0;
    for (int64_t event = 0; event < count; event++) {
        uint64_t read = events[event].data;
        if (read >= (uint64_t)to->reads) continue;
        to->results[read] = events[event].res;
        if (events[event].res != (int64_t)to->control[read].aio_nbytes) continue;
        to->bytes += events[event].res;
        int64_t stop = (int64_t)read + 1 < to->reads ? to->starts[read + 1] : to->extents;
        for (int64_t i = to->starts[read]; i < stop; i++) {
            const char *payload = to->arena + i % to->places * to->extent_bytes;
            int64_t size = size_of(to->sums[i], to->page_bytes, to->block_bytes);
            if (to->done[i] || to->targets[i] < 0 || to->targets[i] >= to->slots) continue;
            uint64_t pages = size < to->block_bytes ? size / to->page_bytes : 0;
            if (((to->hash(payload, size) & ~(uint64_t)PAGES) | pages) != to->sums[i]) continue;
            char *slot = to->out + to->targets[i] * to->block_bytes;
            memcpy(slot, payload, size);
            memset(slot + size, 0, to->block_bytes - size);
            to->done[i] = 1;
            to->useful += size;
            copied++;
        }
    }
    return copied;
}

/* land(events, control, starts, sums, targets, results, done, out,
 *      count, reads, arena, places, extent_bytes, block_bytes, page_bytes, hash) -> blocks copied */
static PyObject *land(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[8];
    if (nargs != 16) return refuse(&buffers, "land takes 16 arguments");
    if (!integers(args + 8, 8, number)) return NULL;
    int64_t count = number[0], reads = number[1];
    READ(struct io_event, events, 0);
    READ(struct iocb, blocks, 1);
    READ(int64_t, starts, 2);
    READ(uint64_t, sums, 3);
    READ(int64_t, targets, 4);
    WRITE(int64_t, results, 5);
    WRITE(uint8_t, done, 6);
    WRITE(char, out, 7);
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

/* ---- read */

typedef struct { /* memory and constants of a ring: `_layout` of aio.py */
    int64_t context, places, piece, extent_bytes, block_bytes, header_bytes, page_bytes;
    int64_t arena, hash, control, pointers, events, extents, sums, targets, starts, results, done;
    int64_t depth;
} RingLayout;

#define MOST_TRIES 3

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

typedef struct {
    int64_t copied, in_flight;
    double began, ended, waited;
} Outcome;

/* How many reads that could not begin without blocking the kernel now took: a write to the file keeps it locked for some
 * microseconds, which are over when all else has landed. */
static int64_t ask_again(const RingLayout *ring, const Landing *to) {
    struct iocb *again[64], **pointers = (struct iocb **)(intptr_t)ring->pointers;
    long count = 0;
    for (int64_t i = 0; i < to->reads && count < 64; i++)
        if (to->results[i] == -EAGAIN) again[count++] = pointers[i];
    long taken = count ? syscall(SYS_io_submit, ring->context, count, again) : 0;
    return taken > 0 ? taken : 0;
}

/* Submits reads, waits for a quarter of those in flight at a time and lands them, until none is in flight or none came
 * for `timeout` seconds. What could not begin is tried `MOST_TRIES` more times, and nothing else that came back bad; what
 * the kernel had no room for is tried while others are in flight. */
static Outcome read_all(const RingLayout *ring, Landing *to, double timeout) {
    Outcome outcome = {.began = now()};
    struct io_event *events = (struct io_event *)(intptr_t)ring->events;
    struct iocb **pointers = (struct iocb **)(intptr_t)ring->pointers;
    int64_t sent = 0;
    int tries = 0;
    outcome.ended = outcome.began;
    for (;;) {
        int64_t room = ring->depth - outcome.in_flight, left = to->reads - sent;
        int64_t next = left < room ? left : room;
        long taken = next > 0 ? syscall(SYS_io_submit, ring->context, next, pointers + sent) : 0;
        if (taken > 0) {
            sent += taken;
            outcome.in_flight += taken;
        }
        if (!outcome.in_flight && sent == to->reads && tries++ < MOST_TRIES) outcome.in_flight = ask_again(ring, to);
        if (!outcome.in_flight) return outcome;
        double asked = now(), patience = timeout;
        long came;
        do {
            struct timespec time = {(time_t)patience, (long)(1e9 * (patience - (time_t)patience))};
            came = syscall(SYS_io_getevents, ring->context, (outcome.in_flight + 3) / 4, ring->places, events, &time);
            outcome.ended = now();
            patience = asked + timeout - outcome.ended;
        } while (came < 0 && errno == EINTR && patience > 0);
        outcome.waited += outcome.ended - asked;
        if (came <= 0) return outcome;
        outcome.in_flight -= came;
        outcome.copied += land_events(to, events, came);
    }
}

/* read(layout, out, count, descriptor, timeout) -> copied, reads, bytes, useful, in_flight, began, ended, waited */
static PyObject *read_blocks(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Buffers buffers = {.count = 0};
    int64_t number[2];
    if (nargs != 5) return refuse(&buffers, "read takes 5 arguments");
    if (!integers(args + 2, 2, number)) return NULL;
    double timeout = PyFloat_AsDouble(args[4]);
    if (timeout == -1 && PyErr_Occurred()) return NULL;
    READ(RingLayout, ring, 0);
    WRITE(char, out, 1);
    if (ring_size != 1 || number[0] < 0 || number[0] > ring->places)
        return refuse(&buffers, "read: sizes do not agree");
    struct iocb *blocks = (struct iocb *)(intptr_t)ring->control;
    int64_t *starts = (int64_t *)(intptr_t)ring->starts;
    Landing to = {
        .extents = number[0], .slots = out_size / ring->block_bytes, .places = ring->places,
        .extent_bytes = ring->extent_bytes, .block_bytes = ring->block_bytes, .page_bytes = ring->page_bytes,
        .arena = (const char *)(intptr_t)ring->arena, .hash = (Hash)(intptr_t)ring->hash, .control = blocks,
        .starts = starts,
        .targets = (const int64_t *)(intptr_t)ring->targets, .sums = (const uint64_t *)(intptr_t)ring->sums,
        .results = (int64_t *)(intptr_t)ring->results, .done = (uint8_t *)(intptr_t)ring->done, .out = out};
    Reading from = {ring->piece, ring->places, ring->arena, ring->extent_bytes, ring->page_bytes, ring->header_bytes,
                    number[1]};
    Outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    to.reads = fill_control((const int32_t *)(intptr_t)ring->extents, to.sums, number[0], &from, blocks, starts);
    memset(to.done, 0, number[0]);
    outcome = read_all(ring, &to, timeout);
    Py_END_ALLOW_THREADS
    release(&buffers);
    return Py_BuildValue("LLLLLddd", (long long)outcome.copied, (long long)to.reads, (long long)to.bytes,
                         (long long)to.useful, (long long)outcome.in_flight, outcome.began, outcome.ended, outcome.waited);
}

static PyMethodDef methods[] = {
    {"resolve", (PyCFunction)(void (*)(void))resolve, METH_FASTCALL, NULL},
    {"control", (PyCFunction)(void (*)(void))control, METH_FASTCALL, NULL},
    {"land", (PyCFunction)(void (*)(void))land, METH_FASTCALL, NULL},
    {"read", (PyCFunction)(void (*)(void))read_blocks, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
