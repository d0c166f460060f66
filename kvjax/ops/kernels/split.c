/* Split of the points of each head in two: `kvjax.ops.kmeans.two_means`. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

typedef struct {
    const float *points;  /* [heads, count, size] */
    const uint8_t *valid; /* [heads, count] */
    uint8_t *first;       /* [heads, count] */
    int64_t count, size, largest;
    int iterations;
    atomic_int *failed; /* whether there was no memory */
} Points;

/* Valid points of a head, and vectors [size] computed from them. */
typedef struct {
    const float **point;
    float *margin;                          /* [total] negative on the side of the first centre */
    float *whole, *part, *one, *other, *middle, *across;
    int64_t total, size;
} Halves;

/* Returns the sum over dimensions of (a - b) * c, or of (a - b)^2 without c. */
INLINED float product(const float *a, const float *b, const float *c, int64_t size) {
    Lanes sums = {0};
    float sum = 0;
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) {
        Lanes apart = *(const Lanes *)(a + at) - *(const Lanes *)(b + at);
        sums += apart * (c ? *(const Lanes *)(c + at) : apart);
    }
    for (int i = 0; i < LANES; i++) sum += sums[i];
    for (; at < size; at++) sum += (a[at] - b[at]) * (c ? c[at] : a[at] - b[at]);
    return sum;
}

INLINED void add(float *sum, const float *point, int64_t size) {
    for (int64_t i = 0; i < size; i++) sum[i] += point[i];
}

/* Returns the point farthest from `origin`, the first of equals. */
INLINED const float *farthest(const Halves *in, const float *origin) {
    const float *found = in->point[0];
    float most = -1;
    for (int64_t i = 0; i < in->total; i++) {
        float distance = product(in->point[i], origin, NULL, in->size);
        if (distance > most) most = distance, found = in->point[i];
    }
    return found;
}

/* Computes half the difference of each point's squared distances to the two centres. */
INLINED void find_margins(Halves *in) {
    for (int64_t i = 0; i < in->size; i++) {
        in->middle[i] = (in->one[i] + in->other[i]) / 2;
        in->across[i] = in->other[i] - in->one[i];
    }
    for (int64_t i = 0; i < in->total; i++) in->margin[i] = product(in->point[i], in->middle, in->across, in->size);
}

/* Moves the two centres to the means of the points on their sides: a step of Lloyd's algorithm. */
INLINED void move_centres(Halves *in) {
    int64_t near = 0;
    memset(in->part, 0, in->size * sizeof *in->part);
    for (int64_t i = 0; i < in->total; i++)
        if (in->margin[i] < 0) add(in->part, in->point[i], in->size), near++;
    for (int64_t i = 0; i < in->size; i++) {
        if (near) in->one[i] = in->part[i] / near;
        if (near < in->total) in->other[i] = (in->whole[i] - in->part[i]) / (in->total - near);
    }
}

/* Returns the rank of a point by its margin, equal ones in order. */
INLINED int64_t rank_of(const Halves *in, int64_t one) {
    int64_t rank = 0;
    for (int64_t i = 0; i < in->total; i++)
        rank += in->margin[i] < in->margin[one] || (in->margin[i] == in->margin[one] && i < one);
    return rank;
}

/* Returns the size of the first half: the points on its side, and more or fewer where the sizes demand it. */
INLINED int64_t first_size(const Halves *in, int64_t largest) {
    int64_t size = 0, least = in->total - largest > 1 ? in->total - largest : 1;
    int64_t most = in->total - 1 < largest ? in->total - 1 : largest;
    for (int64_t i = 0; i < in->total; i++) size += in->margin[i] < 0;
    size = size < least ? least : size;
    return size > most ? most : size;
}

INLINED void find_centres(Halves *in, int iterations) {
    memset(in->whole, 0, in->size * sizeof *in->whole);
    for (int64_t i = 0; i < in->total; i++) add(in->whole, in->point[i], in->size);
    for (int64_t i = 0; i < in->size; i++) in->middle[i] = in->whole[i] / in->total;
    memcpy(in->one, farthest(in, in->middle), in->size * sizeof *in->one);
    memcpy(in->other, farthest(in, in->one), in->size * sizeof *in->other);
    for (int i = 0; i < iterations; i++) {
        find_margins(in);
        move_centres(in);
    }
    find_margins(in);
}

FOR_EACH_PROCESSOR static void split(const void *job, int64_t head) {
    const Points *from = job;
    const uint8_t *valid = from->valid + head * from->count;
    uint8_t *first = from->first + head * from->count;
    int64_t pointers = from->count * sizeof(float *) / sizeof(float); /* in units of floats */
    float *room = room_for(pointers + from->count + 6 * from->size);
    if (!room) {
        atomic_store(from->failed, 1);
        return;
    }
    Halves in = {.point = (const float **)room, .size = from->size};
    float **vectors[] = {&in.margin, &in.whole, &in.part, &in.one, &in.other, &in.middle, &in.across};
    room += pointers;
    for (int i = 0; i < 7; i++) {
        *vectors[i] = room;
        room += i ? from->size : from->count;
    }
    for (int64_t i = 0; i < from->count; i++)
        if (valid[i]) in.point[in.total++] = from->points + (head * from->count + i) * from->size;
    memset(first, 0, from->count);
    if (in.total < 2) return;
    find_centres(&in, from->iterations);
    int64_t size = first_size(&in, from->largest);
    for (int64_t i = 0, nth = 0; i < from->count; i++)
        if (valid[i]) first[i] = rank_of(&in, nth++) < size;
}

/* Handles points [F, N, D], valid [F, N], the largest half [F] and the iterations [F], both the same for all heads; the
 * result is the first half [F, N]. */
XLA_FFI_Error *on_split(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 4 || call->rets.size != 1) return refused(call, "split: 4 operands and a result");
    const XLA_FFI_Buffer *points = operand(call, 0), *valid = operand(call, 1), *largest = operand(call, 2);
    const XLA_FFI_Buffer *iterations = operand(call, 3), *first = result(call, 0);
    int64_t rank = points->rank;
    if (rank < 2 || !is_of(points, XLA_FFI_DataType_F32, rank) || !is_of(valid, XLA_FFI_DataType_PRED, rank - 1) ||
        !is_of(largest, XLA_FFI_DataType_S32, rank - 2) || !is_of(iterations, XLA_FFI_DataType_S32, rank - 2) ||
        !is_of(first, XLA_FFI_DataType_PRED, rank - 1))
        return refused(call, "split: types or ranks");
    int64_t heads = leading(points, 2), count = last(points, 2);
    if (leading(valid, 1) != heads || last(valid, 1) != count || leading(first, 1) != heads || last(first, 1) != count ||
        leading(largest, 0) != heads || leading(iterations, 0) != heads)
        return refused(call, "split: sizes do not agree");
    if (!heads) return NULL;
    atomic_int failed = 0;
    Points in = {points->data, valid->data, first->data, count, last(points, 1), *(const int32_t *)largest->data,
                 *(const int32_t *)iterations->data, &failed};
    in_pieces(call, split, &in, heads, heads * count * in.size);
    return atomic_load(&failed) ? refused(call, "split: there is no memory") : NULL;
}
