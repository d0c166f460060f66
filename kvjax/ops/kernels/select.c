/* Selection of blocks, and of their rows. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>
#include <string.h>

/* ---- the best blocks */

#define NONE INT32_MIN /* order of blocks that are not occupied */

typedef struct {
    const float *scores;     /* [heads, count] */
    const uint8_t *occupied; /* [heads, count] */
    int32_t *block;          /* [heads, asked] */
    int64_t count, asked;
    atomic_int *failed; /* whether there was no memory */
} Ranking;

/* Finds integers in the order of the scores; -0 is below 0, as in XLA. */
INLINED void find_orders(const float *scores, const uint8_t *occupied, int64_t count, int32_t *orders) {
    for (int64_t at = 0; at < count; at++) {
        int32_t bits;
        memcpy(&bits, scores + at, sizeof bits);
        orders[at] = occupied[at] && scores[at] > -INFINITY ? bits ^ (bits >> 31 & INT32_MAX) : NONE;
    }
}

INLINED int64_t at_least(int32_t bound, const int32_t *orders, int64_t count) {
    Integers found = {0};
    int64_t at = 0, sum = 0;
    for (; at + LANES <= count; at += LANES) found -= *(const Integers *)(orders + at) >= bound;
    for (int i = 0; i < LANES; i++) sum += found[i];
    for (; at < count; at++) sum += orders[at] >= bound;
    return sum;
}

/* Returns a bound that exactly `asked` orders reach, or the highest that at least as many reach; the lowest if all fit.
 * Bisection takes several passes over the orders, but no branches that the processor mispredicts. */
INLINED int32_t bound_of(const int32_t *orders, int64_t count, int64_t asked) {
    int64_t low = (int64_t)NONE + 1, high = INT32_MAX;
    if (at_least((int32_t)low, orders, count) <= asked) return (int32_t)low;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2, found = at_least((int32_t)middle, orders, count);
        if (found == asked) return (int32_t)middle;
        if (found > asked) low = middle;
        else high = middle - 1;
    }
    return (int32_t)low;
}

/* Returns whether block a comes after block b: its score is lower, or equal and its number greater. */
INLINED int later(const int32_t *orders, int32_t a, int32_t b) { return orders[a] != orders[b] ? orders[a] < orders[b] : a > b; }

/* Restores a heap with the latest block at the root, from position `at` on. */
INLINED void sink(const int32_t *orders, int32_t *heap, int64_t at, int64_t size) {
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && later(orders, heap[child + 1], heap[child])) child++;
        if (!later(orders, heap[child], heap[at])) return;
        int32_t upper = heap[at];
        heap[at] = heap[child];
        heap[child] = upper;
    }
}

INLINED void sort(const int32_t *orders, int32_t *heap, int64_t size) {
    for (int64_t i = size / 2; i-- > 0;) sink(orders, heap, i, size);
    while (size > 1) {
        int32_t latest = heap[0];
        heap[0] = heap[--size];
        heap[size] = latest;
        sink(orders, heap, 0, size);
    }
}

FOR_EACH_PROCESSOR static void best_blocks(const void *job, int64_t head) {
    const Ranking *in = job;
    int32_t *orders = (int32_t *)room_for(in->count), *block = in->block + head * in->asked;
    int64_t size = 0;
    if (!orders) {
        atomic_store(in->failed, 1);
        return;
    }
    find_orders(in->scores + head * in->count, in->occupied + head * in->count, in->count, orders);
    int32_t bound = bound_of(orders, in->count, in->asked);
    int64_t higher = bound < INT32_MAX ? at_least(bound + 1, orders, in->count) : 0, equal = in->asked - higher;
    for (int64_t at = 0; at < in->count && size < in->asked; at++) { /* of the blocks that just reach the bound the first ones */
        int takes = orders[at] > bound || (orders[at] == bound && equal > 0);
        equal -= orders[at] == bound;
        block[size] = (int32_t)at;
        size += takes;
    }
    sort(orders, block, size);
    for (; size < in->asked; size++) block[size] = (int32_t)in->count;
}

/* ---- rows of the blocks */

typedef struct {
    const int32_t *chosen, *force, *room; /* [heads, asked], [heads], [heads] */
    const int32_t *count, *position;      /* [tables, blocks], [tables, known, rows] */
    int32_t *need, *rank, *row, *pos;     /* [heads, asked + 1], [heads, most] three times */
    uint8_t *valid;                       /* [heads, most] */
    int64_t asked, blocks, known, rows, most;
} Cut;

static const int32_t *positions_of(const Cut *in, int64_t table, int32_t block) {
    return in->position + (table * in->known + (in->known == 1 ? 0 : block)) * in->rows;
}

static void cut_head(const Cut *in, int64_t head, int64_t table) {
    const int32_t *chosen = in->chosen + head * in->asked, *count = in->count + table * in->blocks;
    int32_t *need = in->need + head * (in->asked + 1), none = (int32_t)in->blocks, force = in->force[head], room = in->room[head];
    int64_t nth = head * in->most, stop = nth + in->most, end = 0;
    for (int64_t i = 0; in->known > 1 && i < in->asked; i++) /* prefetch all, as they are far apart in memory */
        for (int64_t row = 0; chosen[i] >= 0 && chosen[i] < none && row < count[chosen[i]]; row += 16)
            __builtin_prefetch(positions_of(in, table, chosen[i]) + row);
    for (int64_t i = 0; i < in->asked; i++) {
        int32_t rows = chosen[i] >= 0 && chosen[i] < none ? count[chosen[i]] : 0, fits = rows > 0 && end < room;
        const int32_t *position = rows ? positions_of(in, table, chosen[i]) : NULL;
        int32_t before = in->known == 1 ? chosen[i] * (int32_t)in->rows : 0; /* the positions of one block imply those of all */
        need[i] = fits ? chosen[i] : none;
        if (need[i] == force) force = none;
        for (int32_t row = 0; row < rows && nth < stop; row++, nth++) {
            in->valid[nth] = end + row < room;
            in->rank[nth] = (int32_t)i;
            in->row[nth] = in->valid[nth] ? row : 0;
            in->pos[nth] = in->valid[nth] ? before + position[row] : -1;
        }
        end += rows;
    }
    need[in->asked] = force;
    for (; nth < stop; nth++) {
        in->valid[nth] = 0;
        in->rank[nth] = (int32_t)in->asked - 1;
        in->row[nth] = 0;
        in->pos[nth] = -1;
    }
}

/* ---- the interface */

/* Handles scores [F, N] and occupied [F, N]; the result is blocks [F, M]. */
XLA_FFI_Error *on_best(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 2 || call->rets.size != 1) return refused(call, "best: 2 operands and a result");
    const XLA_FFI_Buffer *scores = operand(call, 0), *occupied = operand(call, 1), *block = result(call, 0);
    int64_t rank = scores->rank;
    if (rank < 2 || !is_of(scores, XLA_FFI_DataType_F32, rank) || !is_of(occupied, XLA_FFI_DataType_PRED, rank) ||
        !is_of(block, XLA_FFI_DataType_S32, rank))
        return refused(call, "best: types or ranks");
    atomic_int failed = 0;
    Ranking in = {scores->data, occupied->data, block->data, last(scores, 1), last(block, 1), &failed};
    int64_t heads = leading(scores, 1);
    if (leading(occupied, 1) != heads || last(occupied, 1) != in.count || leading(block, 1) != heads)
        return refused(call, "best: sizes do not agree");
    in_pieces(call, best_blocks, &in, heads, 4 * heads * in.count);
    return atomic_load(&failed) ? refused(call, "best: there is no memory") : NULL;
}

/* Handles blocks [K, M], forced [K], room [K], counts [KT, NB] and positions [KT, _, C]; results are need, rank, row, valid and
 * pos of `Cut`. */
XLA_FFI_Error *on_cut(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 5 || call->rets.size != 5) return refused(call, "cut: 5 operands and 5 results");
    const XLA_FFI_Buffer *chosen = operand(call, 0), *force = operand(call, 1), *room = operand(call, 2);
    const XLA_FFI_Buffer *count = operand(call, 3), *position = operand(call, 4), *need = result(call, 0), *valid = result(call, 3);
    int64_t rank = chosen->rank;
    if (rank < 2 || !is_of(chosen, XLA_FFI_DataType_S32, rank) || !is_of(force, XLA_FFI_DataType_S32, rank - 1) ||
        !is_of(room, XLA_FFI_DataType_S32, rank - 1) || !is_of(count, XLA_FFI_DataType_S32, rank) ||
        !is_of(position, XLA_FFI_DataType_S32, rank + 1) || !is_of(need, XLA_FFI_DataType_S32, rank) ||
        !is_of(valid, XLA_FFI_DataType_PRED, rank))
        return refused(call, "cut: types or ranks");
    int64_t heads = last(chosen, 2), tables = last(count, 2), sequences = leading(chosen, 2);
    Cut in = {chosen->data, force->data, room->data, count->data, position->data, need->data, result(call, 1)->data,
              result(call, 2)->data, result(call, 4)->data, valid->data, last(chosen, 1), last(count, 1), last(position, 2),
              last(position, 1), last(valid, 1)};
    if (last(force, 1) != heads || last(room, 1) != heads || leading(force, 1) != sequences || leading(room, 1) != sequences ||
        leading(count, 2) != sequences || leading(position, 3) != sequences || last(position, 3) != tables || tables < 1 ||
        (in.known != 1 && in.known != in.blocks) || leading(need, 1) != sequences * heads || last(need, 1) != in.asked + 1 ||
        leading(valid, 1) != sequences * heads)
        return refused(call, "cut: sizes do not agree");
    for (int64_t i = 1; i < 5; i++)
        if ((i != 3 && !is_of(result(call, i), XLA_FFI_DataType_S32, rank)) || last(result(call, i), 1) != in.most ||
            leading(result(call, i), 1) != sequences * heads)
            return refused(call, "cut: results");
    for (int64_t head = 0; head < sequences * heads; head++) cut_head(&in, head, head / heads * tables + head % heads % tables);
    return NULL;
}
