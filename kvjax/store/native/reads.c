/* Reads a list of extents and copies their blocks to the caller's memory. No Python object is touched, except for
 * system calls implemented in Python, as those of emulated devices. */
#include "reads.h"
#include "map.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGES 0xffff /* the bits of a checksum that are not part of the hash: pages of a raw block, 0 for all */
#define NO_ANSWER INT64_MIN
#define NOWAIT 8 /* RWF_NOWAIT: a read that would block its submission fails with EAGAIN instead */
#define MOST_TRIES 3

/* Returns the bytes of the pages that a block takes; `whole` if it takes all, or claims more. */
static int64_t size_of(uint64_t sum, int64_t page_bytes, int64_t whole) {
    int64_t size = (int64_t)(sum & PAGES) * page_bytes;
    return size && size < whole ? size : whole;
}

Py_ssize_t fill_control(const int32_t *extents, const uint64_t *sums, Py_ssize_t n, const Reading *from,
                        struct iocb *control, int64_t *starts) {
    Py_ssize_t reads = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t size = size_of(sums[i], from->page_bytes, from->extent_bytes);
        if (i % from->piece && extents[i] == extents[i - 1] + 1) {
            control[reads - 1].aio_nbytes = (i - starts[reads - 1]) * from->extent_bytes + size;
            continue;
        }
        starts[reads] = i;
        control[reads] = (struct iocb){
            .aio_data = reads, .aio_rw_flags = NOWAIT, .aio_lio_opcode = IOCB_CMD_PREAD,
            .aio_fildes = from->descriptor, .aio_buf = from->arena + i % from->places * from->extent_bytes,
            .aio_nbytes = size, .aio_offset = from->header_bytes + extents[i] * from->extent_bytes};
        reads++;
    }
    return reads;
}

/* ---- landing */

/* Verifies and copies a block of a read; returns whether it was requested and intact. Blocks of a map are verified
 * after copying, as the map may change: those that do not match are read again, or raise an error. */
static int land_block(const Landing *to, int64_t read, int64_t i) {
    const char *payload = to->arena + i % to->places * to->extent_bytes;
    int64_t size = size_of(to->sums[i], to->page_bytes, to->block_bytes);
    uint64_t pages = size < to->block_bytes ? size / to->page_bytes : 0;
    if (to->done[i] || to->targets[i] < 0 || to->targets[i] >= to->slots) return 0;
    char *slot = to->out + to->targets[i] * to->block_bytes;
    if (to->map) {
        if (!copy_mapped(to, read, i, slot, size)) return 0;
        payload = slot;
    }
    if (((to->hash(payload, size) & ~(uint64_t)PAGES) | pages) != to->sums[i]) return 0;
    if (payload != slot) memcpy(slot, payload, size);
    memset(slot + size, 0, to->block_bytes - size);
    to->done[i] = 1;
    return 1;
}

/* Returns the end of a read's extents, which begin at `starts[read]`. */
static int64_t stop_of(const Landing *to, int64_t read) { return read + 1 < to->reads ? to->starts[read + 1] : to->extents; }

int64_t land_events(const Landing *to, const struct io_event *events, int64_t count) {
    int64_t copied = 0;
    for (const struct io_event *event = events; event < events + count; event++) {
        uint64_t read = event->data;
        if (read >= (uint64_t)to->reads) continue;
        to->results[read] = event->res;
        if (event->res != (int64_t)to->control[read].aio_nbytes) continue;
        for (int64_t i = to->starts[read]; i < stop_of(to, read); i++) copied += land_block(to, read, i);
    }
    return copied;
}

/* ---- system calls */

/* Returns the result of a method of the ring; -1 if it raised. An OSError is cleared, as it stands for a refusal by the
 * kernel. */
static long number_of(Reads *reads, PyObject *answer) {
    long number = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    if (PyErr_Occurred()) {
        number = -1;
        if (PyErr_ExceptionMatches(PyExc_OSError)) PyErr_Clear();
        else reads->raised = 1;
    }
    return number;
}

/* Submits the next `count` reads; returns how many were taken, 0 or less if none. */
static long submit(Reads *reads, int64_t count) {
    if (reads->ring->map) return submit_mapped(reads, count);
    struct iocb **pointers = (struct iocb **)(intptr_t)reads->ring->pointers;
    if (reads->ring->plain) return syscall(SYS_io_submit, reads->ring->context, count, pointers + reads->sent);
    PyGILState_STATE state = PyGILState_Ensure();
    long taken = number_of(reads, PyObject_CallMethod(reads->object, "submit", "LL", (long long)reads->sent,
                                                      (long long)(reads->sent + count)));
    PyGILState_Release(state);
    return taken;
}

/* Waits for events; returns how many arrived, `least` or more, or 0 or less if the time is up. */
static long await(Reads *reads, int64_t least, double timeout) {
    if (reads->ring->map) return await_mapped(reads, least);
    struct io_event *events = (struct io_event *)(intptr_t)reads->ring->events;
    if (!reads->ring->plain) {
        PyGILState_STATE state = PyGILState_Ensure();
        long came = number_of(reads, PyObject_CallMethod(reads->object, "wait", "Ld", (long long)least, timeout));
        PyGILState_Release(state);
        return came;
    }
    double until = now() + timeout, patience = timeout;
    long came;
    do {
        struct timespec time = {(time_t)patience, (long)(1e9 * (patience - (time_t)patience))};
        came = syscall(SYS_io_getevents, reads->ring->context, least, reads->ring->places, events, &time);
        patience = until - now();
    } while (came < 0 && errno == EINTR && patience > 0);
    return came;
}

/* Submits reads again that could not begin without blocking; returns how many the kernel took. A write to the file
 * locks it for some microseconds, which are over when everything else has landed. */
static int64_t ask_again(const Reads *reads) {
    struct iocb *again[64], **pointers = (struct iocb **)(intptr_t)reads->ring->pointers;
    long count = 0;
    if (!reads->ring->plain || reads->ring->map) return 0; /* threads read the blocks that are missing */
    for (int64_t i = 0; i < reads->to.reads && count < 64; i++)
        if (reads->to.results[i] == -EAGAIN) again[count++] = pointers[i];
    long taken = count ? syscall(SYS_io_submit, reads->ring->context, count, again) : 0;
    return taken > 0 ? taken : 0;
}

/* ---- reading */

Reads reads_of(PyObject *object, const RingLayout *ring, int64_t count) {
    return (Reads){
        .ring = ring, .object = object,
        .to = {.extents = count, .places = ring->places, .extent_bytes = ring->extent_bytes,
               .block_bytes = ring->block_bytes, .page_bytes = ring->page_bytes,
               .arena = (const char *)(intptr_t)ring->arena, .map = ring->map, .map_bytes = ring->map_bytes,
               .hash = (Hash)(intptr_t)ring->hash,
               .control = (struct iocb *)(intptr_t)ring->control, .starts = (int64_t *)(intptr_t)ring->starts,
               .targets = (int64_t *)(intptr_t)ring->targets, .sums = (uint64_t *)(intptr_t)ring->sums,
               .results = (int64_t *)(intptr_t)ring->results, .done = (uint8_t *)(intptr_t)ring->done}};
}

/* Submits as many reads as there is room for. */
static void send(Reads *reads) {
    int64_t room = reads->ring->depth - reads->in_flight, left = reads->to.reads - reads->sent;
    int64_t next = left < room ? left : room;
    long taken = next > 0 ? submit(reads, next) : 0;
    if (taken > 0) {
        reads->sent += taken;
        reads->in_flight += taken;
    }
}

void begin(Reads *reads, int64_t descriptor) {
    const RingLayout *ring = reads->ring;
    Reading from = {ring->piece, ring->places, ring->arena, ring->extent_bytes, ring->page_bytes, ring->header_bytes,
                    descriptor};
    memset(reads->to.done, 0, reads->to.extents);
    reads->to.reads = fill_control((int32_t *)(intptr_t)ring->extents, reads->to.sums, reads->to.extents, &from,
                                   (struct iocb *)(intptr_t)ring->control, (int64_t *)(intptr_t)ring->starts);
    for (int64_t i = 0; i < reads->to.reads; i++) reads->to.results[i] = NO_ANSWER;
    reads->began = reads->ended = now();
    send(reads);
}

void finish(Reads *reads, double timeout) {
    for (;;) {
        int idle = !reads->in_flight && reads->sent == reads->to.reads;
        if (idle && reads->tries++ < MOST_TRIES) reads->in_flight = ask_again(reads);
        if (!reads->in_flight || reads->raised) return;
        double asked = now();
        long came = await(reads, (reads->in_flight + 3) / 4, timeout);
        reads->ended = now();
        reads->waited += reads->ended - asked;
        if (came <= 0) return;
        reads->in_flight -= came;
        reads->copied += land_events(&reads->to, (struct io_event *)(intptr_t)reads->ring->events, came);
        send(reads);
    }
}

Outcome outcome(const Reads *reads) {
    const Landing *to = &reads->to;
    Outcome came = {0};
    for (int64_t i = 0; i < to->reads; i++) {
        came.reads += i < reads->sent && to->results[i] != -EAGAIN;
        if (to->results[i] == (int64_t)to->control[i].aio_nbytes) came.bytes += to->results[i];
    }
    return came;
}

int64_t wanted_of(const Reads *reads) {
    int64_t wanted = 0;
    for (int64_t i = 0; i < reads->to.extents; i++) wanted += reads->to.targets[i] >= 0;
    return wanted;
}
