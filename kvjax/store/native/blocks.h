/* Locations of the blocks that a layer's callback requests, and their staged rows (blocks.c). */
#pragma once
#include "arguments.h"
#include "reads.h"

typedef struct { /* a result of `FlashBranch._window` or `_guess_window` */
    PyObject *ring, *layout, *lock, *lanes, *extents, *shift, *pending, *fetched, *flight, *queue;
    long long batch, heads, num_blocks, block_rows, width, first_lane, descriptor;
    const char *format; /* of an element, in the buffer protocol */
    double timeout;
    int watched; /* whether events are recorded */
    PyObject *guess; /* for a fetch: speculative reads of the layer, or None */
} Window;

/* Returns 1, 0 if there is no window, -1 on an exception. */
int parse_window(PyObject *given, Window *to);

typedef struct {
    int32_t extent;
    int32_t target; /* flat slot */
} Found;

typedef struct { /* the requested blocks of a layer, and where they are; a lane is a stream */
    const int32_t *block, *slot; /* [lanes, asked]; `slot` is NULL if nothing is to be copied yet */
    int64_t asked, lanes, first_lane, num_blocks, slots, block_bytes, places;
    char *out; /* memory of the slots */
    const int32_t *rows; /* `StreamPool.rows`; `shift` is `Table.shift`, from an id to its place there */
    const int64_t *shift;
    Py_ssize_t rows_size, shift_size, pending_size, checksums_size;
    const uint8_t *pending;
    const uint64_t *checksums;
    Found *found; /* room for `places`, as in the four arrays after it */
    int32_t *extents;
    uint64_t *sums;
    int64_t *targets, *staged; /* flat slots of the blocks to read; flat id and slot of each staged one (staged.h) */
    int64_t count, marked;
} Wanted;

/* Sets what is requested and the memory involved: 1, 0 if the array has another type or shape, -1 on an exception. */
int take_wanted(Buffers *buffers, const Window *from, PyObject *block, const RingLayout **ring, Wanted *to);

/* The same for three arrays: blocks, their slots, and the memory of the slots. */
int take_slotted(Buffers *buffers, const Window *from, PyObject *const *arrays, const RingLayout **ring, Wanted *to);

/* Finds the blocks with the volume's lock held: 1, 0 if one lies beyond the table or the file, a slot does not exist,
 * or there are more blocks than the ring has places, -1 on an exception. If slots are given and some blocks are staged,
 * `staged` becomes a list of these (staged.h). */
int find_blocks(const Window *window, Wanted *to, PyObject **staged);

/* Names of the Python attributes that C uses. */
extern struct Names {
    PyObject *window, *guess_window, *give_back, *drop, *acquire, *release, *rows, *checksums, *in_flight, *complete, *mask,
        *address, *reads_in_c;
} names;

int intern_names(void);

/* Calls a method and preserves an exception that is set already; returns whether the call itself raised none. */
int call_aside(PyObject *object, PyObject *name, PyObject *argument, PyObject *another);
