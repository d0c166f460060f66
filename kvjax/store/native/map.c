/* Reads through a map of the file. The kernel is told which pages will be needed, and reads them in the background.
 * Then they are brought in by one system call and copied by another: both return EFAULT for a page that the file or the
 * device does not deliver, where touching it would end the process with SIGBUS. The second one does so, too, if the
 * page disappears between the two. */
#define _GNU_SOURCE
#include "map.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define PATIENCE 20e-3  /* seconds to wait for pages; after that, threads wait, and a timeout can end that */
#define AWAKE 50e-6     /* seconds of these to spin: about the shortest possible sleep */
#define NAP 20000       /* nanoseconds per sleep */
#define LOOKED_AT 64    /* pages per mincore call */

static char *address_of(const Landing *to, const struct iocb *read) {
    return (char *)(intptr_t)to->map + read->aio_offset;
}

/* Returns whether the map covers a read; Python makes a new map when the file has grown. */
static int within(const Landing *to, const struct iocb *read) {
    return read->aio_offset >= 0 && read->aio_offset + (int64_t)read->aio_nbytes <= to->map_bytes;
}

long submit_mapped(const Reads *reads, int64_t count) {
    const Landing *to = &reads->to;
    for (const struct iocb *read = to->control + reads->sent; read < to->control + reads->sent + count; read++)
        if (within(to, read)) madvise(address_of(to, read), read->aio_nbytes, MADV_WILLNEED); /* a hint */
    return count;
}

/* Returns whether all pages are in memory; the kernel reports this only to processes that may write the file, as those
 * that read through C may. */
static int has_come(const Landing *to, const struct iocb *read) {
    unsigned char here[LOOKED_AT];
    int64_t pages = (read->aio_nbytes + to->page_bytes - 1) / to->page_bytes;
    for (int64_t first = 0; first < pages; first += LOOKED_AT) {
        int64_t count = pages - first < LOOKED_AT ? pages - first : LOOKED_AT;
        if (mincore(address_of(to, read) + first * to->page_bytes, count * to->page_bytes, here)) return 0;
        for (int64_t i = 0; i < count; i++)
            if (!(here[i] & 1)) return 0;
    }
    return 1;
}

/* Waits for pages; returns whether they have arrived. */
static int wait_for(const Landing *to, const struct iocb *read) {
    double began = now(), waited = 0;
    struct timespec nap = {0, NAP};
    madvise(address_of(to, read), read->aio_nbytes, MADV_WILLNEED); /* pages of a guess may have been evicted */
    while (!has_come(to, read) && waited < PATIENCE) {
        if (waited < AWAKE) sched_yield();
        else nanosleep(&nap, NULL);
        waited = now() - began;
    }
    return waited < PATIENCE;
}

/* Brings in the pages of a read; returns its bytes or a negative errno. */
static int64_t bring_in(const Landing *to, const struct iocb *read, int *patient) {
    if (!within(to, read)) return -EFAULT;
    if (!has_come(to, read) && !(*patient && (*patient = wait_for(to, read)))) return -EAGAIN;
    if (madvise(address_of(to, read), read->aio_nbytes, MADV_POPULATE_READ)) return -errno;
    return read->aio_nbytes;
}

long await_mapped(const Reads *reads, int64_t least) {
    struct io_event *events = (struct io_event *)(intptr_t)reads->ring->events;
    int64_t first = reads->sent - reads->in_flight, i;
    int patient = 1;
    for (i = 0; i < (patient ? least : reads->in_flight); i++)
        events[i] = (struct io_event){
            .data = first + i, .res = bring_in(&reads->to, reads->to.control + first + i, &patient)};
    return i;
}

int copy_mapped(const Landing *to, int64_t read, int64_t block, char *slot, int64_t size) {
    char *from = address_of(to, to->control + read) + (block - to->starts[read]) * to->extent_bytes;
    struct iovec ours = {slot, size}, mapped = {from, size};
    return process_vm_readv(getpid(), &ours, 1, &mapped, 1, 0) == size;
}
