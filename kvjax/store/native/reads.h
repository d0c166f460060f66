/* Asynchronous reads through a ring (reads.c), for the functions that Python calls (native.c, fetch.c). */
#pragma once
#include "landing.h"

typedef struct { /* memory to read into, and layout of the file */
    int64_t piece, places, arena, extent_bytes, page_bytes, header_bytes, descriptor;
} Reading;

/* Fills control blocks that read extents[n], neighbours in one read, and starts[reads]; returns the number of reads. */
Py_ssize_t fill_control(const int32_t *extents, const uint64_t *sums, Py_ssize_t n, const Reading *from,
                        struct iocb *control, int64_t *starts);

/* Records the results of events, and verifies and copies the blocks of complete reads; returns how many were copied. */
int64_t land_events(const Landing *to, const struct io_event *events, int64_t count);

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
