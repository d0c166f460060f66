/* Resolves the blocks that a program's callback requests to the extents that hold them. */
#include "blocks.h"
#include "staged.h"

#include <string.h>

struct Names names;

int intern_names(void) {
    static const struct {
        PyObject **name;
        const char *text;
    } all[] = {{&names.window, "_window"}, {&names.guess_window, "_guess_window"}, {&names.give_back, "_give_back"},
               {&names.drop, "drop"}, {&names.acquire, "acquire"}, {&names.release, "release"}, {&names.rows, "rows"},
               {&names.checksums, "checksums"}, {&names.in_flight, "in_flight"}, {&names.complete, "complete"},
               {&names.mask, "mask"}, {&names.address, "address"},
               {&names.reads_in_c, "reads_in_c"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!*all[i].name && !(*all[i].name = PyUnicode_InternFromString(all[i].text))) return 0;
    return 1;
}

int call_aside(PyObject *object, PyObject *name, PyObject *argument, PyObject *another) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *answer = PyObject_CallMethodObjArgs(object, name, argument, another, NULL);
    int done = answer != NULL;
    Py_XDECREF(answer);
    if (kind) PyErr_Restore(kind, value, trace);
    return done;
}

int parse_window(PyObject *given, Window *to) {
    if (!given) return -1;
    if (given == Py_None) return 0;
    long long layer;
    if (!PyArg_ParseTuple(given, "OO(OOOOOOO!O!LLLLLsd)LLpO", &to->ring, &to->layout, &to->lock, &to->lanes, &to->extents,
                          &to->shift, &to->pending, &to->fetched, &PyDict_Type, &to->flight, &PyDict_Type, &to->queue,
                          &to->batch, &to->heads, &to->num_blocks, &to->block_rows, &to->width, &to->format, &to->timeout,
                          &layer, &to->descriptor, &to->watched, &to->guess))
        return -1;
    to->first_lane = layer * to->batch * to->heads;
    return 1;
}

/* ---- requested blocks */

/* Sets everything but the caller's arrays: 1, or -1 on an exception. */
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
    to->places = (*ring)->places;
    return 1;
}

/* Returns an int32 array [batch, heads, asked]; NULL for another type or shape. */
static const int32_t *take_index(Buffers *buffers, const Window *from, PyObject *array, int64_t *asked) {
    const long long shape[] = {from->batch, from->heads, -1};
    const Py_buffer *view = &buffers->views[buffers->count];
    const int32_t *index = take_shaped(buffers, array, sizeof *index, 0, "i", 3, shape);
    if (index) *asked = view->shape[2];
    return index;
}

/* Returns the memory of the slots; NULL for another type or shape. */
static char *take_slots(Buffers *buffers, const Window *from, PyObject *array, size_t item, int64_t *slots) {
    const long long shape[] = {from->batch, from->heads, -1, from->block_rows, from->width};
    const Py_buffer *view = &buffers->views[buffers->count];
    char *rows = take_shaped(buffers, array, item, PyBUF_WRITABLE, from->format, 5, shape);
    if (rows) *slots = view->shape[2];
    return rows;
}

int take_wanted(Buffers *buffers, const Window *from, PyObject *block, const RingLayout **ring, Wanted *to) {
    if (take_layer(buffers, from, ring, to) < 0) return -1;
    to->block = take_index(buffers, from, block, &to->asked);
    return to->block != NULL;
}

int take_slotted(Buffers *buffers, const Window *from, PyObject *const *arrays, const RingLayout **ring, Wanted *to) {
    int64_t asked;
    int found = take_wanted(buffers, from, arrays[0], ring, to);
    if (found != 1) return found;
    to->slot = take_index(buffers, from, arrays[1], &asked);
    if (!to->slot || asked != to->asked) return 0;
    to->out = take_slots(buffers, from, arrays[2], to->block_bytes / (from->block_rows * from->width), &to->slots);
    return to->out != NULL;
}

/* ---- their extents */

#define WHOLE 2 /* in `pending`: the whole block is staged, so that it is not read */

static int by_extent(const void *a, const void *b) {
    int32_t left = ((const Found *)a)->extent, right = ((const Found *)b)->extent;
    return (left > right) - (left < right);
}

/* Fills extents (ascending), sums and targets of the blocks to read, lists staged blocks, and writes zeros to the slots
 * of blocks that were never written; returns 0 if a block lies beyond the table or the file, a slot does not exist, or
 * there are too many. */
static int resolve(Wanted *in) {
    in->count = in->marked = 0;
    if (in->first_lane < 0 || in->first_lane + in->lanes > in->shift_size ||
        (in->first_lane + in->lanes) * in->num_blocks > in->pending_size)
        return 0;
    for (int64_t i = 0; i < in->lanes * in->asked; i++) {
        int32_t block = in->block[i], slot = in->slot ? in->slot[i] : 0;
        if (block < 0 || block >= in->num_blocks) continue;
        int64_t lane = in->first_lane + i / in->asked, id = lane * in->num_blocks + block, at = id + in->shift[lane];
        if (at < 0 || at >= in->rows_size || in->rows[at] >= in->checksums_size || slot < 0 || slot >= in->slots ||
            in->count == in->places || in->marked == in->places)
            return 0;
        int64_t target = in->slot ? i / in->asked * in->slots + slot : -1;
        int needed = in->pending[id] != WHOLE; /* something of it is needed from the file */
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

int find_blocks(const Window *window, Wanted *to, PyObject **staged) {
    Buffers buffers = {.count = 0};
    PyObject *locked = PyObject_CallMethodNoArgs(window->lock, names.acquire);
    if (!locked) return -1;
    Py_DECREF(locked);
    int found = -1;
    PyObject *rows = PyObject_GetAttr(window->lanes, names.rows);
    PyObject *checksums = rows ? PyObject_GetAttr(window->extents, names.checksums) : NULL;
    if (checksums && (to->rows = take(&buffers, rows, sizeof *to->rows, PyBUF_SIMPLE, &to->rows_size)) &&
        (to->checksums = take(&buffers, checksums, sizeof *to->checksums, PyBUF_SIMPLE, &to->checksums_size)))
        found = resolve(to);
    if (found == 1 && to->marked && to->slot && !(*staged = list_staged(window, to))) found = -1;
    release(&buffers);
    Py_XDECREF(rows);
    Py_XDECREF(checksums);
    call_aside(window->lock, names.release, NULL, NULL);
    return found;
}
