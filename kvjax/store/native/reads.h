/* Asynchronous reads through a ring (reads.c), for what Python sees of them (native.c). */
#pragma once
#include "../../ffi.h"

#include <linux/aio_abi.h>

typedef uint64_t (*Hash)(const void *, size_t);

typedef struct { /* which memory and which part of the file reads are of */
    int64_t piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor;
} Reading;

/* Control blocks that read extents[n], neighbours in one; starts[reads] and the number of reads. */
Py_ssize_t fill_control(const int32_t *extents, const uint64_t *sums, Py_ssize_t n, const Reading *from,
                        struct iocb *control, int64_t *starts);

typedef struct { /* what is being read, and where to */
    int64_t reads, extents, slots, places, extent_bytes, block_bytes, page_bytes;
    const char *arena;
    int64_t map, map_bytes; /* the file in memory, where it is mapped: then nothing is read into the arena */
    Hash hash;
    const struct iocb *control;
    const int64_t *starts, *targets; /* `targets`: flat slots, -1 = nowhere */
    const uint64_t *sums;
    int64_t *results;
    uint8_t *done;
    char *out;
} Landing;

/* Notes the results of events, verifies the blocks of reads that came whole and copies them; how many. */
int64_t land_events(const Landing *to, const struct io_event *events, int64_t count);

typedef struct { /* memory and constants of a ring: `Ring.layout` */
    int64_t context, places, piece, extent_bytes, block_bytes, header_bytes, page_bytes;
    int64_t arena, hash, control, pointers, events, extents, sums, targets, starts, results, done, found, staged;
    int64_t depth;
    int64_t plain; /* whether its system calls are the kernel's, and not a method of Python's */
    int64_t map, map_bytes; /* of a ring that reads through a map of the file; else 0 */
} RingLayout;

typedef struct { /* reads of one ring on their way */
    const RingLayout *ring;
    PyObject *object; /* the Ring */
    Landing to;
    int64_t sent, in_flight, copied;
    double began, ended, waited; /* seconds on `now`'s clock */
    int tries, raised; /* `raised`: an exception of Python's is on its way */
} Reads;

double now(void);

/* Reads of `count` extents of the ring's own list, through no further memory than the ring's. */
Reads reads_of(PyObject *object, const RingLayout *ring, int64_t count);

/* Makes control blocks of the list, and hands over what there is room for. Python's lock is not held. */
void begin(Reads *reads, int64_t descriptor);

/* Waits for a quarter of those in flight at a time and lands them, until none is in flight or none came for `timeout`
 * seconds. What could not begin is tried a few times more, and nothing else that came back bad; what there was no room for
 * is handed over while others are in flight. Python's lock is not held. */
void finish(Reads *reads, double timeout);

typedef struct {
    int64_t reads, bytes; /* reads that were made, and bytes that came */
} Outcome;

Outcome outcome(const Reads *reads);

/* Blocks that have a place to go to. */
int64_t wanted_of(const Reads *reads);
