/* Where blocks are that a layer's callback wants, and what of them is staged (blocks.c). */
#pragma once
#include "arguments.h"
#include "reads.h"

typedef struct { /* `FlashBranch._window`, and `_guess_window` */
    PyObject *ring, *layout, *lock, *lanes, *extents, *shift, *pending, *fetched, *flight, *queue;
    long long batch, heads, num_blocks, block_rows, width, first_lane, descriptor;
    const char *format; /* of an element, in Python's buffers */
    double timeout;
    int watched; /* whether events are recorded */
    PyObject *guess; /* of a fetch: reads of the layer that were begun before, or None */
} Window;

/* 1, 0 where there is no window, -1 on an exception. */
int parse_window(PyObject *given, Window *to);

typedef struct {
    int32_t extent;
    int32_t target; /* flat slot */
} Found;

typedef struct { /* a layer's blocks, and where they are */
    const int32_t *block, *slot; /* what is wanted: asked of each lane; no slots where nothing is to be copied yet */
    int64_t asked, lanes, first_lane, num_blocks, slots, block_bytes, places;
    char *out; /* the memory of these slots */
    const int32_t *rows; /* `LanePool.rows`, and `Table.shift` from an id to its place in them */
    const int64_t *shift;
    Py_ssize_t rows_size, shift_size, pending_size, checksums_size;
    const uint8_t *pending;
    const uint64_t *checksums;
    Found *found; /* room for `places`, as the four after it */
    int32_t *extents;
    uint64_t *sums;
    int64_t *targets, *staged; /* of these blocks: flat slots; of staged ones: flat ids and slots (staged.h) */
    int64_t count, marked;
} Wanted;

/* What is wanted of which memory, if the array is of the usual kind: 1, 0 where it is not, -1 on an exception. */
int take_wanted(Buffers *buffers, const Window *from, PyObject *block, const RingLayout **ring, Wanted *to);

/* The same of blocks, slots for them and the memory of these. */
int take_slotted(Buffers *buffers, const Window *from, PyObject *const *arrays, const RingLayout **ring, Wanted *to);

/* Finds the blocks with the volume's lock held: 1, 0 where one lies beyond the table or the file, a slot does not exist, or
 * there are more than the ring has places, -1 on an exception. If they have slots, and some are staged, there is a
 * list of that. */
int find_blocks(const Window *window, Wanted *to, PyObject **staged);

/* What Python calls the attributes that C uses. */
extern struct Names {
    PyObject *window, *guess_window, *give_back, *drop, *acquire, *release, *rows, *checksums, *in_flight, *complete, *mask,
        *address;
} names;

int intern_names(void);

/* A call while an exception may be on its way, which stays; whether it raised none itself. */
int call_aside(PyObject *object, PyObject *name, PyObject *argument, PyObject *another);
