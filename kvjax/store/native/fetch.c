/* A layer's reads: begun on a guess, or for blocks that are needed now. Python says what to read with (`_window`,
 * `_guess_window`), and is told what was begun (`_guessed`), and of a fetch what has to be looked at (`_landed`). What goes
 * wrong is found here and dealt with in branch.py.
 */
#include "fetch.h"
#include "blocks.h"
#include "staged.h"

typedef struct { /* FETCHED of base.py */
    int64_t reads, blocks_read, bytes_read, prefetch_used, mispredicted;
    double read_seconds, io_seconds, wait_seconds;
} Totals;

/* Nobody reads any more into a window's ring, whose arena has had so many extents. */
static void give_back(PyObject *branch, const Window *window, int64_t extents) {
    PyObject *used = PyLong_FromLongLong(extents);
    /* Ctrl-C that came while blocks were waited for is raised as Python enters the method: before it has done anything. */
    if (used && !call_aside(branch, names.give_back, window->ring, used))
        call_aside(branch, names.give_back, window->ring, used);
    Py_XDECREF(used);
}

/* Tells a ring what the kernel has not answered: it is not used again before. Whether no exception came of it. */
static int tell_in_flight(const Reads *reads) {
    PyObject *in_flight = PyLong_FromLongLong(reads->in_flight);
    int told = in_flight && PyObject_SetAttr(reads->object, names.in_flight, in_flight) == 0;
    Py_XDECREF(in_flight);
    return told;
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
    if (found == 1) found = find_blocks(window, &wanted, NULL);
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
PyObject *guess(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "guess takes 4 arguments");
    PyObject *given = PyObject_CallMethodObjArgs(args[0], names.guess_window, args[1], args[2], NULL);
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

/* Adds what one ring brought to the totals, with `blocks` as read. */
static void add(Totals *totals, const Reads *reads, int64_t blocks) {
    if (!reads->to.extents) return;
    Outcome came = outcome(reads);
    totals->reads += came.reads;
    totals->blocks_read += blocks;
    totals->bytes_read += came.bytes;
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
    if (found == 1) found = find_blocks(window, &wanted, &staged);
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
    if (window->guess != Py_None) call_aside(PyTuple_GET_ITEM(window->guess, 0), names.drop, NULL, NULL);
    give_back(branch, window, reads.to.extents);
    return PyErr_Occurred() ? -1 : found;
}

/* fetch(branch, layer, generation, block, slot, slots) -> whether it is done */
PyObject *fetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    double started = now();
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "fetch takes 6 arguments");
    PyObject *given = PyObject_CallMethodObjArgs(args[0], names.window, args[1], args[2], NULL);
    Window with;
    int found = parse_window(given, &with);
    if (found == 1) found = fetch_with(args[0], &with, args + 1, started);
    Py_XDECREF(given);
    return found < 0 ? NULL : PyBool_FromLong(found);
}
