/* Assignment of needed blocks to slots. */
#include "kernels.h"

#include <string.h>

typedef struct {
    const int32_t *block, *keys, *need; /* of one head: [slots], [slots, policy], [asked] */
    int32_t *slot, *read, *new, *pinned; /* of one head: [asked] twice, [slots] twice */
    int64_t slots, policy, asked;
    int32_t none;        /* number of blocks, which stands for no block */
    int32_t *heap;       /* [slots] */
    int32_t *at;         /* [places], hash table of slots by block, -1 = empty */
    uint32_t places;     /* a power of two */
} Slots;

/* Returns the place in the hash table that holds a block's slot, or the empty place for it. */
static uint32_t place_of(const Slots *in, int32_t block) {
    uint32_t place = (uint32_t)block * 2654435761u & (in->places - 1);
    while (in->at[place] >= 0 && in->block[in->at[place]] != block) place = (place + 1) & (in->places - 1);
    return place;
}

static int turn_of(const Slots *in, int32_t slot) { return in->pinned[slot] ? 2 : in->block[slot] != in->none; }

/* Returns whether slot a is reassigned before slot b: empty slots come first, then occupied ones in the order of the policy,
 * then pinned ones. A policy of one key does not order empty and pinned slots. */
static int sooner(const Slots *in, int32_t a, int32_t b) {
    int turn = turn_of(in, a), other = turn_of(in, b);
    if (turn != other) return turn < other;
    for (int64_t i = 0; i < (in->policy > 1 || turn == 1 ? in->policy : 0); i++) {
        int32_t left = in->keys[a * in->policy + i], right = in->keys[b * in->policy + i];
        if (left != right) return left < right;
    }
    return a < b;
}

static void sink(const Slots *in, int64_t at, int64_t size) {
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && sooner(in, in->heap[child + 1], in->heap[child])) child++;
        if (!sooner(in, in->heap[child], in->heap[at])) return;
        int32_t lower = in->heap[at];
        in->heap[at] = in->heap[child];
        in->heap[child] = lower;
    }
}

/* Finds the slots of one head's needed blocks, and assigns the next slot to each missing block. An entry without a block gets
 * the slot assigned last, or the one that would be assigned first. */
static void assign_head(const Slots *in) {
    int64_t left = in->slots;
    memset(in->at, 0xff, in->places * sizeof *in->at);
    for (int32_t slot = 0; slot < in->slots; slot++) {
        in->new[slot] = -1;
        in->pinned[slot] = 0;
        if (in->block[slot] != in->none) in->at[place_of(in, in->block[slot])] = slot;
    }
    for (int64_t i = 0; i < in->asked; i++) {
        in->slot[i] = in->need[i] < in->none ? in->at[place_of(in, in->need[i])] : -1;
        if (in->slot[i] >= 0) in->pinned[in->slot[i]] = 1;
    }
    for (int32_t slot = 0; slot < in->slots; slot++) in->heap[slot] = slot;
    for (int64_t at = left / 2; at-- > 0;) sink(in, at, left);
    for (int64_t i = 0, given = 0; i < in->asked; i++) {
        int missing = in->need[i] < in->none && in->slot[i] < 0;
        in->read[i] = missing ? in->need[i] : in->none;
        if (missing && given++) {
            in->heap[0] = in->heap[--left];
            sink(in, 0, left);
        }
        if (in->slot[i] < 0) in->slot[i] = in->heap[0];
        if (missing) in->new[in->slot[i]] = in->need[i];
    }
}

/* Handles blocks [KB, NS], keys [KB, NS, P], needed blocks [KB, M] and NB []; results are those of `Slots`. */
XLA_FFI_Error *on_assign(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 4 || call->rets.size != 4) return refused(call, "assign: 4 operands and 4 results");
    const XLA_FFI_Buffer *block = operand(call, 0), *keys = operand(call, 1), *need = operand(call, 2), *none = operand(call, 3);
    int64_t rank = block->rank;
    if (rank < 2 || !is_of(block, XLA_FFI_DataType_S32, rank) || !is_of(keys, XLA_FFI_DataType_S32, rank + 1) ||
        !is_of(need, XLA_FFI_DataType_S32, rank) || !is_of(none, XLA_FFI_DataType_S32, rank - 2))
        return refused(call, "assign: types or ranks of operands");
    int64_t heads = leading(block, 1);
    Slots one = {.slots = last(block, 1), .policy = last(keys, 1), .asked = last(need, 1), .places = 4};
    if (leading(keys, 2) != heads || last(keys, 2) != one.slots || leading(need, 1) != heads || one.asked > one.slots)
        return refused(call, "assign: sizes do not agree, or there are fewer slots than blocks needed");
    for (int64_t i = 0; i < 4; i++) {
        const XLA_FFI_Buffer *like = i < 2 ? need : block, *out = result(call, i);
        if (!is_of(out, XLA_FFI_DataType_S32, rank) || leading(out, 1) != heads || last(out, 1) != last(like, 1))
            return refused(call, "assign: results");
    }
    while (one.places < 2 * one.slots) one.places *= 2;
    one.heap = malloc((one.slots + one.places) * sizeof *one.heap);
    if (!one.heap) return refused(call, "assign: no memory");
    one.at = one.heap + one.slots;
    one.none = heads ? *(const int32_t *)none->data : 0; /* the same for a whole batch */
    for (int64_t head = 0; head < heads; head++) {
        one.block = (const int32_t *)block->data + head * one.slots;
        one.keys = (const int32_t *)keys->data + head * one.slots * one.policy;
        one.need = (const int32_t *)need->data + head * one.asked;
        one.slot = (int32_t *)result(call, 0)->data + head * one.asked;
        one.read = (int32_t *)result(call, 1)->data + head * one.asked;
        one.new = (int32_t *)result(call, 2)->data + head * one.slots;
        one.pinned = (int32_t *)result(call, 3)->data + head * one.slots;
        assign_head(&one);
    }
    free(one.heap);
    return NULL;
}
