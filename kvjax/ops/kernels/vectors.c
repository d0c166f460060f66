/* Products of a few queries with many vectors stored dimension by dimension. */
#include "kernels.h"
#include "lanes.h"

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
