/* The part of asynchronous reads that has to be quick. Python says what to read with (`_window`) and is told what came of it
 * (`_landed`); what lies between is here. From the first request to the last block's place in the caller's memory no Python
 * object is touched, and other Python threads run. What goes wrong is found here and dealt with in kvjax/store/branch.py
 * and aio.py. Signatures are in native.pyi.
 */
#include "native.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NO_ANSWER INT64_MIN
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

#define READ(type, name, from)                                                      \
    Py_ssize_t name##_size;                                                         \
    const type *name = take(&buffers, from, sizeof(type), PyBUF_SIMPLE, &name##_size); \
    if (!name) return NULL
#define WRITE(type, name, from)                                                     \
    Py_ssize_t name##_size;                                                         \
    type *name = take(&buffers, from, sizeof(type), PyBUF_WRITABLE, &name##_size);     \
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
    int32_t target; /* flat slot */
} Found;

static int by_extent(const void *a, const void *b) {
    int32_t left = ((const Found *)a)->extent, right = ((const Found *)b)->extent;
    return (left > right) - (left < right);
}

typedef struct { /* a layer's blocks, and where they are */
    const int32_t *block, *slot; /* what is wanted: asked of each lane */
    int64_t asked, lanes, first_lane, num_blocks, slots;
    const int32_t *rows; /* `LanePool.rows`, and `Table.shift` from an id to its place in them */
    const int64_t *shift;
    Py_ssize_t rows_size, shift_size, pending_size, checksums_size;
    const uint8_t *pending;
    const uint64_t *checksums;
    Found *found; /* room for all that is wanted */
    int32_t *extents;
    uint64_t *sums;
    int64_t *targets, *staged; /* of these blocks: flat slots; of staged ones: flat ids and slots */
    int64_t count, marked;
} Wanted;

/* Fills extents, ascending, sums and targets of blocks to read, and what is staged; 0 where one is neither in the file nor
 * wholly staged, or a slot does not exist. */
static int resolve(Wanted *in) {
    in->count = in->marked = 0;
    if (in->first_lane < 0 || in->first_lane + in->lanes > in->shift_size ||
        (in->first_lane + in->lanes) * in->num_blocks > in->pending_size)
        return 0;
    for (int64_t i = 0; i < in->lanes * in->asked; i++) {
        int32_t block = in->block[i], slot = in->slot[i];
        if (block < 0 || block >= in->num_blocks) continue;
        int64_t lane = in->first_lane + i / in->asked, id = lane * in->num_blocks + block, at = id + in->shift[lane];
        int32_t extent = at >= 0 && at < in->rows_size ? in->rows[at] : -1;
        int read = in->pending[id] != WHOLE;
        if ((read && (extent < 0 || extent >= in->checksums_size)) || slot < 0 || slot >= in->slots) return 0;
        int64_t target = i / in->asked * in->slots + slot;
        if (read) in->found[in->count++] = (Found){extent, (int32_t)target};
        if (in->pending[id]) {
            in->staged[2 * in->marked] = id;
            in->staged[2 * in->marked++ + 1] = target;
        }
    }
    qsort(in->found, in->count, sizeof(Found), by_extent);
    for (int64_t k = 0; k < in->count; k++) {
        in->extents[k] = in->found[k].extent;
        in->sums[k] = in->checksums[in->found[k].extent];
        in->targets[k] = in->found[k].target;
    }
    return 1;
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

/* Verifies and copies a block; whether it was wanted and sound. */
static int land_block(const Landing *to, int64_t i) {
    const char *payload = to->arena + i % to->places * to->extent_bytes;
    int64_t size = size_of(to->sums[i], to->page_bytes, to->block_bytes);
    uint64_t pages = size < to->block_bytes ? size / to->page_bytes : 0;
    if (to->done[i] || to->targets[i] < 0 || to->targets[i] >= to->slots) return 0;
    if (((to->hash(payload, size) & ~(uint64_t)PAGES) | pages) != to->sums[i]) return 0;
    char *slot = to->out + to->targets[i] * to->block_bytes;
    memcpy(slot, payload, size);
    memset(slot + size, 0, to->block_bytes - size);
    to->done[i] = 1;
    return 1;
}

/* Extents of a read that came whole: from `starts[read]` to there. */
static int64_t stop_of(const Landing *to, int64_t read) { return read + 1 < to->reads ? to->starts[read + 1] : to->extents; }

/* Notes the results of events, verifies the blocks of reads that came whole and copies them; how many. */
static int64_t land_events(const Landing *to, const struct io_event *events, int64_t count) {
    int64_t copied = 0;
    for (const struct io_event *event = events; event < events + count; event++) {
        uint64_t read = event->data;
        if (read >= (uint64_t)to->reads) continue;
        to->results[read] = event->res;
        if (event->res != (int64_t)to->control[read].aio_nbytes) continue;
        for (int64_t i = to->starts[read]; i < stop_of(to, read); i++) copied += land_block(to, i);
    }
    return copied;
}

/* Bytes of the reads that came whole, and of the blocks that were copied. */
static void add_up(Landing *to) {
    for (int64_t i = 0; i < to->reads; i++)
        if (to->results[i] == (int64_t)to->control[i].aio_nbytes) to->bytes += to->results[i];
    for (int64_t i = 0; i < to->extents; i++)
        if (to->done[i]) to->useful += size_of(to->sums[i], to->page_bytes, to->block_bytes);
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

/* ---- read */

typedef struct { /* memory and constants of a ring: `Ring.layout` */
    int64_t context, places, piece, extent_bytes, block_bytes, header_bytes, page_bytes;
    int64_t arena, hash, control, pointers, events, extents, sums, targets, starts, results, done, found, staged;
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

/* ---- fetch */

typedef struct { /* what a branch gives for a fetch, `FlashBranch._window` */
    PyObject *ring, *layout, *lock, *lanes, *extents, *shift, *pending;
    long long first_lane, batch, heads, num_blocks, block_rows, width, descriptor;
    const char *format; /* of an element, in Python's buffers */
    double timeout;
} Window;

static PyObject *name_window, *name_unused, *name_staged, *name_acquire, *name_release, *name_rows, *name_checksums, *name_in_flight;

static int intern_names(void) {
    static const struct {
        PyObject **name;
        const char *text;
    } all[] = {{&name_window, "_window"}, {&name_unused, "_unused"}, {&name_staged, "_staged"}, {&name_acquire, "acquire"},
               {&name_release, "release"}, {&name_rows, "rows"}, {&name_checksums, "checksums"},
               {&name_in_flight, "in_flight"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!*all[i].name && !(*all[i].name = PyUnicode_InternFromString(all[i].text))) return 0;
    return 1;
}

/* A call while an exception may be on its way, which stays. */
static void call_aside(PyObject *object, PyObject *name, PyObject *argument) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(object, name, argument, NULL));
    if (kind) PyErr_Restore(kind, value, trace);
}

/* What is wanted of which memory: 1, 0 where the caller's arrays are not of the usual kind, -1 on an exception. */
static int take_arrays(Buffers *buffers, const Window *from, PyObject *const *arrays, const RingLayout **ring, Wanted *to,
                       char **out) {
    Py_ssize_t count;
    if (!(*ring = take(buffers, from->layout, sizeof **ring, PyBUF_SIMPLE, &count)) ||
        !(to->shift = take(buffers, from->shift, sizeof *to->shift, PyBUF_SIMPLE, &to->shift_size)) ||
        !(to->pending = take(buffers, from->pending, sizeof *to->pending, PyBUF_SIMPLE, &to->pending_size)))
        return -1;
    const Py_buffer *block = &buffers->views[buffers->count], *slot = block + 1, *slots = block + 2;
    if (!(to->block = take(buffers, arrays[0], sizeof *to->block, PyBUF_ND | PyBUF_FORMAT, &count)) ||
        !(to->slot = take(buffers, arrays[1], sizeof *to->slot, PyBUF_ND | PyBUF_FORMAT, &count)) ||
        !(*out = take(buffers, arrays[2], (*ring)->block_bytes / (from->block_rows * from->width),
                      PyBUF_ND | PyBUF_FORMAT | PyBUF_WRITABLE, &count))) {
        PyErr_Clear();
        return 0;
    }
    if (block->ndim != 3 || slot->ndim != 3 || slots->ndim != 5) return 0;
    to->asked = block->shape[2];
    to->slots = slots->shape[2];
    const Py_ssize_t index[] = {from->batch, from->heads, to->asked};
    const Py_ssize_t rows[] = {from->batch, from->heads, to->slots, from->block_rows, from->width};
    return !memcmp(block->shape, index, sizeof index) && !memcmp(slot->shape, index, sizeof index) &&
           !memcmp(slots->shape, rows, sizeof rows) && !strcmp(block->format, "i") && !strcmp(slot->format, "i") &&
           !strcmp(slots->format, from->format) && to->lanes * to->asked <= (*ring)->places;
}

/* Finds the blocks with the volume's lock held, and what is staged of them; as `take_arrays`. */
static int find_blocks(PyObject *branch, const Window *window, Wanted *to, PyObject **staged) {
    Buffers buffers = {.count = 0};
    PyObject *locked = PyObject_CallMethodNoArgs(window->lock, name_acquire);
    if (!locked) return -1;
    Py_DECREF(locked);
    int found = -1;
    PyObject *rows = PyObject_GetAttr(window->lanes, name_rows);
    PyObject *checksums = rows ? PyObject_GetAttr(window->extents, name_checksums) : NULL;
    if (checksums && (to->rows = take(&buffers, rows, sizeof *to->rows, PyBUF_SIMPLE, &to->rows_size)) &&
        (to->checksums = take(&buffers, checksums, sizeof *to->checksums, PyBUF_SIMPLE, &to->checksums_size)))
        found = resolve(to);
    if (found == 1 && to->marked) {
        PyObject *places = PyMemoryView_FromMemory((char *)to->staged, 2 * to->marked * sizeof *to->staged, PyBUF_READ);
        *staged = places ? PyObject_CallMethodOneArg(branch, name_staged, places) : NULL;
        Py_XDECREF(places);
        if (!*staged) found = -1;
    }
    release(&buffers);
    Py_XDECREF(rows);
    Py_XDECREF(checksums);
    call_aside(window->lock, name_release, NULL);
    return found;
}

/* Reads what is wanted through a ring. */
static Outcome read_wanted(const RingLayout *ring, const Wanted *from, const Window *window, Landing *to) {
    Reading reading = {ring->piece, ring->places, ring->arena, ring->extent_bytes, ring->page_bytes, ring->header_bytes,
                       window->descriptor};
    struct iocb *blocks = (struct iocb *)(intptr_t)ring->control;
    int64_t *starts = (int64_t *)(intptr_t)ring->starts;
    *to = (Landing){
        .extents = from->count, .slots = from->lanes * from->slots, .places = ring->places,
        .extent_bytes = ring->extent_bytes, .block_bytes = ring->block_bytes, .page_bytes = ring->page_bytes,
        .arena = (const char *)(intptr_t)ring->arena, .hash = (Hash)(intptr_t)ring->hash, .control = blocks,
        .starts = starts, .targets = from->targets, .sums = from->sums,
        .results = (int64_t *)(intptr_t)ring->results, .done = (uint8_t *)(intptr_t)ring->done, .out = to->out};
    memset(to->done, 0, from->count);
    to->reads = fill_control(from->extents, from->sums, from->count, &reading, blocks, starts);
    for (int64_t i = 0; i < to->reads; i++) to->results[i] = NO_ANSWER;
    Outcome outcome = read_all(ring, to, window->timeout);
    add_up(to);
    return outcome;
}

/* Reads blocks and tells the branch what came of it; 1, or as `take_arrays`. */
static int fetch_with(PyObject *branch, const Window *window, PyObject *const *args, double started) {
    Buffers buffers = {.count = 0};
    const RingLayout *ring;
    Wanted wanted = {.lanes = window->batch * window->heads, .first_lane = window->first_lane, .num_blocks = window->num_blocks};
    Landing to = {.reads = 0};
    Outcome outcome = {.copied = 0};
    PyObject *staged = NULL;
    int found = take_arrays(&buffers, window, args + 2, &ring, &wanted, &to.out);
    if (found == 1) {
        wanted.found = (Found *)(intptr_t)ring->found;
        wanted.extents = (int32_t *)(intptr_t)ring->extents;
        wanted.sums = (uint64_t *)(intptr_t)ring->sums;
        wanted.targets = (int64_t *)(intptr_t)ring->targets;
        wanted.staged = (int64_t *)(intptr_t)ring->staged;
        found = find_blocks(branch, window, &wanted, &staged);
    }
    if (found == 1 && wanted.count) {
        Py_BEGIN_ALLOW_THREADS
        outcome = read_wanted(ring, &wanted, window, &to);
        Py_END_ALLOW_THREADS
    }
    release(&buffers);
    if (found != 1) {
        call_aside(branch, name_unused, window->ring);
        return found;
    }
    /* Whatever happens there, a ring that the device may still write to is not used again. */
    PyObject *in_flight = PyLong_FromLongLong(outcome.in_flight), *told = NULL;
    if (in_flight && PyObject_SetAttr(window->ring, name_in_flight, in_flight) == 0)
        told = PyObject_CallMethod(
            branch, "_landed", "OOd(LLLLLddd)OOOO", window->ring, args[0], started, (long long)wanted.count,
            (long long)outcome.copied, (long long)to.reads, (long long)to.bytes, (long long)to.useful,
            outcome.began, outcome.ended, outcome.waited, staged ? staged : Py_None, args[2], args[3], args[4]);
    if (!told) call_aside(branch, name_unused, window->ring);
    Py_XDECREF(in_flight);
    Py_XDECREF(staged);
    Py_XDECREF(told);
    return told ? 1 : -1;
}

/* fetch(branch, layer, generation, block, slot, slots) -> whether it is done */
static PyObject *fetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    double started = now();
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "fetch takes 6 arguments");
    PyObject *given = PyObject_CallMethodObjArgs(args[0], name_window, args[1], args[2], NULL);
    if (!given) return NULL;
    Window with;
    int found = 0;
    if (given != Py_None)
        found = PyArg_ParseTuple(given, "OOOOOOOLLLLLLLsd", &with.ring, &with.layout, &with.lock, &with.lanes, &with.extents,
                                 &with.shift, &with.pending, &with.first_lane, &with.batch, &with.heads, &with.num_blocks,
                                 &with.block_rows, &with.width, &with.descriptor, &with.format, &with.timeout)
                    ? fetch_with(args[0], &with, args + 1, started) : -1;
    Py_DECREF(given);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* ---- callbacks */

static const Target targets[] = {{"callback", on_callback}, {NULL, NULL}};

/* handlers() -> {name: capsule} */
static PyObject *handlers(PyObject *self, PyObject *none) { return capsules(targets); }

static PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, NULL},
    {"serve", serve, METH_VARARGS, NULL},
    {"control", (PyCFunction)(void (*)(void))control, METH_FASTCALL, NULL},
    {"land", (PyCFunction)(void (*)(void))land, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) { return intern_names() ? with_version(PyModule_Create(&module)) : NULL; }
