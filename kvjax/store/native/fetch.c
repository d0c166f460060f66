/* The reads of a layer: speculative ones, and those of blocks that are needed now. Python provides what to read with
 * (`_window`, `_guess_window`), and is called with the reads begun (`_guessed`), and with the results of a fetch if
 * these need attention (`_landed`). Failures are detected here and handled in branch.py. */
#include "fetch.h"
#include "blocks.h"
#include "staged.h"

typedef struct { /* FETCHED of stats.py */
    int64_t reads, blocks_read, bytes_read, prefetch_used, mispredicted;
    double read_seconds, io_seconds, wait_seconds;
} Totals;

/* Returns a window's ring, whose arena held up to `extents` extents, to the branch. */
static void give_back(PyObject *branch, const Window *window, int64_t extents) {
    PyObject *used = PyLong_FromLongLong(extents);
    /* A KeyboardInterrupt from the time of waiting is raised on entering the method, before it has done anything: call
     * it once more. */
    if (used && !call_aside(branch, names.give_back, window->ring, used))
        call_aside(branch, names.give_back, window->ring, used);
    Py_XDECREF(used);
}

/* Sets the ring's number of unanswered reads, so that it is not reused too early; returns whether there was no
 * exception. */
static int tell_in_flight(const Reads *reads) {
    PyObject *in_flight = PyLong_FromLongLong(reads->in_flight);
    int told = in_flight && PyObject_SetAttr(reads->object, names.in_flight, in_flight) == 0;
    Py_XDECREF(in_flight);
    return told;
}

/* ---- guess */

/* Begins to read blocks and calls `_guessed`; 1, 0 if the Python path has to handle it, -1 on an exception. */
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

/* guess(branch, layer, generation, block) -> whether it was done */
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

/* Sets the reads of the window's guess, with no targets yet: 1, 0 if there are none, -1 on an exception. */
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

/* Moves the targets of requested blocks that a guess has to the guess, and leaves the others to be read. A guessed
 * block is used only if it still has the extent and the checksum of the time it was requested. */
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

/* Reads the requested blocks and lands those of the guess meanwhile; stops if the device hangs with the guess. The GIL
 * is not held. */
static void read_both(Reads *reads, Reads *guess, const Window *window) {
    if (reads->to.extents) begin(reads, window->descriptor);
    if (guess->to.extents && !reads->raised) finish(guess, window->timeout);
    if (reads->to.extents && !reads->raised && !guess->raised && !guess->in_flight) finish(reads, window->timeout);
}

/* Adds the results of one ring to the totals, with `blocks` as blocks read. */
static void add(Totals *totals, const Reads *reads, int64_t blocks) {
    if (!reads->to.extents) return;
    Outcome came = outcome(reads);
    totals->reads += came.reads;
    totals->blocks_read += blocks;
    totals->bytes_read += came.bytes;
    totals->io_seconds += reads->ended - reads->began;
    totals->wait_seconds += reads->waited;
}

/* Adds a fetch to the totals; returns whether there was no exception. */
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

/* Returns whether all blocks requested from a ring were copied and nothing is in flight. */
static int came_whole(const Reads *reads) { return !reads->in_flight && reads->copied == wanted_of(reads); }

/* Calls `_landed` with the results; returns whether there was no exception. */
static int tell_landed(PyObject *branch, PyObject *const *args, double started, const Reads *own, const Reads *ahead) {
    PyObject *answer = PyObject_CallMethod(
        branch, "_landed", "Od((OLdd)(OLdd))OOO", args[0], started, ahead->ring ? ahead->object : Py_None,
        (long long)ahead->to.extents, ahead->began, ahead->ended, own->object, (long long)own->to.extents, own->began,
        own->ended, args[2], args[3], args[4]);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* Completes a fetch once everything has landed; returns whether there was no exception. In any case a ring that the
 * device may still write to is not reused. */
static int close_fetch(PyObject *branch, const Window *window, PyObject *const *args, double started, const Reads *reads,
                       const Reads *guess, const Wanted *wanted, PyObject *staged) {
    if (reads->raised || guess->raised) return 0;
    if (!tell_in_flight(reads) || (guess->ring && !tell_in_flight(guess))) return 0;
    if (!lay_over(staged, window, wanted) || !book(window, reads, guess, started)) return 0;
    if (!window->watched && came_whole(reads) && came_whole(guess)) return 1;
    return tell_landed(branch, args, started, reads, guess);
}

/* Reads blocks and reports to the branch; 1, 0 if the Python path has to handle it, -1 on an exception. */
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

/* fetch(branch, layer, generation, block, slot, slots) -> whether it was done */
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
