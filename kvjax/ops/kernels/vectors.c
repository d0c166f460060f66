/* Products of a few queries with many vectors stored dimension by dimension, and the mean softmax of such scores. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

#define DIMENSIONS 4 /* dimensions processed together */
#define QUERIES 5    /* queries that use them while they are in registers: those of a group, and a key */
#define SEGMENT 4096 /* vectors whose products stay in a near cache across all dimensions */
#define SHORTEST 1024 /* vectors of a segment at least: memory is slower in shorter runs */
#define PIECES 8     /* pieces for threads to share, unless segments become too short */

typedef struct {
    const float *vectors, *q; /* [heads, size, count], [heads, queries, size] */
    float *out;               /* [heads, queries, count] */
    int64_t heads, size, count, queries, width, segments; /* width: vectors of a segment */
} Vectors;

/* Adds the products of some dimensions with some queries; with `ask`, prefetches the dimensions that follow. */
INLINED void add_dimensions(const float *rows, const float *q, float *out, int64_t width, const Vectors *in, int dimensions,
                            int queries, int ask) {
    int64_t at = 0, count = in->count;
    Lanes times[DIMENSIONS][QUERIES];
    for (int i = 0; i < dimensions; i++)
        for (int j = 0; j < queries; j++) times[i][j] = (Lanes){0} + q[j * in->size + i];
    for (; at + LANES <= width; at += LANES) {
        Lanes sums[QUERIES];
        for (int j = 0; j < queries; j++) sums[j] = *(Lanes *)(out + j * count + at);
        for (int i = 0; i < dimensions; i++) {
            Lanes numbers = *(const Lanes *)(rows + i * count + at);
            for (int j = 0; j < queries; j++) sums[j] += numbers * times[i][j];
        }
        for (int i = 0; ask && at % (2 * LANES) == 0 && i < dimensions; i++)
            __builtin_prefetch(rows + (dimensions + i) * count + at, 0, 2);
        for (int j = 0; j < queries; j++) *(Lanes *)(out + j * count + at) = sums[j];
    }
    for (; at < width; at++)
        for (int i = 0; i < dimensions; i++)
            for (int j = 0; j < queries; j++) out[j * count + at] += rows[i * count + at] * q[j * in->size + i];
}

/* Adds the products of some dimensions with all queries, QUERIES at a time. */
INLINED void add_to_all(const float *rows, const float *q, float *out, int64_t width, const Vectors *in, int dimensions, int more) {
    for (int64_t j = 0; j < in->queries; j += QUERIES, q += QUERIES * in->size, out += QUERIES * in->count) {
        int ask = more && !j;
        switch (in->queries - j) {
        case 1: add_dimensions(rows, q, out, width, in, dimensions, 1, ask); break;
        case 2: add_dimensions(rows, q, out, width, in, dimensions, 2, ask); break;
        case 3: add_dimensions(rows, q, out, width, in, dimensions, 3, ask); break;
        case 4: add_dimensions(rows, q, out, width, in, dimensions, 4, ask); break;
        default: add_dimensions(rows, q, out, width, in, dimensions, QUERIES, ask);
        }
    }
}

INLINED int64_t segments_of(const Vectors *in) { return (in->count + in->width - 1) / in->width; }

FOR_EACH_PROCESSOR static void segment_products(const void *job, int64_t piece) {
    const Vectors *in = job;
    int64_t head = piece / in->segments, start = piece % in->segments * in->width, i = 0;
    int64_t width = in->count - start < in->width ? in->count - start : in->width;
    const float *rows = in->vectors + head * in->size * in->count + start, *q = in->q + head * in->queries * in->size;
    float *out = in->out + head * in->queries * in->count + start;
    for (int64_t j = 0; j < in->queries; j++) memset(out + j * in->count, 0, width * sizeof *out);
    for (; i + DIMENSIONS <= in->size; i += DIMENSIONS)
        add_to_all(rows + i * in->count, q + i, out, width, in, DIMENSIONS, i + 2 * DIMENSIONS <= in->size);
    for (; i < in->size; i++) add_to_all(rows + i * in->count, q + i, out, width, in, 1, 0);
}

/* ---- the mean of softmaxes */

typedef struct {
    const float *scores; /* [heads, queries, count] */
    float *mean;         /* [heads, count] */
    int64_t queries, count;
    atomic_int *failed; /* whether there was no memory */
} Means;

INLINED float highest_of(const float *scores, int64_t count) {
    Lanes most = (Lanes){0} - INFINITY;
    float highest = -INFINITY;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) most = larger(most, *(const Lanes *)(scores + at));
    for (int i = 0; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    for (; at < count; at++) highest = scores[at] > highest ? scores[at] : highest;
    return highest;
}

/* Computes the exponentials of scores minus the highest; returns their sum. */
INLINED float exponentiate(const float *scores, int64_t count, float highest, float *weights) {
    Lanes sums = {0};
    float sum = 0;
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        sums += *(Lanes *)(weights + at) = exponentials(*(const Lanes *)(scores + at) - highest);
    for (int i = 0; i < LANES; i++) sum += sums[i];
    for (; at < count; at++) sum += weights[at] = exponentials((Lanes){0} + (scores[at] - highest))[0];
    return sum;
}

FOR_EACH_PROCESSOR static void mean_of_softmaxes(const void *job, int64_t head) {
    const Means *in = job;
    int64_t count = in->count;
    float *mean = in->mean + head * count, *weights = room_for(count);
    if (!weights) {
        atomic_store(in->failed, 1);
        return;
    }
    memset(mean, 0, count * sizeof *mean);
    for (int64_t query = 0; query < in->queries; query++) {
        const float *scores = in->scores + (head * in->queries + query) * count;
        float share = 1 / (exponentiate(scores, count, highest_of(scores, count), weights) * in->queries);
        for (int64_t at = 0; at < count; at++) mean[at] += weights[at] * share;
    }
}

/* ---- one vector of each head */

/* Copies a vector. Its numbers are far apart in memory: all are prefetched before the first is used. */
static void take_vector(const float *vectors, int64_t size, int64_t count, int64_t at, float *out) {
    for (int64_t i = 0; i < size; i++) __builtin_prefetch(vectors + i * count + at, 0, 3);
    for (int64_t i = 0; i < size; i++) out[i] = vectors[i * count + at];
}

/* ---- the interface */

/* Handles vectors [F, D, N] and q [F, Q, D]; the result is [F, Q, N]. */
XLA_FFI_Error *on_vectors(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 2 || call->rets.size != 1) return refused(call, "vectors: 2 operands and a result");
    const XLA_FFI_Buffer *vectors = operand(call, 0), *q = operand(call, 1), *out = result(call, 0);
    int64_t rank = vectors->rank;
    if (rank < 3 || !is_of(vectors, XLA_FFI_DataType_F32, rank) || !is_of(q, XLA_FFI_DataType_F32, rank) ||
        !is_of(out, XLA_FFI_DataType_F32, rank))
        return refused(call, "vectors: types or ranks");
    Vectors in = {vectors->data, q->data, out->data, leading(vectors, 2), last(vectors, 2), last(vectors, 1), last(q, 2), SEGMENT, 0};
    while (in.width > SHORTEST && in.heads * segments_of(&in) < PIECES) in.width /= 2;
    in.segments = segments_of(&in);
    if (leading(q, 2) != in.heads || last(q, 1) != in.size || leading(out, 2) != in.heads || last(out, 2) != in.queries ||
        last(out, 1) != in.count)
        return refused(call, "vectors: sizes do not agree");
    in_pieces(call, segment_products, &in, in.heads * in.segments, in.heads * in.size * in.count);
    return NULL;
}

/* Handles scores [F, G, N]; the result is the mean [F, N] of the softmaxes of each head's queries. */
XLA_FFI_Error *on_softmax_mean(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 1 || call->rets.size != 1) return refused(call, "softmax mean: an operand and a result");
    const XLA_FFI_Buffer *scores = operand(call, 0), *mean = result(call, 0);
    int64_t rank = scores->rank;
    if (rank < 3 || !is_of(scores, XLA_FFI_DataType_F32, rank) || !is_of(mean, XLA_FFI_DataType_F32, rank - 1))
        return refused(call, "softmax mean: types or ranks");
    int64_t heads = leading(scores, 2);
    atomic_int failed = 0;
    Means in = {scores->data, mean->data, last(scores, 2), last(scores, 1), &failed};
    if (leading(mean, 1) != heads || last(mean, 1) != in.count)
        return refused(call, "softmax mean: sizes do not agree");
    in_pieces(call, mean_of_softmaxes, &in, heads, 4 * heads * in.queries * in.count);
    return atomic_load(&failed) ? refused(call, "softmax mean: there is no memory") : NULL;
}

/* Handles vectors [F, D, N] and an index [F]; the result is [F, D]. */
XLA_FFI_Error *on_vector(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 2 || call->rets.size != 1) return refused(call, "vector: 2 operands and a result");
    const XLA_FFI_Buffer *vectors = operand(call, 0), *at = operand(call, 1), *out = result(call, 0);
    int64_t rank = vectors->rank;
    if (rank < 2 || !is_of(vectors, XLA_FFI_DataType_F32, rank) || !is_of(at, XLA_FFI_DataType_S32, rank - 2) ||
        !is_of(out, XLA_FFI_DataType_F32, rank - 1))
        return refused(call, "vector: types or ranks");
    int64_t heads = leading(vectors, 2), size = last(vectors, 2), count = last(vectors, 1);
    if (leading(at, 0) != heads || leading(out, 1) != heads || last(out, 1) != size || !count)
        return refused(call, "vector: sizes do not agree");
    for (int64_t head = 0; head < heads; head++) {
        int32_t asked = ((const int32_t *)at->data)[head], one = asked < 0 ? 0 : asked < count ? asked : (int32_t)count - 1;
        take_vector((const float *)vectors->data + head * size * count, size, count, one, (float *)out->data + head * size);
    }
    return NULL;
}
