/* What XLA:CPU is slow at, called by compiled programs through XLA's foreign function interface: reading rows where they
 * lie in a pool instead of gathering them first, and products with keys in a few bits. Shapes are in kernels.py.
 *
 * Sums are over eight lanes whatever the processor has, so that only the rounding of fused operations depends on it.
 */
#include "ffi.h"

#include <math.h>
#include <pthread.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions alone */

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINED static inline __attribute__((always_inline))

#define LANES 8
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* The sum of each of four vectors. */
INLINED Four sums_of_four(const Lanes *x) {
    Lanes ab = __builtin_shufflevector(x[0], x[1], 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(x[0], x[1], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes cd = __builtin_shufflevector(x[2], x[3], 0, 8, 1, 9, 4, 12, 5, 13) +
               __builtin_shufflevector(x[2], x[3], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(all, all, 0, 1, 2, 3) + __builtin_shufflevector(all, all, 4, 5, 6, 7);
}

/* ---- attention over rows of a pool: f32, or the bits of bfloat16 */

#define FOUR 4       /* queries that meet a row while it is in registers */
#define TILE_ROWS 32 /* rows whose keys and values stay in the processor's nearest cache */
#define SEGMENT 4096    /* tokens of a head that one thread attends, where they are more */
#define NEGATIVE -1e30f /* as in attention.py */

typedef struct {
    const char *keys, *values;        /* [have, size] */
    const int32_t *key_at, *value_at; /* [heads, tokens] */
    const uint8_t *valid;             /* [heads, tokens] */
    const float *q, *bias;            /* [heads, queries, size], [heads, queries, tokens] or none */
    float *out, *top, *total;         /* [heads, segments, queries, size], and without size */
    int64_t have_keys, have_values, heads, segments, tokens, queries, size; /* queries are whole fours */
    int wide; /* f32 */
} Rows;

/* The valid ones of some rows, as many as fit, and the last key once more, as keys are taken in pairs. */
typedef struct {
    const char *key[TILE_ROWS + 1], *value[TILE_ROWS + 1];
    int64_t at[TILE_ROWS];
    int count;
} Tile;

/* Of each row of a tile and of four queries: scores, then weights. */
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

INLINED void ask_for(const char *row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
}

INLINED Lanes twice(Four x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }

INLINED Four half(Lanes x, int which) {
    if (which) return __builtin_shufflevector(x, x, 4, 5, 6, 7);
    return __builtin_shufflevector(x, x, 0, 1, 2, 3);
}

INLINED Lanes larger(Lanes a, Lanes b) {
    Integers b_is = a < b;
    return (Lanes)((b_is & (Integers)b) | (~b_is & (Integers)a));
}

/* e to the power of numbers from -87 to 0, and of -87 where they are less: within 2 units in the last place (the
 * polynomial of Cephes' expf). */
INLINED Lanes exponentials(Lanes x) {
    x = larger(x, (Lanes){-87, -87, -87, -87, -87, -87, -87, -87});
    Lanes whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded: there are no bits for fractions */
    Lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Lanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (Lanes)((__builtin_convertvector(whole, Integers) + 127) << 23);
}

/* Fills a tile with rows of a head from `first` on; returns the first that did not fit. */
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

/* Products of a tile's keys with four queries. Rows of the next tile are asked for meanwhile. */
INLINED void score(const Tile *tile, const Tile *next, const float *q, int64_t size, int wide, Weights *scores) {
    for (int row = 0; row < tile->count; row += 2) {
        Lanes sums[2 * FOUR] = {{0}};
        Four rest[2] = {{0}};
        int64_t at = 0;
        for (int i = row; next && i < row + 2; i++) {
            ask_for(next->key[i], size * (wide ? 4 : 2));
            ask_for(next->value[i], size * (wide ? 4 : 2));
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

/* Scores become weights relative to the largest so far; what was summed before is scaled to that. */
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

/* Adds a tile's values, each times its weight, to `vectors` vectors of the sums of four queries. */
INLINED void add_vectors(const Tile *tile, const Weights *weights, int vectors, int64_t size, int64_t at, int wide, float *out) {
    Lanes sums[FOUR][2];
    for (int query = 0; query < FOUR; query++)
        for (int j = 0; j < vectors; j++) sums[query][j] = *(Lanes *)(out + query * size + at + j * LANES);
    for (int row = 0; row < tile->count; row++)
        for (int j = 0; j < vectors; j++) {
            Lanes numbers = lanes_of(tile->value[row], at + j * LANES, wide);
            for (int query = 0; query < FOUR; query++) sums[query][j] += weights->of[row][query] * numbers;
        }
    for (int query = 0; query < FOUR; query++)
        for (int j = 0; j < vectors; j++) *(Lanes *)(out + query * size + at + j * LANES) = sums[query][j];
}

INLINED void add_values(const Tile *tile, const Weights *weights, int64_t size, int wide, float *out) {
    int64_t at = 0;
    for (; at + 2 * LANES <= size; at += 2 * LANES) add_vectors(tile, weights, 2, size, at, wide, out);
    for (; at + LANES <= size; at += LANES) add_vectors(tile, weights, 1, size, at, wide, out);
    for (; at < size; at++)
        for (int row = 0; row < tile->count; row++)
            for (int query = 0; query < FOUR; query++)
                out[query * size + at] += weights->of[row][query] * number_of(tile->value[row], at, wide);
}

/* Attention of all queries of a head over a segment of its tokens. */
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
            score(tile, i ? NULL : tiles + !turn, q + i * FOUR * size, size, wide, &weights);
            for (int j = 0; bias && j < FOUR * tile->count; j++)
                weights.of[j / FOUR][j % FOUR] += bias[j % FOUR * from->tokens + tile->at[j / FOUR]];
            weigh(tile->count, &weights, size, out + i * FOUR * size, top + i, total + i);
            add_values(tile, &weights, size, wide, out + i * FOUR * size);
        }
    }
}

FOR_EACH_PROCESSOR static void row_attention(const void *rows, int64_t piece) {
    const Rows *from = rows;
    if (from->wide) attend_segment(from, piece, 1);
    else attend_segment(from, piece, 0);
}

/* ---- codes of a few bits, dimension by dimension */

#define AT_ONCE 4  /* queries whose sums are in registers together */
#define BATCH 32   /* tokens whose bytes are one vector */
#define TILE 2048  /* tokens whose sums stay in the processor's nearest cache */
#define TOGETHER 8 /* bytes of a token whose products fit into 16 bits: 8 * 2 * 15 * 127 */

typedef struct {
    const uint8_t *codes; /* [heads, bytes, tokens] */
    const int8_t *q; /* [heads, queries, size] */
    const float *step; /* [heads, queries] what a product of 1 stands for */
    const int32_t *stored; /* [sequences] tokens that there are */
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
/* The same with two levels of a token side by side in bytes, whose products are added up in 16 bits. */
__attribute__((target("avx2"), always_inline)) static inline void add_pairs(
    const uint8_t *codes, int64_t tokens, const int8_t *q, int64_t size, int rows, const int bits, const int queries,
    int32_t *sums) {
    const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
    __m256i found[2 * AT_ONCE];
    for (int i = 0; i < 2 * queries; i++) found[i] = _mm256_setzero_si256();
    for (int row = 0; row < rows; row++) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(codes + row * tokens));
#pragma GCC unroll 2
        for (int shift = 0; shift < 8; shift += 2 * bits) {
            __m256i one = _mm256_and_si256(_mm256_srli_epi16(bytes, shift), mask);
            __m256i two = _mm256_and_si256(_mm256_srli_epi16(bytes, shift + bits), mask);
            __m256i near = _mm256_unpacklo_epi8(one, two), far = _mm256_unpackhi_epi8(one, two);
            for (int query = 0; query < queries; query++) {
                int16_t pair;
                memcpy(&pair, q + query * size + (row * 8 + shift) / bits, sizeof pair);
                __m256i numbers = _mm256_set1_epi16(pair);
                found[2 * query] = _mm256_add_epi16(found[2 * query], _mm256_maddubs_epi16(near, numbers));
                found[2 * query + 1] = _mm256_add_epi16(found[2 * query + 1], _mm256_maddubs_epi16(far, numbers));
            }
        }
    }
    for (int query = 0; query < queries; query++)
        for (int part = 0; part < 4; part++) { /* tokens 8 * part and on: halves of 128 bits are apart */
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

/* The scores of `count` tokens, a tile at most, whose bytes begin at `codes`, with `queries` queries from `line` on, those of
 * a query `apart` from the last one's. */
static void add_tile(const Codes *from, const uint8_t *codes, int64_t count, int64_t line, int queries, float *out,
                     int64_t apart) {
    int64_t each = 8 / from->bits, size = from->bytes * each, whole = count - count % BATCH;
    const float zero = from->bits == 2 ? 1.5f : (float)((1 << (from->bits - 1)) - 1); /* the level of the code 0 */
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

/* Bytes that are gone through, once for as many queries as meet them together. */
INLINED int64_t work_of(const Codes *from) {
    return from->heads * from->bytes * from->tokens * ((from->queries + AT_ONCE - 1) / AT_ONCE);
}

INLINED int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct { /* some queries and tokens of one head */
    int64_t head, start, stop, known; /* from `known` on tokens are not stored */
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

/* The scores of one tile of one head. */
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

/* ---- the mean of many queries' softmaxes */

typedef struct {
    Codes from; /* without `out` */
    float *partial; /* [groups, chunks, tokens] what some queries of a group add to its mean */
    float *mean; /* [groups, tokens] */
    int64_t groups, chunks;
    atomic_int *failed; /* whether there was no memory */
} Softmax;

typedef struct {
    float *floats;
    int64_t held;
} Room;

static pthread_key_t rooms; /* a thread's Room, which goes with it */

static void free_room(void *room) {
    free(((Room *)room)->floats);
    free(room);
}

/* Memory of this thread for exponentials of a few queries, which stays for the next: an array for all of them would leave
 * the processor's caches before it is read again. NULL if there is none. */
static float *room_for(int64_t floats) {
    Room *room = pthread_getspecific(rooms);
    if (!room) {
        room = calloc(1, sizeof *room);
        if (!room || pthread_setspecific(rooms, room)) {
            free(room);
            return NULL;
        }
    }
    if (!room->floats || floats > room->held) {
        free(room->floats);
        room->held = floats / 1024 * 1024 + 1024;
        room->floats = aligned_alloc(64, room->held * sizeof *room->floats);
    }
    return room->floats;
}

/* Exponentials of scores[count] less the highest of them, in their place; the highest, and their sum. */
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

/* The highest score and the sum of exponentials of each tile of a query become what its exponentials are to be multiplied
 * with, of which all are to add up to `whole`. */
static void find_shares(float *most, float *share, int64_t tiles, float whole) {
    float highest = -INFINITY, total = 0;
    for (int64_t tile = 0; tile < tiles; tile++) highest = most[tile] > highest ? most[tile] : highest;
    for (int64_t tile = 0; tile < tiles; tile++) {
        most[tile] = most[tile] > -INFINITY ? expf(most[tile] - highest) : 0;
        total += share[tile] * most[tile];
    }
    for (int64_t tile = 0; tile < tiles; tile++) share[tile] = total > 0 ? most[tile] / total * whole : 0;
}

/* Adds the softmaxes of some of a head's queries, each times `whole`, to sums[tokens]. */
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

/* What a chunk of the queries of a group of heads adds to its mean. */
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

/* The mean of a tile of one group of heads. */
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

/* ---- slots for blocks */

typedef struct {
    const int32_t *block, *keys, *need; /* of a head: [slots], [slots, policy], [asked] */
    int32_t *slot, *read, *new, *pinned; /* of a head: [asked] twice, [slots] twice */
    int64_t slots, policy, asked;
    int32_t none;        /* as many as there are blocks */
    int32_t *heap;       /* [slots] */
    int32_t *at;         /* [places], slots by their blocks, -1 = none */
    uint32_t places;     /* a power of two */
} Slots;

/* Where the slot of a block is noted, or may be. */
static uint32_t place_of(const Slots *in, int32_t block) {
    uint32_t place = (uint32_t)block * 2654435761u & (in->places - 1);
    while (in->at[place] >= 0 && in->block[in->at[place]] != block) place = (place + 1) & (in->places - 1);
    return place;
}

static int turn_of(const Slots *in, int32_t slot) { return in->pinned[slot] ? 2 : in->block[slot] != in->none; }

/* Whether slot a is given away before slot b: empty ones, those of the policy, pinned ones. A policy of one key says
 * nothing of empty and pinned ones. */
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

/* Finds the needed blocks of one head, and gives each missing one the next slot that is given away. Where no block is
 * needed, the slot is the last that was given away, or the first that would be. */
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

/* ---- the interface */

/* Keys [R, D], index [K, N], values [R2, D], index [K, N], valid [K, N], q [K, G, D] and bias [K, G, N] or [K, G, 0];
 * to out [K, S, G, D], top and total [K, S, G]. */
static XLA_FFI_Error *on_rows(XLA_FFI_CallFrame *call) {
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

/* Codes [F, X, N], q [F, Q, D], step [F, Q] and stored [S], of which F is a multiple; why not. */
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

/* To [F, Q, N]. */
static XLA_FFI_Error *on_codes(XLA_FFI_CallFrame *call) {
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

/* To sums [G, C, N] of C chunks of each group's queries, and means [G, N], G a divisor of F. */
static XLA_FFI_Error *on_softmax(XLA_FFI_CallFrame *call) {
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

/* Blocks [KB, NS], keys [KB, NS, P], needed blocks [KB, M] and NB []; to what `Slots` has. */
static XLA_FFI_Error *on_assign(XLA_FFI_CallFrame *call) {
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
    one.none = heads ? *(const int32_t *)none->data : 0; /* of a batch alike */
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

static const Target kernels[] = {{"row_attention", on_rows}, {"code_products", on_codes}, {"code_softmax", on_softmax},
                                 {"assign", on_assign}, {NULL, NULL}};

/* handlers() -> {name: capsule} */
static PyObject *handlers(PyObject *self, PyObject *none) { return capsules(kernels); }

static PyMethodDef methods[] = {{"handlers", handlers, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    return pthread_key_create(&rooms, free_room) ? PyErr_NoMemory() : with_version(PyModule_Create(&module));
}
