/* Products of queries with keys in few bits, stored dimension by dimension, and the mean softmax of many queries. */
#include "kernels.h"
#include "lanes.h"

#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define AT_ONCE 4  /* queries whose sums are in registers at the same time */
#define BATCH 32   /* tokens whose bytes fill one vector */
#define TILE 4096  /* tokens whose sums stay in the near caches; memory is slower in shorter runs */
#define TOGETHER 8 /* bytes of a token whose products fit in 16 bits: 8 * 2 * 15 * 127 */

typedef struct {
    const uint8_t *codes; /* [heads, bytes, tokens] */
    const int8_t *q; /* [heads, queries, size] */
    const float *step; /* [heads, queries] value of a product of 1 */
    const int32_t *stored; /* [sequences] stored tokens */
    float *out; /* [heads, queries, tokens] */
    int64_t heads, bytes, tokens, queries, sequences;
    int bits;
} Codes;

/* Adds to sums[queries][TILE] the levels in `rows` bytes of a batch of tokens times their numbers of q[queries][size]. */
typedef void AddLevels(const uint8_t *codes, int64_t tokens, const int8_t *q, int64_t size, int rows, int bits, int queries,
                       int32_t *sums);

FOR_EACH_PROCESSOR static void add_levels(const uint8_t *codes, int64_t tokens, const int8_t *q, int64_t size, int rows,
                                          int bits, int queries, int32_t *sums) {
    int each = 8 / bits;
    for (int query = 0; query < queries; query++)
        for (int64_t i = 0; i < (int64_t)rows * each; i++) {
            int32_t number = q[query * size + i];
            for (int at = 0; at < BATCH; at++)
                sums[query * TILE + at] += (codes[i / each * tokens + at] >> (i % each * bits) & ((1 << bits) - 1)) * number;
        }
}

#ifdef __x86_64__
/* Adds as `add_levels` does, with two levels of a token in neighbouring bytes, whose products are summed in 16 bits. Rows ahead
 * are prefetched: each is too short a run for the processor to do it by itself. */
__attribute__((target("avx2"), always_inline)) static inline void add_pairs(
    const uint8_t *codes, int64_t tokens, const int8_t *q, int64_t size, int rows, const int bits, const int queries,
    int32_t *sums) {
    const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
    __m256i found[2 * AT_ONCE];
#pragma GCC unroll 8 /* else the sums are not kept in registers */
    for (int i = 0; i < 2 * AT_ONCE; i++) found[i] = _mm256_setzero_si256();
    for (int row = 0; row < rows; row++) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(codes + row * tokens));
        __builtin_prefetch(codes + (row + TOGETHER) * tokens, 0, 2);
#pragma GCC unroll 2
        for (int shift = 0; shift < 8; shift += 2 * bits) {
            __m256i one = _mm256_and_si256(_mm256_srli_epi16(bytes, shift), mask);
            __m256i two = _mm256_and_si256(_mm256_srli_epi16(bytes, shift + bits), mask);
            __m256i near = _mm256_unpacklo_epi8(one, two), far = _mm256_unpackhi_epi8(one, two);
#pragma GCC unroll 4
            for (int query = 0; query < queries; query++) {
                int16_t pair;
                memcpy(&pair, q + query * size + row * (8 / bits) + shift / bits, sizeof pair);
                __m256i numbers = _mm256_set1_epi16(pair);
                found[2 * query] = _mm256_add_epi16(found[2 * query], _mm256_maddubs_epi16(near, numbers));
                found[2 * query + 1] = _mm256_add_epi16(found[2 * query + 1], _mm256_maddubs_epi16(far, numbers));
            }
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < queries; query++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) { /* tokens from 8 * part on: unpacking works within each half of 128 bits */
            __m256i half = found[2 * query + part % 2], *to = (__m256i *)(sums + query * TILE + 8 * part);
            __m128i eight = part < 2 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
            _mm256_storeu_si256(to, _mm256_add_epi32(_mm256_loadu_si256(to), _mm256_cvtepi16_epi32(eight)));
        }
}

__attribute__((target("avx2"))) static void add_levels_avx2(const uint8_t *codes, int64_t tokens, const int8_t *q, int64_t size,
                                                            int rows, int bits, int queries, int32_t *sums) {
    if (bits == 4 && queries == AT_ONCE) add_pairs(codes, tokens, q, size, rows, 4, AT_ONCE, sums);
    else if (bits == 4) add_pairs(codes, tokens, q, size, rows, 4, 1, sums);
    else if (queries == AT_ONCE) add_pairs(codes, tokens, q, size, rows, 2, AT_ONCE, sums);
    else add_pairs(codes, tokens, q, size, rows, 2, 1, sums);
}

static AddLevels *fastest(int bits) { return bits < 8 && __builtin_cpu_supports("avx2") ? add_levels_avx2 : add_levels; }
#else
static AddLevels *fastest(int bits) { return add_levels; }
#endif

/* Computes the scores of `count` tokens, at most a tile, whose bytes begin at `codes`, with `queries` queries from `line` on.
 * Scores of consecutive queries are `apart` numbers apart in `out`. */
static void add_tile(const Codes *from, const uint8_t *codes, int64_t count, int64_t line, int queries, float *out,
                     int64_t apart) {
    int64_t each = 8 / from->bits, size = from->bytes * each, whole = count - count % BATCH;
    const float zero = from->bits == 2 ? 1.5f : (float)((1 << (from->bits - 1)) - 1); /* level of code 0 */
    const int8_t *q = from->q + line * size;
    AddLevels *add = fastest(from->bits);
    int32_t sums[AT_ONCE * TILE];
    memset(sums, 0, queries * TILE * sizeof *sums);
    uint8_t rest[TOGETHER * BATCH];
    for (int64_t byte = 0; byte < from->bytes; byte += TOGETHER) {
        int rows = byte + TOGETHER < from->bytes ? TOGETHER : (int)(from->bytes - byte);
        const uint8_t *some = codes + byte * from->tokens;
        for (int64_t at = 0; at < whole; at += BATCH)
            add(some + at, from->tokens, q + byte * each, size, rows, from->bits, queries, sums + at);
        if (whole == count) continue;
        for (int row = 0; row < rows; row++) memcpy(rest + row * BATCH, some + row * from->tokens + whole, count - whole);
        add(rest, BATCH, q + byte * each, size, rows, from->bits, queries, sums + whole);
    }
    for (int query = 0; query < queries; query++) {
        float step = from->step[line + query], first = 0;
        for (int64_t i = 0; i < size; i++) first -= zero * q[query * size + i];
        for (int64_t at = 0; at < count; at++) out[query * apart + at] = ((float)sums[query * TILE + at] + first) * step;
    }
}

INLINED int64_t tiles_of(const Codes *from) { return (from->tokens + TILE - 1) / TILE; }

/* Returns the bytes to be read, once for every AT_ONCE queries. */
INLINED int64_t work_of(const Codes *from) {
    return from->heads * from->bytes * from->tokens * ((from->queries + AT_ONCE - 1) / AT_ONCE);
}

INLINED int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct { /* a tile of the tokens of one head */
    int64_t head, start, stop, known; /* tokens from `known` on are not stored */
    const uint8_t *codes;
} Part;

static Part part_of(const Codes *from, int64_t piece) {
    Part part = {.head = piece / tiles_of(from), .start = piece % tiles_of(from) * TILE};
    int64_t stored = from->stored[part.head * from->sequences / from->heads];
    part.stop = shorter(part.start + TILE, from->tokens);
    part.known = stored < part.start ? part.start : shorter(stored, part.stop);
    part.codes = from->codes + part.head * from->bytes * from->tokens + part.start;
    return part;
}

/* Computes the scores of one tile of one head. */
FOR_EACH_PROCESSOR static void code_products(const void *job, int64_t piece) {
    const Codes *from = job;
    Part part = part_of(from, piece);
    for (int64_t query = 0, step; query < from->queries; query += step) {
        int64_t line = part.head * from->queries + query;
        float *out = from->out + line * from->tokens + part.start;
        step = query + AT_ONCE <= from->queries ? AT_ONCE : 1;
        add_tile(from, part.codes, part.known - part.start, line, step, out, from->tokens);
        for (int64_t i = 0; i < step; i++)
            for (int64_t at = part.known; at < part.stop; at++) out[i * from->tokens + at - part.start] = NEGATIVE;
    }
}

/* ---- the mean softmax of many queries */

typedef struct {
    Codes from; /* `out` is unused */
    float *partial; /* [groups, chunks, tokens] contribution of each chunk of queries to the mean */
    float *mean; /* [groups, tokens] */
    int64_t groups, chunks;
    atomic_int *failed; /* whether there was no memory */
} Softmax;

/* Replaces scores[count] by the exponentials of their differences from the highest; returns that and their sum. */
INLINED void exponentiate(float *scores, int64_t count, float *highest, float *sum) {
    Lanes sums = {0}, most = sums - INFINITY;
    for (int64_t at = count; at % LANES; at++) scores[at] = -INFINITY;
    for (int64_t at = 0; at < count; at += LANES) most = larger(most, *(const Lanes *)(scores + at));
    *highest = most[0];
    for (int i = 1; i < LANES; i++) *highest = most[i] > *highest ? most[i] : *highest;
    for (int64_t at = 0; at < count; at += LANES)
        sums += *(Lanes *)(scores + at) = exponentials(*(const Lanes *)(scores + at) - *highest);
    *sum = 0;
    for (int i = 0; i < LANES; i++) *sum += sums[i];
}

/* Turns the highest score and the sum of exponentials of each tile of a query into the factor of the tile's exponentials with
 * which those of all tiles sum to `whole`. */
static void find_shares(float *most, float *share, int64_t tiles, float whole) {
    float highest = -INFINITY, total = 0;
    for (int64_t tile = 0; tile < tiles; tile++) highest = most[tile] > highest ? most[tile] : highest;
    for (int64_t tile = 0; tile < tiles; tile++) {
        most[tile] = most[tile] > -INFINITY ? expf(most[tile] - highest) : 0;
        total += share[tile] * most[tile];
    }
    for (int64_t tile = 0; tile < tiles; tile++) share[tile] = total > 0 ? most[tile] / total * whole : 0;
}

/* Adds the softmaxes of some queries of a head, each times `whole`, to sums[tokens]. */
INLINED void add_softmaxes(const Codes *from, int64_t head, int64_t first, int64_t queries, float whole, float *room, float *sums) {
    int64_t tiles = tiles_of(from), padded = tiles * TILE, step = queries == AT_ONCE ? AT_ONCE : 1;
    float *most = room + queries * padded, *share = most + queries * tiles;
    for (int64_t tile = 0; tile < tiles; tile++) {
        Part part = part_of(from, head * tiles + tile);
        int64_t count = part.known - part.start;
        for (int64_t query = 0; query < queries; query += step)
            add_tile(from, part.codes, count, head * from->queries + first + query, step, room + query * padded + part.start, padded);
        for (int64_t query = 0; query < queries; query++)
            exponentiate(room + query * padded + part.start, count, most + query * tiles + tile, share + query * tiles + tile);
    }
    for (int64_t query = 0; query < queries; query++) {
        find_shares(most + query * tiles, share + query * tiles, tiles, whole);
        for (int64_t tile = 0; tile < tiles; tile++) {
            Part part = part_of(from, head * tiles + tile);
            const float *weights = room + query * padded, of = share[query * tiles + tile];
            for (int64_t at = part.start; at < part.known; at++) sums[at] += weights[at] * of;
        }
    }
}

/* Computes the contribution of a chunk of the queries of a group of heads to its mean. */
FOR_EACH_PROCESSOR static void chunk_sums(const void *job, int64_t piece) {
    const Softmax *in = job;
    const Codes *from = &in->from;
    int64_t heads = from->heads / in->groups, each = (from->queries + AT_ONCE - 1) / AT_ONCE, chunk = piece % in->chunks;
    float *room = room_for(AT_ONCE * tiles_of(from) * (TILE + 2)), *sums = in->partial + piece * from->tokens;
    if (!room) {
        atomic_store(in->failed, 1);
        return;
    }
    memset(sums, 0, from->tokens * sizeof *sums);
    for (int64_t at = chunk * heads * each / in->chunks; at < (chunk + 1) * heads * each / in->chunks; at++) {
        int64_t head = piece / in->chunks * heads + at / each, first = at % each * AT_ONCE;
        add_softmaxes(from, head, first, shorter(AT_ONCE, from->queries - first), 1.0f / (heads * from->queries), room, sums);
    }
}

/* Computes the mean of a tile of one group of heads. */
FOR_EACH_PROCESSOR static void tile_mean(const void *job, int64_t piece) {
    const Softmax *in = job;
    int64_t tokens = in->from.tokens, tiles = tiles_of(&in->from), group = piece / tiles, start = piece % tiles * TILE;
    int64_t stop = shorter(start + TILE, tokens);
    const float *partial = in->partial + group * in->chunks * tokens;
    float *mean = in->mean + group * tokens;
    for (int64_t at = start; at < stop; at++) mean[at] = partial[at];
    for (int64_t chunk = 1; chunk < in->chunks; chunk++)
        for (int64_t at = start; at < stop; at++) mean[at] += partial[chunk * tokens + at];
}

/* ---- the interface */

/* Takes codes [F, X, N], q [F, Q, D], step [F, Q] and stored [S], F a multiple of S; returns an error message, or NULL. */
static const char *take_codes(const XLA_FFI_CallFrame *call, Codes *from) {
    const XLA_FFI_Buffer *codes = operand(call, 0), *q = operand(call, 1), *step = operand(call, 2), *stored = operand(call, 3);
    int64_t rank = codes->rank;
    if (rank < 3 || !is_of(codes, XLA_FFI_DataType_U8, rank) || !is_of(q, XLA_FFI_DataType_S8, rank) ||
        !is_of(step, XLA_FFI_DataType_F32, rank - 1) || !is_of(stored, XLA_FFI_DataType_S32, rank - 3))
        return "codes: types or ranks of operands";
    *from = (Codes){codes->data, q->data, step->data, stored->data, NULL, leading(codes, 2), last(codes, 2), last(codes, 1),
                    last(q, 2), leading(stored, 0)};
    int64_t each = from->bytes ? last(q, 1) / from->bytes : 0;
    if ((each != 1 && each != 2 && each != 4) || each * from->bytes != last(q, 1) || leading(q, 2) != from->heads ||
        leading(step, 1) != from->heads || last(step, 1) != from->queries ||
        (from->heads && (from->sequences < 1 || from->heads % from->sequences)))
        return "codes: sizes do not agree";
    from->bits = (int)(8 / each);
    return NULL;
}

/* Handles the operands of `take_codes`; the result is [F, Q, N]. */
XLA_FFI_Error *on_codes(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 4 || call->rets.size != 1) return refused(call, "codes: 4 operands and a result");
    Codes from;
    const XLA_FFI_Buffer *out = result(call, 0);
    const char *why_not = take_codes(call, &from);
    if (why_not) return refused(call, why_not);
    if (out->rank < 3 || out->dtype != XLA_FFI_DataType_F32 || leading(out, 2) != from.heads || last(out, 2) != from.queries ||
        last(out, 1) != from.tokens)
        return refused(call, "codes: the result");
    from.out = out->data;
    in_pieces(call, code_products, &from, from.heads * tiles_of(&from), work_of(&from));
    return NULL;
}

/* Handles the operands of `take_codes`; results are sums [G, C, N] of C chunks of each group's queries and means
 * [G, N], G a divisor of F. */
XLA_FFI_Error *on_softmax(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 4 || call->rets.size != 2) return refused(call, "softmax: 4 operands and 2 results");
    atomic_int failed = 0;
    Softmax in = {.failed = &failed};
    Codes *from = &in.from;
    const char *why_not = take_codes(call, from);
    if (why_not) return refused(call, why_not);
    const XLA_FFI_Buffer *partial = result(call, 0), *mean = result(call, 1);
    if (partial->dtype != XLA_FFI_DataType_F32 || mean->dtype != XLA_FFI_DataType_F32 || mean->rank < 2 || partial->rank < 3 ||
        last(mean, 1) != from->tokens || last(partial, 1) != from->tokens || leading(mean, 1) < 1 ||
        from->heads % leading(mean, 1) || leading(partial, 1) < 1 || leading(partial, 1) % leading(mean, 1))
        return refused(call, "softmax: results");
    in.partial = partial->data;
    in.mean = mean->data;
    in.groups = leading(mean, 1);
    in.chunks = leading(partial, 1) / in.groups;
    in_pieces(call, chunk_sums, &in, in.groups * in.chunks, work_of(from));
    if (atomic_load(&failed)) return refused(call, "softmax: there is no memory");
    in_pieces(call, tile_mean, &in, in.groups * tiles_of(from), in.groups * in.chunks * from->tokens);
    return NULL;
}
