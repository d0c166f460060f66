/* Numbers about all clusters of a head that the placement of a key needs: `kvjax.methods.clusters.survey`. */
#include "kernels.h"
#include "lanes.h"

#include <string.h>

enum { KEYS, USED, FLAGGED, FREE, NEAREST, NEAREST_FLAGGED, ROOMY, NUMBERS };

typedef struct {
    const float *squared; /* [heads, blocks] */
    const int32_t *count; /* [heads, blocks] */
    const uint8_t *split; /* [heads, blocks] */
    int32_t *found;       /* [heads, NUMBERS] */
    int64_t blocks;
    int32_t rows; /* rows of a block */
} Clusters;

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES clusters; those past the end are neither used nor free. */
typedef struct {
    Integers order, count; /* order: integers in the order of the distances */
    Integers used, split, roomy, at;
} Some;

INLINED Some some_of(const float *squared, const int32_t *count, const uint8_t *split, int64_t start, int32_t rows) {
    Some some = {.at = (Integers){0, 1, 2, 3, 4, 5, 6, 7} + (int32_t)start, .count = *(const Integers *)count};
    some.order = (Integers)(*(const Lanes *)squared + 0.0f); /* makes -0 equal to 0 */
    some.order ^= some.order >> 31 & INT32_MAX;
    some.used = some.count > 0;
    some.roomy = some.used & (some.count < rows);
    some.split = __builtin_convertvector(*(const Bytes *)split, Integers) != 0;
    return some;
}

INLINED Some some_at(const Clusters *in, int64_t head, int64_t start) {
    const int64_t first = head * in->blocks + start, left = in->blocks - start;
    if (left >= LANES) return some_of(in->squared + first, in->count + first, in->split + first, start, in->rows);
    float squared[LANES] = {0};
    int32_t count[LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    uint8_t split[LANES] = {0};
    memcpy(squared, in->squared + first, left * sizeof *squared);
    memcpy(count, in->count + first, left * sizeof *count);
    memcpy(split, in->split + first, left);
    return some_of(squared, count, split, start, in->rows);
}

/* Returns the minimum of `least` and, where the mask is set, `number`. */
INLINED Integers less(Integers least, Integers mask, Integers number) {
    mask &= number < least;
    return (mask & number) | (~mask & least);
}

/* Returns the least number, or `otherwise` if there is none. */
INLINED int32_t least_of(Integers numbers, int32_t otherwise) {
    int32_t least = numbers[0];
    for (int i = 1; i < LANES; i++) least = numbers[i] < least ? numbers[i] : least;
    return least < INT32_MAX ? least : otherwise;
}

INLINED int32_t sum_of(Integers numbers) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += numbers[i];
    return sum;
}

INLINED void survey_head(const Clusters *in, int64_t head) {
    int32_t *found = in->found + head * NUMBERS, end = (int32_t)in->blocks - 1;
    Integers keys = {0}, used = {0}, split = {0}, none = (Integers){0} + INT32_MAX;
    Integers nearest = none, nearest_split = none, roomy = none;
    for (int64_t at = 0; at < in->blocks; at += LANES) {
        Some some = some_at(in, head, at);
        keys += some.used & some.count;
        used -= some.used;
        split -= some.split;
        nearest = less(nearest, some.used, some.order);
        nearest_split = less(nearest_split, some.split, some.order);
        roomy = less(roomy, some.roomy, some.order);
    }
    int32_t least = least_of(nearest, 0), least_split = least_of(nearest_split, 0), least_roomy = least_of(roomy, 0);
    Integers free = nearest = nearest_split = roomy = none;
    for (int64_t at = 0; at < in->blocks; at += LANES) { /* the first clusters at the least distances */
        Some some = some_at(in, head, at);
        free = less(free, some.count == 0, some.at);
        nearest = less(nearest, some.used & (some.order == least), some.at);
        nearest_split = less(nearest_split, some.split & (some.order == least_split), some.at);
        roomy = less(roomy, some.roomy & (some.order == least_roomy), some.at);
    }
    found[KEYS] = sum_of(keys);
    found[USED] = sum_of(used);
    found[FLAGGED] = sum_of(split);
    found[FREE] = least_of(free, end);
    found[NEAREST] = least_of(nearest, end);
    found[NEAREST_FLAGGED] = least_of(nearest_split, end);
    found[ROOMY] = least_of(roomy, least_of(free, end));
}

/* Calls no function with vectors as arguments: clang allows none in a function compiled for several processors. */
FOR_EACH_PROCESSOR static void survey(const void *job, int64_t head) { survey_head(job, head); }

/* Handles distances [F, N], counts [F, N], flags [F, N] and the rows of a block [F]; the result is numbers [F, NUMBERS]. */
XLA_FFI_Error *on_survey(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 4 || call->rets.size != 1) return refused(call, "survey: 4 operands and a result");
    const XLA_FFI_Buffer *squared = operand(call, 0), *count = operand(call, 1), *split = operand(call, 2), *rows = operand(call, 3);
    const XLA_FFI_Buffer *found = result(call, 0);
    int64_t rank = squared->rank;
    if (rank < 1 || !is_of(squared, XLA_FFI_DataType_F32, rank) || !is_of(count, XLA_FFI_DataType_S32, rank) ||
        !is_of(split, XLA_FFI_DataType_PRED, rank) || !is_of(rows, XLA_FFI_DataType_S32, rank - 1) ||
        !is_of(found, XLA_FFI_DataType_S32, rank))
        return refused(call, "survey: types or ranks");
    int64_t heads = leading(squared, 1);
    Clusters in = {squared->data, count->data, split->data, found->data, last(squared, 1), 0};
    if (leading(count, 1) != heads || last(count, 1) != in.blocks || leading(split, 1) != heads || last(split, 1) != in.blocks ||
        leading(rows, 0) != heads || leading(found, 1) != heads || last(found, 1) != NUMBERS || !in.blocks)
        return refused(call, "survey: sizes do not agree");
    in.rows = heads ? *(const int32_t *)rows->data : 0; /* the same for all heads */
    in_pieces(call, survey, &in, heads, 8 * heads * in.blocks);
    return NULL;
}
