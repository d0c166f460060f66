/* Attention that reads selected rows of a pool in place, f32 or the bits of bfloat16, instead of gathering them first. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* Returns the sums of four vectors. */
INLINED Four sums_of_four(const Lanes *x) {
    Lanes ab = __builtin_shufflevector(x[0], x[1], 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(x[0], x[1], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes cd = __builtin_shufflevector(x[2], x[3], 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(x[2], x[3], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

#define FOUR 4          /* queries that use a row while it is in registers */
#define TILE_ROWS 64    /* rows whose keys or values fit in the first-level cache */
#define SEGMENT 4096    /* tokens of a head that one thread attends */

typedef struct {
    const char *keys, *values;        /* [have, size] */
    const int32_t *key_at, *value_at; /* [heads, tokens] */
    const uint8_t *valid;             /* [heads, tokens] */
    const float *q, *bias;            /* [heads, queries, size], [heads, queries, tokens] or none */
    float *out, *top, *total;         /* [heads, segments, queries, size], and without size */
    int64_t have_keys, have_values, heads, segments, tokens, queries, size; /* queries: a multiple of FOUR */
    int wide; /* whether rows are f32 */
} Rows;

/* Valid rows of a head, as many as fit. The last key is repeated, because keys are processed in pairs. */
typedef struct {
    const char *key[TILE_ROWS + 1], *value[TILE_ROWS + 1];
    int64_t at[TILE_ROWS];
    int count;
} Tile;

/* Scores of each row of a tile for four queries; later their weights. */
typedef union {
    float of[TILE_ROWS + 1][FOUR];
    Lanes pairs[(TILE_ROWS + 1) / 2];
} Weights;

INLINED const char *row_of(const char *rows, int32_t row, int64_t have, int64_t bytes) {
    return rows + (row < 0 ? 0 : row < have ? row : have - 1) * bytes;
}

INLINED Lanes lanes_of(const char *row, int64_t at, int wide) {
    if (wide) return *(const Lanes *)(row + 4 * at);
    return (Lanes)(__builtin_convertvector(*(const Halves *)(row + 2 * at), Words) << 16);
}

INLINED float number_of(const char *row, int64_t at, int wide) {
    uint32_t bits;
    if (wide) return ((const float *)row)[at];
    bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINED Lanes twice(Four x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }

INLINED Four half(Lanes x, int which) {
    if (which) return __builtin_shufflevector(x, x, 4, 5, 6, 7);
    return __builtin_shufflevector(x, x, 0, 1, 2, 3);
}

/* Fills a tile with valid rows of a head from `first` on; returns the first row that was not considered. */
INLINED int64_t fill_tile(const Rows *from, int64_t head, int64_t first, int64_t stop, Tile *tile) {
    int64_t at = first, line = head * from->tokens, bytes = from->size * (from->wide ? 4 : 2);
    int count = 0;
    for (; at < stop && count < TILE_ROWS; at++) {
        if (!from->valid[line + at]) continue;
        tile->key[count] = row_of(from->keys, from->key_at[line + at], from->have_keys, bytes);
        tile->value[count] = row_of(from->values, from->value_at[line + at], from->have_values, bytes);
        tile->at[count++] = at;
    }
    tile->count = count;
    if (count) tile->key[count] = tile->key[count - 1];
    return at;
}

/* Prefetches a row into the second-level cache, as the first has no room for two tiles. While a tile's keys are scored, the
 * next tile's keys are prefetched; while its values are summed, the next tile's values. Only the first four queries of a tile
 * prefetch: the others get no `next`. */
INLINED void ask_for(const char *row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

/* Prefetches a row from the second-level cache into the first. */
INLINED void bring(const char *row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 3);
}

/* Computes the products of a tile's keys with four queries. */
INLINED void score(const Tile *tile, const Tile *next, const float *q, int64_t size, int wide, Weights *scores) {
    for (int row = 0; row < tile->count; row += 2) {
        Lanes sums[2 * FOUR] = {{0}};
        Four rest[2] = {{0}};
        int64_t at = 0, bytes = size * (wide ? 4 : 2);
        for (int i = row; next && i < row + 2; i++) {
            if (i < next->count) ask_for(next->key[i], bytes);
            if (i < tile->count) bring(tile->value[i], bytes);
        }
        for (; at + LANES <= size; at += LANES)
            for (int i = 0; i < 2; i++) {
                Lanes numbers = lanes_of(tile->key[row + i], at, wide);
                for (int query = 0; query < FOUR; query++)
                    sums[i * FOUR + query] += numbers * *(const Lanes *)(q + query * size + at);
            }
        for (; at < size; at++)
            for (int i = 0; i < 2 * FOUR; i++)
                rest[i / FOUR][i % FOUR] += number_of(tile->key[row + i / FOUR], at, wide) * q[i % FOUR * size + at];
        *(Four *)scores->of[row] = sums_of_four(sums) + rest[0];
        *(Four *)scores->of[row + 1] = sums_of_four(sums + FOUR) + rest[1];
    }
}

/* Turns scores into weights relative to the largest score so far, and rescales earlier sums to it. */
INLINED void weigh(int count, Weights *weights, int64_t size, float *out, Four *top, Four *total) {
    Lanes most = twice(*top), sums = {0};
    if (count % 2) *(Four *)weights->of[count] = (Four){-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int i = 0; 2 * i < count; i++) most = larger(most, weights->pairs[i]);
    most = larger(most, __builtin_shufflevector(most, most, 4, 5, 6, 7, 0, 1, 2, 3));
    Four kept = half(exponentials(twice(*top) - most), 0);
    for (int query = 0; query < FOUR; query++)
        for (int64_t at = 0; kept[query] != 1 && at < size; at++) out[query * size + at] *= kept[query];
    for (int i = 0; 2 * i < count; i++) sums += weights->pairs[i] = exponentials(weights->pairs[i] - most);
    *top = half(most, 0);
    *total = *total * kept + half(sums, 0) + half(sums, 1);
}

/* Adds a tile's weighted values to the sums of four queries, in `vectors` vectors of lanes from dimension `at` on. */
INLINED void add_vectors(const Tile *tile, const Tile *next, const Weights *weights, int vectors, int64_t size, int64_t at,
                         int wide, float *out) {
    int64_t width = wide ? 4 : 2;
    Lanes sums[FOUR][2];
    for (int query = 0; query < FOUR; query++)
        for (int j = 0; j < vectors; j++) sums[query][j] = *(Lanes *)(out + query * size + at + j * LANES);
    for (int row = 0; row < tile->count; row++) {
        if (next && row < next->count) ask_for(next->value[row] + at * width, vectors * LANES * width);
        for (int j = 0; j < vectors; j++) {
            Lanes numbers = lanes_of(tile->value[row], at + j * LANES, wide);
            for (int query = 0; query < FOUR; query++) sums[query][j] += weights->of[row][query] * numbers;
        }
    }
    for (int query = 0; query < FOUR; query++)
        for (int j = 0; j < vectors; j++) *(Lanes *)(out + query * size + at + j * LANES) = sums[query][j];
}

INLINED void add_values(const Tile *tile, const Tile *next, const Weights *weights, int64_t size, int wide, float *out) {
    int64_t at = 0;
    for (; at + 2 * LANES <= size; at += 2 * LANES) add_vectors(tile, next, weights, 2, size, at, wide, out);
    for (; at + LANES <= size; at += LANES) add_vectors(tile, next, weights, 1, size, at, wide, out);
    for (; at < size; at++)
        for (int row = 0; row < tile->count; row++)
            for (int query = 0; query < FOUR; query++)
                out[query * size + at] += weights->of[row][query] * number_of(tile->value[row], at, wide);
}

/* Attends from all queries of a head to a segment of its tokens. */
INLINED void attend_segment(const Rows *from, int64_t piece, int wide) {
    int64_t head = piece / from->segments, segment = piece % from->segments, size = from->size;
    int64_t at = segment * SEGMENT, stop = at + SEGMENT < from->tokens ? at + SEGMENT : from->tokens;
    float *out = from->out + piece * from->queries * size;
    Four *top = (Four *)(from->top + piece * from->queries), *total = (Four *)(from->total + piece * from->queries);
    const float *q = from->q + head * from->queries * size;
    Tile tiles[2] = {0};
    Weights weights;
    memset(out, 0, from->queries * size * sizeof *out);
    for (int64_t i = 0; i < from->queries / FOUR; i++) {
        top[i] = (Four){NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE};
        total[i] = (Four){0};
    }
    at = fill_tile(from, head, at, stop, tiles);
    for (int turn = 0; tiles[turn].count; turn = !turn) {
        const Tile *tile = tiles + turn;
        at = fill_tile(from, head, at, stop, tiles + !turn);
        for (int64_t i = 0; i < from->queries / FOUR; i++) {
            const float *bias = from->bias ? from->bias + (head * from->queries + i * FOUR) * from->tokens : NULL;
            const Tile *next = i ? NULL : tiles + !turn;
            score(tile, next, q + i * FOUR * size, size, wide, &weights);
            for (int j = 0; bias && j < FOUR * tile->count; j++)
                weights.of[j / FOUR][j % FOUR] += bias[j % FOUR * from->tokens + tile->at[j / FOUR]];
            weigh(tile->count, &weights, size, out + i * FOUR * size, top + i, total + i);
            add_values(tile, next, &weights, size, wide, out + i * FOUR * size);
        }
    }
}

FOR_EACH_PROCESSOR static void row_attention(const void *rows, int64_t piece) {
    const Rows *from = rows;
    if (from->wide) attend_segment(from, piece, 1);
    else attend_segment(from, piece, 0);
}

/* ---- the interface */

/* Handles keys [R, D], index [K, N], values [R2, D], index [K, N], valid [K, N], q [K, G, D] and bias [K, G, N] or [K, G, 0];
 * results are out [K, S, G, D], top and total [K, S, G]. */
XLA_FFI_Error *on_rows(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 7 || call->rets.size != 3) return refused(call, "rows: 7 operands and 3 results");
    const XLA_FFI_Buffer *keys = operand(call, 0), *index = operand(call, 1), *values = operand(call, 2);
    const XLA_FFI_Buffer *q = operand(call, 5), *bias = operand(call, 6), *out = result(call, 0);
    XLA_FFI_DataType type = keys->dtype;
    if ((type != XLA_FFI_DataType_F32 && type != XLA_FFI_DataType_U16) || values->dtype != type || keys->rank != 2 ||
        values->rank != 2 || index->rank != 2 || q->rank != 3 || bias->rank != 3 || out->rank != 4)
        return refused(call, "rows: types or ranks of operands");
    Rows from = {keys->data, values->data, operand(call, 1)->data, operand(call, 3)->data, operand(call, 4)->data, q->data,
                 bias->dims[2] ? bias->data : NULL, out->data, result(call, 1)->data, result(call, 2)->data, keys->dims[0],
                 values->dims[0], index->dims[0], out->dims[1], index->dims[1], q->dims[1], keys->dims[1],
                 type == XLA_FFI_DataType_F32};
    int64_t heads = from.heads, tokens = from.tokens, queries = from.queries, size = from.size, segments = from.segments;
    int64_t wanted = tokens > SEGMENT ? (tokens + SEGMENT - 1) / SEGMENT : 1;
    if ((tokens && (!from.have_keys || !from.have_values)) || segments != wanted ||
        queries % FOUR || values->dims[1] != size ||
        !HAS(index, S32, heads, tokens) || !HAS(operand(call, 3), S32, heads, tokens) || !HAS(operand(call, 4), PRED, heads, tokens) ||
        !HAS(q, F32, heads, queries, size) || !HAS(bias, F32, heads, queries, from.bias ? tokens : 0) ||
        !HAS(out, F32, heads, segments, queries, size) || !HAS(result(call, 1), F32, heads, segments, queries) ||
        !HAS(result(call, 2), F32, heads, segments, queries))
        return refused(call, "rows: sizes do not agree");
    in_pieces(call, row_attention, &from, heads * segments, 2 * heads * tokens * size);
    return NULL;
}
