/* Asynchronous reads through a ring (reads.c), for the functions that Python calls (native.c, fetch.c). */
#pragma once
#include "../../ffi.h"

#include <linux/aio_abi.h>

typedef uint64_t (*Hash)(const void *, size_t);

typedef struct { /* memory to read into, and layout of the file */
    int64_t piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor;
} Reading;

/* Fills control blocks that read extents[n], neighbours in one read, and starts[reads]; returns the number of reads. */
Py_ssize_t fill_control(const int32_t *extents, const uint64_t *sums, Py_ssize_t n, const Reading *from,
                        struct iocb *control, int64_t *starts);

typedef struct { /* the blocks being read, and their destinations */
    int64_t reads, extents, slots, places, extent_bytes, block_bytes, page_bytes;
    const char *arena;
    int64_t map, map_bytes; /* the map of the file, if there is one: then nothing is read into the arena */
    Hash hash;
    const struct iocb *control;
    const int64_t *starts, *targets; /* `targets`: flat slots, -1 = none */
    const uint64_t *sums;
    int64_t *results;
    uint8_t *done;
    char *out;
} Landing;

/* Records the results of events, and verifies and copies the blocks of complete reads; returns how many were copied. */
int64_t land_events(const Landing *to, const struct io_event *events, int64_t count);

typedef struct { /* memory and constants of a ring: `Ring.layout` */
    int64_t context, places, piece, extent_bytes, block_bytes, header_bytes, page_bytes;
    int64_t arena, hash, control, pointers, events, extents, sums, targets, starts, results, done, found, staged;
    int64_t depth;
    int64_t plain; /* whether it makes the kernel's system calls directly, not through Python methods */
    int64_t map, map_bytes; /* the map of the file if the ring reads through one, otherwise 0 */
} RingLayout;

typedef struct { /* reads of one ring in flight */
    const RingLayout *ring;
    PyObject *object; /* the Ring */
    Landing to;
    int64_t sent, in_flight, copied;
    double began, ended, waited; /* seconds on `now`'s clock */
    int tries, raised; /* `raised`: a Python exception is set */
} Reads;

double now(void);

/* Returns reads of the first `count` extents in the ring's own list; they use no memory but the ring's. */
Reads reads_of(PyObject *object, const RingLayout *ring, int64_t count);

/* Makes control blocks of the list, and submits as many reads as there is room for. The GIL is not held. */
void begin(Reads *reads, int64_t descriptor);

/* Waits for a quarter of the reads in flight at a time and lands them, until none is in flight or none arrived for
 * `timeout` seconds. Reads that could not begin are tried a few times more; other failed reads are not. Reads that
 * there was no room for are submitted while others are in flight. The GIL is not held. */
void finish(Reads *reads, double timeout);

typedef struct {
    int64_t reads, bytes; /* reads made, and bytes that arrived */
} Outcome;

Outcome outcome(const Reads *reads);

/* Returns how many blocks have a target. */
int64_t wanted_of(const Reads *reads);
