/* The part of asynchronous reads that has to be quick. Python says what to read with (`_window`, `_guess_window`), and is told
 * what was begun (`_guessed`), and of a fetch what has to be looked at (`_landed`); what lies between is here and in reads.c,
 * and other Python threads run meanwhile. What goes wrong is found here and dealt with in kvjax/store/branch.py and aio.py.
 * Signatures are in native.pyi.
 */
#include "arguments.h"
#include "callback.h"
#include "reads.h"
#include "rows.h"

#include <string.h>

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
    const int32_t *block, *slot; /* what is wanted: asked of each lane; no slots where nothing is to be copied yet */
    int64_t asked, lanes, first_lane, num_blocks, slots, block_bytes;
    char *out; /* the memory of these slots */
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

/* Fills extents, ascending, sums and targets of blocks to read, and what is staged, and puts zeros where a block goes that
 * was never written; 0 where one lies beyond the table or the file, or a slot does not exist. */
static int resolve(Wanted *in) {
    in->count = in->marked = 0;
    if (in->first_lane < 0 || in->first_lane + in->lanes > in->shift_size ||
        (in->first_lane + in->lanes) * in->num_blocks > in->pending_size)
        return 0;
    for (int64_t i = 0; i < in->lanes * in->asked; i++) {
        int32_t block = in->block[i], slot = in->slot ? in->slot[i] : 0;
        if (block < 0 || block >= in->num_blocks) continue;
        int64_t lane = in->first_lane + i / in->asked, id = lane * in->num_blocks + block, at = id + in->shift[lane];
        if (at < 0 || at >= in->rows_size || in->rows[at] >= in->checksums_size || slot < 0 || slot >= in->slots) return 0;
        int64_t target = in->slot ? i / in->asked * in->slots + slot : -1;
        int needed = in->pending[id] != WHOLE; /* from the file */
        if (needed && in->rows[at] >= 0)
            in->found[in->count++] = (Found){in->rows[at], (int32_t)target};
        else if (needed && in->out)
            memset(in->out + target * in->block_bytes, 0, in->block_bytes);
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

/* ---- control and land */

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

/* ---- what a branch gives, and is told */

typedef struct { /* `FlashBranch._window`, and `_guess_window` */
    PyObject *ring, *layout, *lock, *lanes, *extents, *shift, *pending, *fetched;
    long long batch, heads, num_blocks, block_rows, width, first_lane, descriptor;
    const char *format; /* of an element, in Python's buffers */
    double timeout;
    int watched; /* whether events are recorded */
    PyObject *guess; /* of a fetch: reads of the layer that were begun before, or None */
} Window;

typedef struct { /* FETCHED of base.py */
    int64_t reads, blocks_read, bytes_read, bytes_useful, prefetch_used, mispredicted;
    double read_seconds, io_seconds, wait_seconds;
} Totals;

/* 1, 0 where there is no window, -1 on an exception. */
static int parse_window(PyObject *given, Window *to) {
    if (!given) return -1;
    if (given == Py_None) return 0;
    return PyArg_ParseTuple(given, "OO(OOOOOOLLLLLsd)LLpO", &to->ring, &to->layout, &to->lock, &to->lanes, &to->extents,
                            &to->shift, &to->pending, &to->fetched, &to->batch, &to->heads, &to->num_blocks, &to->block_rows,
                            &to->width, &to->format, &to->timeout, &to->first_lane, &to->descriptor, &to->watched,
                            &to->guess) ? 1 : -1;
}

static PyObject *name_window, *name_guess_window, *name_give_back, *name_drop, *name_staged, *name_acquire, *name_release,
    *name_rows, *name_checksums, *name_in_flight;

static int intern_names(void) {
    static const struct {
        PyObject **name;
        const char *text;
    } all[] = {{&name_window, "_window"}, {&name_guess_window, "_guess_window"}, {&name_give_back, "_give_back"},
               {&name_drop, "drop"}, {&name_staged, "_staged"}, {&name_acquire, "acquire"}, {&name_release, "release"},
               {&name_rows, "rows"}, {&name_checksums, "checksums"}, {&name_in_flight, "in_flight"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!*all[i].name && !(*all[i].name = PyUnicode_InternFromString(all[i].text))) return 0;
    return 1;
}

/* A call while an exception may be on its way, which stays. */
static void call_aside(PyObject *object, PyObject *name, PyObject *argument, PyObject *another) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(object, name, argument, another, NULL));
    if (kind) PyErr_Restore(kind, value, trace);
}

/* Nobody reads any more into a window's ring, whose arena has had so many extents. */
static void give_back(PyObject *branch, const Window *window, int64_t extents) {
    PyObject *used = PyLong_FromLongLong(extents);
    if (used) call_aside(branch, name_give_back, window->ring, used);
    Py_XDECREF(used);
}

/* Tells a ring what the kernel has not answered: it is not used again before. Whether no exception came of it. */
static int tell_in_flight(const Reads *reads) {
    PyObject *in_flight = PyLong_FromLongLong(reads->in_flight);
    int told = in_flight && PyObject_SetAttr(reads->object, name_in_flight, in_flight) == 0;
    Py_XDECREF(in_flight);
    return told;
}

/* ---- finding blocks */

/* What is wanted of which memory, but for the caller's arrays: 1, or -1 on an exception. */
static int take_layer(Buffers *buffers, const Window *from, const RingLayout **ring, Wanted *to) {
    Py_ssize_t count;
    *to = (Wanted){
        .lanes = from->batch * from->heads, .slots = 1, .first_lane = from->first_lane, .num_blocks = from->num_blocks};
    if (!(*ring = take(buffers, from->layout, sizeof **ring, PyBUF_SIMPLE, &count)) ||
        !(to->shift = take(buffers, from->shift, sizeof *to->shift, PyBUF_SIMPLE, &to->shift_size)) ||
        !(to->pending = take(buffers, from->pending, sizeof *to->pending, PyBUF_SIMPLE, &to->pending_size)))
        return -1;
    to->block_bytes = (*ring)->block_bytes;
    to->found = (Found *)(intptr_t)(*ring)->found;
    to->extents = (int32_t *)(intptr_t)(*ring)->extents;
    to->sums = (uint64_t *)(intptr_t)(*ring)->sums;
    to->targets = (int64_t *)(intptr_t)(*ring)->targets;
    to->staged = (int64_t *)(intptr_t)(*ring)->staged;
    return 1;
}

/* An int32 array, and how many it has for each lane; NULL where it is something else. */
static const int32_t *take_index(Buffers *buffers, const Window *from, PyObject *array, int64_t *asked) {
    const long long shape[] = {from->batch, from->heads, -1};
    const Py_buffer *view = &buffers->views[buffers->count];
    const int32_t *index = take_shaped(buffers, array, sizeof *index, 0, "i", 3, shape);
    if (index) *asked = view->shape[2];
    return index;
}

/* Rows of slots, or NULL. */
static char *take_slots(Buffers *buffers, const Window *from, PyObject *array, size_t item, int64_t *slots) {
    const long long shape[] = {from->batch, from->heads, -1, from->block_rows, from->width};
    const Py_buffer *view = &buffers->views[buffers->count];
    char *rows = take_shaped(buffers, array, item, PyBUF_WRITABLE, from->format, 5, shape);
    if (rows) *slots = view->shape[2];
    return rows;
}

/* Finds the blocks with the volume's lock held, and what is staged of them: 1, 0 where `resolve` does not, -1 on an
 * exception. */
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
    if (found == 1 && to->marked && to->slot) {
        PyObject *places = PyMemoryView_FromMemory((char *)to->staged, 2 * to->marked * sizeof *to->staged, PyBUF_READ);
        *staged = places ? PyObject_CallMethodOneArg(branch, name_staged, places) : NULL;
        Py_XDECREF(places);
        if (!*staged) found = -1;
    }
    release(&buffers);
    Py_XDECREF(rows);
    Py_XDECREF(checksums);
    call_aside(window->lock, name_release, NULL, NULL);
    return found;
}

/* What is wanted of which memory, if the arrays are of the usual kind: 1, 0 where they are not, -1 on an exception. */
static int take_wanted(Buffers *buffers, const Window *from, PyObject *block, const RingLayout **ring, Wanted *to) {
    if (take_layer(buffers, from, ring, to) < 0) return -1;
    to->block = take_index(buffers, from, block, &to->asked);
    return to->block && to->lanes * to->asked <= (*ring)->places;
}

/* The same with the slots for it. */
static int take_slotted(Buffers *buffers, const Window *from, PyObject *const *arrays, const RingLayout **ring, Wanted *to) {
    int64_t asked;
    int found = take_wanted(buffers, from, arrays[0], ring, to);
    if (found != 1) return found;
    to->slot = take_index(buffers, from, arrays[1], &asked);
    if (!to->slot || asked != to->asked) return 0;
    to->out = take_slots(buffers, from, arrays[2], to->block_bytes / (from->block_rows * from->width), &to->slots);
    return to->out != NULL;
}

/* ---- guess */

/* Begins to read blocks and tells the branch; 1, 0 where the array is not of the usual kind, -1 on an exception. */
static int guess_with(PyObject *branch, const Window *window, PyObject *layer, PyObject *block) {
    Buffers buffers = {.count = 0};
    const RingLayout *ring;
    Wanted wanted;
    Reads reads = {.raised = 0};
    PyObject *told = NULL;
    int found = take_wanted(&buffers, window, block, &ring, &wanted);
    if (found == 1) found = find_blocks(branch, window, &wanted, NULL);
    if (found == 1 && wanted.count) {
        reads = reads_of(window->ring, ring, wanted.count);
        Py_BEGIN_ALLOW_THREADS
        begin(&reads, window->descriptor);
        Py_END_ALLOW_THREADS
    }
    release(&buffers);
    if (reads.sent && !reads.raised && tell_in_flight(&reads))
        told = PyObject_CallMethod(branch, "_guessed", "OOLLLd", window->ring, layer, (long long)reads.to.extents,
                                   (long long)reads.to.reads, (long long)reads.sent, reads.began);
    if (!told) give_back(branch, window, reads.to.extents);
    Py_XDECREF(told);
    return PyErr_Occurred() ? -1 : found;
}

/* guess(branch, layer, generation, block) -> whether it is done */
static PyObject *guess(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "guess takes 4 arguments");
    PyObject *given = PyObject_CallMethodObjArgs(args[0], name_guess_window, args[1], args[2], NULL);
    Window with;
    int found = parse_window(given, &with);
    if (found == 1) found = guess_with(args[0], &with, args[1], args[3]);
    Py_XDECREF(given);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* ---- fetch */

/* Reads that a guess began, with no block wanted yet: 1, 0 where there are none, -1 on an exception. */
static int take_guess(Buffers *buffers, const Window *window, Reads *to) {
    PyObject *owner, *ring, *layout;
    long long count, reads, sent, in_flight;
    double began;
    Py_ssize_t size;
    if (window->guess == Py_None) return 0;
    if (!PyArg_ParseTuple(window->guess, "OOOLLLLd", &owner, &ring, &layout, &count, &reads, &sent, &in_flight, &began))
        return -1;
    const RingLayout *memory = take(buffers, layout, sizeof *memory, PyBUF_SIMPLE, &size);
    if (!memory) return -1;
    *to = reads_of(ring, memory, count);
    to->to.reads = reads;
    to->sent = sent;
    to->in_flight = in_flight;
    to->began = to->ended = began;
    return 1;
}

/* Gives blocks of a guess the places where they are wanted, and leaves the others to be read. One is used only if it lies
 * in the same extent and has the same checksum as when it was asked for. */
static void use_guess(Reads *guess, Wanted *wanted) {
    const int32_t *extents = (int32_t *)(intptr_t)guess->ring->extents;
    int64_t *targets = (int64_t *)(intptr_t)guess->ring->targets, left = 0;
    for (int64_t k = 0, j = 0; k < wanted->count; k++) {
        while (j < guess->to.extents && extents[j] < wanted->extents[k]) j++;
        if (j < guess->to.extents && extents[j] == wanted->extents[k] && guess->to.sums[j] == wanted->sums[k]) {
            targets[j++] = wanted->targets[k];
            continue;
        }
        wanted->extents[left] = wanted->extents[k];
        wanted->sums[left] = wanted->sums[k];
        wanted->targets[left++] = wanted->targets[k];
    }
    wanted->count = left;
}

/* Reads what is wanted, and lands what was guessed of it meanwhile, unless the device hangs with that. Python's lock is not
 * held. */
static void read_both(Reads *reads, Reads *guess, const Window *window) {
    if (reads->to.extents) begin(reads, window->descriptor);
    if (guess->to.extents && !reads->raised) finish(guess, window->timeout);
    if (reads->to.extents && !reads->raised && !guess->raised && !guess->in_flight) finish(reads, window->timeout);
}

/* Lays rows that are staged, and no longer change, over slots: [(flat slot, first row, last + 1, address of row 0, who has
 * them)] of `FlashBranch._staged`, or NULL. Whether no exception came of it. */
static int lay_over(PyObject *staged, const Window *window, const Wanted *wanted) {
    int64_t row_bytes = wanted->block_bytes / window->block_rows;
    for (Py_ssize_t i = 0; staged && i < PyList_GET_SIZE(staged); i++) {
        long long slot, first, stop, address;
        PyObject *owner;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(staged, i), "LLLLO", &slot, &first, &stop, &address, &owner)) return 0;
        memcpy(wanted->out + slot * wanted->block_bytes + first * row_bytes,
               (const char *)(intptr_t)address + first * row_bytes, (stop - first) * row_bytes);
    }
    return 1;
}

/* Adds what one ring brought to the totals, with `blocks` as read. */
static void add(Totals *totals, const Reads *reads, int64_t blocks) {
    if (!reads->to.extents) return;
    Outcome came = outcome(reads);
    totals->reads += came.reads;
    totals->blocks_read += blocks;
    totals->bytes_read += came.bytes;
    totals->bytes_useful += came.useful;
    totals->io_seconds += reads->ended - reads->began;
    totals->wait_seconds += reads->waited;
}

/* Books a fetch; whether no exception came of it. */
static int book(const Window *window, const Reads *reads, const Reads *guess, double started) {
    Buffers buffers = {.count = 0};
    Py_ssize_t count;
    Totals *totals = take(&buffers, window->fetched, sizeof *totals, PyBUF_WRITABLE, &count);
    if (!totals) return 0;
    add(totals, reads, reads->copied);
    add(totals, guess, guess->to.extents);
    if (guess->ring) {
        totals->prefetch_used += wanted_of(guess);
        totals->mispredicted += reads->to.extents;
    }
    totals->read_seconds += now() - started;
    release(&buffers);
    return 1;
}

/* Whether blocks that were wanted of a ring are there, and nothing is on its way to it. */
static int came_whole(const Reads *reads) { return !reads->in_flight && reads->copied == wanted_of(reads); }

/* Tells the branch what came of it; whether no exception came of that. */
static int tell_landed(PyObject *branch, PyObject *const *args, double started, const Reads *own, const Reads *ahead) {
    PyObject *answer = PyObject_CallMethod(
        branch, "_landed", "Od((OLdd)(OLdd))OOO", args[0], started, ahead->ring ? ahead->object : Py_None,
        (long long)ahead->to.extents, ahead->began, ahead->ended, own->object, (long long)own->to.extents, own->began,
        own->ended, args[2], args[3], args[4]);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* What is to be done once everything has landed; whether no exception came of it. Whatever happens there, a ring that the
 * device may still write to is not used again. */
static int close_fetch(PyObject *branch, const Window *window, PyObject *const *args, double started, const Reads *reads,
                       const Reads *guess, const Wanted *wanted, PyObject *staged) {
    if (reads->raised || guess->raised) return 0;
    if (!tell_in_flight(reads) || (guess->ring && !tell_in_flight(guess))) return 0;
    if (!lay_over(staged, window, wanted) || !book(window, reads, guess, started)) return 0;
    if (!window->watched && came_whole(reads) && came_whole(guess)) return 1;
    return tell_landed(branch, args, started, reads, guess);
}

/* Reads blocks and tells the branch; 1, 0 where the caller's arrays are not of the usual kind, -1 on an exception. */
static int fetch_with(PyObject *branch, const Window *window, PyObject *const *args, double started) {
    Buffers buffers = {.count = 0};
    const RingLayout *ring;
    Wanted wanted;
    Reads reads = {.raised = 0}, guess = {.raised = 0};
    PyObject *staged = NULL;
    int found = take_slotted(&buffers, window, args + 2, &ring, &wanted);
    if (found == 1) found = find_blocks(branch, window, &wanted, &staged);
    if (found == 1 && take_guess(&buffers, window, &guess) < 0) found = -1;
    if (found == 1) {
        if (guess.ring) use_guess(&guess, &wanted);
        reads = reads_of(window->ring, ring, wanted.count);
        reads.to.out = guess.to.out = wanted.out;
        reads.to.slots = guess.to.slots = wanted.lanes * wanted.slots;
        Py_BEGIN_ALLOW_THREADS
        read_both(&reads, &guess, window);
        Py_END_ALLOW_THREADS
        found = close_fetch(branch, window, args, started, &reads, &guess, &wanted, staged) ? 1 : -1;
    }
    release(&buffers);
    Py_XDECREF(staged);
    if (window->guess != Py_None) call_aside(PyTuple_GET_ITEM(window->guess, 0), name_drop, NULL, NULL);
    give_back(branch, window, reads.to.extents);
    return PyErr_Occurred() ? -1 : found;
}

/* fetch(branch, layer, generation, block, slot, slots) -> whether it is done */
static PyObject *fetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    double started = now();
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "fetch takes 6 arguments");
    PyObject *given = PyObject_CallMethodObjArgs(args[0], name_window, args[1], args[2], NULL);
    Window with;
    int found = parse_window(given, &with);
    if (found == 1) found = fetch_with(args[0], &with, args + 1, started);
    Py_XDECREF(given);
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
    {"guess", (PyCFunction)(void (*)(void))guess, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))fetch, METH_FASTCALL, NULL},
    {"put_rows", put_rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native(void) { return intern_names() ? with_version(PyModule_Create(&module)) : NULL; }
