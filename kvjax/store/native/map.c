/* Reads through a map of the file. The kernel is told which pages will be wanted, and reads them meanwhile. Then they are
 * brought in, and copied by a system call: for a page that its file or device does not give, both return EFAULT, where to
 * touch it would end the process with SIGBUS; so does the second should the page go between the two.
 */
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

#define PATIENCE 20e-3  /* seconds without a page that was wanted: threads wait from then on, which may be given up */
#define AWAKE 50e-6     /* seconds of these that are not slept: about what a sleep takes at least */
#define NAP 20000       /* nanoseconds of a sleep */
#define LOOKED_AT 64    /* pages at a time */

static char *address_of(const Landing *to, const struct iocb *read) {
    return (char *)(intptr_t)to->map + read->aio_offset;
}

/* Whether the file's map reaches so far; it is made anew by Python where the file has grown. */
static int within(const Landing *to, const struct iocb *read) {
    return read->aio_offset >= 0 && read->aio_offset + (int64_t)read->aio_nbytes <= to->map_bytes;
}

long submit_mapped(const Reads *reads, int64_t count) {
    const Landing *to = &reads->to;
    for (const struct iocb *read = to->control + reads->sent; read < to->control + reads->sent + count; read++)
        if (within(to, read)) madvise(address_of(to, read), read->aio_nbytes, MADV_WILLNEED); /* a hint */
    return count;
}

/* Whether all pages have come; the kernel tells only who may write the file, as whoever reads through C may. */
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

/* Waits for pages; whether they have come. */
static int wait_for(const Landing *to, const struct iocb *read) {
    double began = now(), waited = 0;
    struct timespec nap = {0, NAP};
    madvise(address_of(to, read), read->aio_nbytes, MADV_WILLNEED); /* a guess may have come and gone */
    while (!has_come(to, read) && waited < PATIENCE) {
        if (waited < AWAKE) sched_yield();
        else nanosleep(&nap, NULL);
        waited = now() - began;
    }
    return waited < PATIENCE;
}

/* Bytes of a read whose pages are there now, or an error. */
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
