/* Reads through a map of the file (map.c), with the interface of a ring's reads (reads.c). */
#pragma once
#include "landing.h"

/* Tells the kernel to begin the next `count` reads. Returns how many were taken: all of them. */
long submit_mapped(const Reads *reads, int64_t count);

/* Brings in the pages of the next reads, `least` or more, in the order of their submission, and fills an event for
 * each: its bytes, an error, or -EAGAIN for a read that is left to threads. Returns how many. */
long await_mapped(const Reads *reads, int64_t least);

/* Copies `size` bytes of a block from the map; returns whether all were copied. */
int copy_mapped(const Landing *to, int64_t read, int64_t block, char *slot, int64_t size);
