/* Blocks that are being read and where they go, for reads through a ring (reads.c) and through a map (map.c). */
#pragma once
#include "../../ffi.h"

#include <linux/aio_abi.h>
#include <time.h>

typedef uint64_t (*Hash)(const void *, size_t);

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

/* Returns the seconds of a clock that nobody sets. */
static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}
