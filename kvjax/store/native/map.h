/* Reads through a map of the file (map.c), as a ring makes them (reads.c). */
#pragma once
#include "reads.h"

/* Tells the kernel that `count` more reads will be wanted: it begins them. Returns how many were taken, all of them. */
long submit_mapped(const Reads *reads, int64_t count);

/* Brings in the pages of the next reads, in the order of their submission, `least` or more, and fills an event for each:
 * its bytes, an error for what cannot be had, or -EAGAIN for what others may wait for. How many. */
long await_mapped(const Reads *reads, int64_t least);

/* Copies `size` bytes of a block from the map; whether all of them could be had. */
int copy_mapped(const Landing *to, int64_t read, int64_t block, char *slot, int64_t size);
