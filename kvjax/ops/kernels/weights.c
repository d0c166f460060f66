/* Products of a weight matrix with a few vectors, at the speed at which memory gives the weights. */
#include "kernels.h"
#include "lanes.h"

#include <string.h>

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

#define BLOCK 64         /* inputs processed together */
#define GROUP 32         /* inputs that share a scale in 4 bits */
#define AHEAD 4096       /* bytes that are asked for before they are needed, at least */
#define PIECE (64 << 10) /* bytes of weights that one thread multiplies at a time, about */
#define ROWS 4           /* rows multiplied together */

#define UNROLLED _Pragma("GCC unroll 8") /* else sums are not kept in registers, and shifts are not constant */

enum { BRAIN = 1, EIGHT, FOUR }; /* bfloat16, int8, int4: the logarithm of the weights in a word of 32 bits */

typedef struct {
    const char *weights; /* [rows, bytes] */
    const void *scale;   /* f32 [rows] of int8, bfloat16 [rows, groups] of int4 */
    const float *x;      /* [vectors, width] in the order of `place_of`, with zeros behind the inputs */
    char *out;           /* [vectors, rows] */
    int64_t rows, groups, width, vectors, bytes, each; /* width: inputs in whole blocks; each: rows of a piece */
    int type, brain;     /* brain: whether the result is bfloat16 */
} Product;

/* Returns where the kernel reads an input: first those of the first weights of eight words, then those of the second. */
INLINED int64_t place_of(int64_t input, int type) {
    int64_t words = (int64_t)LANES << type, at = input % words;
    return input - at + (at & ((1 << type) - 1)) * LANES + (at >> type);
}

/* Returns the weights `part` of a block; those of int8 times 2^24, and those of int4 times 2^28. */
INLINED Lanes weights_of(const char *block, int part, int type) {
    int place = part & ((1 << type) - 1), bits = 32 >> type;
    Words words = ((const Words *)block)[part >> type];
    words <<= 32 - bits * (place + 1);
    if (place) words &= ~(uint32_t)0 << (32 - bits); /* else zeros came in */
    return type == BRAIN ? (Lanes)words : __builtin_convertvector((Integers)words, Lanes);
}

INLINED float widened(uint16_t brain) {
    uint32_t bits = (uint32_t)brain << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Rounds to the nearest bfloat16, to even if there are two. */
INLINED uint16_t narrowed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return number != number ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

INLINED float sum_of(Lanes x) {
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return x[0] + x[1];
}

/* Returns the scale of each word of a block in 4 bits: of the first four and of the last four. */
INLINED Lanes scales_of(const Product *in, int64_t row, int64_t block) {
    const uint16_t *scale = (const uint16_t *)in->scale + row * in->groups + 2 * block;
    uint32_t both = scale[0];
    if (2 * block + 1 < in->groups) both |= (uint32_t)scale[1] << 16;
    return (Lanes)((((Words){0} + both) << (Words){16, 16, 16, 16, 0, 0, 0, 0}) & 0xFFFF0000u);
}

/* Returns by what the sum of a row is multiplied at the end. */
INLINED float end_of(const Product *in, int64_t row, int type) {
    return type == FOUR ? 0x1p-28f : type == EIGHT ? ((const float *)in->scale)[row] * 0x1p-24f : 1;
}

/* Adds the products of one block of some rows with some vectors. */
INLINED void add_products(const char *const *at, const float *x, int64_t width, int rows, int vectors, int type, Lanes *sums) {
    UNROLLED
    for (int part = 0; part < BLOCK / LANES; part++)
        UNROLLED
        for (int i = 0; i < rows; i++) {
            Lanes weights = weights_of(at[i], part, type);
            UNROLLED
            for (int j = 0; j < vectors; j++) sums[i * vectors + j] += weights * *(const Lanes *)(x + j * width + part * LANES);
        }
}

/* Adds the products of one block, those of int4 times their scales. */
INLINED void add_block(const Product *in, const char *const *at, const float *x, int64_t row, int64_t block, int rows, int vectors,
                       int type, Lanes *sums) {
    if (type != FOUR) {
        add_products(at, x, in->width, rows, vectors, type, sums);
        return;
    }
    UNROLLED
    for (int i = 0; i < rows; i++) {
        Lanes own[2] = {{0}}, scales = scales_of(in, row + i, block);
        add_products(at + i, x, in->width, 1, vectors, type, own);
        UNROLLED
        for (int j = 0; j < vectors; j++) sums[i * vectors + j] += own[j] * scales;
    }
}

/* Multiplies some rows with some vectors. A product is summed in the same order, however many rows and vectors there are. */
INLINED void multiply(const Product *in, int64_t row, int64_t vector, int rows, int vectors, int type) {
    Lanes sums[2 * ROWS];
    const char *at[ROWS];
    const float *x = in->x + vector * in->width;
    int64_t bytes = BLOCK * 4 >> type, blocks = in->bytes / bytes, tile = rows * in->bytes;
    int64_t ahead = (AHEAD + tile - 1) / tile * tile;
    for (int i = 0; i < rows * vectors; i++) sums[i] = (Lanes){0};
    for (int i = 0; i < rows; i++) at[i] = in->weights + (row + i) * in->bytes;
    for (int64_t block = 0; block < blocks; block++, x += BLOCK) {
        for (int i = 0; !vector && i < rows; i++)
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at[i] + ahead + line, 0, 2);
        add_block(in, at, x, row, block, rows, vectors, type, sums);
        for (int i = 0; i < rows; i++) at[i] += bytes;
    }
    if (blocks * bytes < in->bytes) { /* the last inputs, with zeros behind them */
        char rest[ROWS][BLOCK * 4] = {{0}};
        for (int i = 0; i < rows; i++) at[i] = memcpy(rest[i], at[i], in->bytes - blocks * bytes);
        add_block(in, at, x, row, blocks, rows, vectors, type, sums);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) {
            float sum = sum_of(sums[i * vectors + j]) * end_of(in, row + i, type);
            int64_t to = (vector + j) * in->rows + row + i;
            if (in->brain) ((uint16_t *)in->out)[to] = narrowed(sum);
            else ((float *)in->out)[to] = sum;
        }
}

/* Multiplies the rows of a piece with all vectors, two at a time, for which the piece stays in the second-level cache. */
INLINED void multiply_piece(const Product *in, int64_t piece, int type) {
    int64_t first = piece * in->each, stop = first + in->each < in->rows ? first + in->each : in->rows;
    for (int64_t vector = 0; vector < in->vectors; vector += 2) {
        int64_t row = first;
        if (vector + 1 < in->vectors)
            for (; row + ROWS <= stop; row += ROWS) multiply(in, row, vector, ROWS, 2, type);
        else
            for (; row + ROWS <= stop; row += ROWS) multiply(in, row, vector, ROWS, 1, type);
        for (; row < stop; row++)
            for (int64_t i = vector; i < in->vectors && i < vector + 2; i++) multiply(in, row, i, 1, 1, type);
    }
}

FOR_EACH_PROCESSOR static void weight_products(const void *job, int64_t piece) {
    const Product *in = job;
    switch (in->type) {
    case BRAIN: multiply_piece(in, piece, BRAIN); break;
    case EIGHT: multiply_piece(in, piece, EIGHT); break;
    default: multiply_piece(in, piece, FOUR);
    }
}

/* ---- the interface */

static int type_of(const XLA_FFI_Buffer *weights) {
    switch (weights->dtype) {
    case XLA_FFI_DataType_BF16: return BRAIN;
    case XLA_FFI_DataType_S8: return EIGHT;
    case XLA_FFI_DataType_U8: return FOUR;
    default: return -1;
    }
}

/* Copies vectors as f32, in the kernel's order. */
static void widen(const XLA_FFI_Buffer *x, int64_t width, int type, float *to) {
    int64_t vectors = x->dims[0], size = x->dims[1];
    memset(to, 0, vectors * width * sizeof *to);
    for (int64_t j = 0; j < vectors; j++, to += width)
        for (int64_t i = 0; i < size; i++)
            to[place_of(i, type)] = x->dtype == XLA_FFI_DataType_F32 ? ((const float *)x->data)[j * size + i]
                                                                     : widened(((const uint16_t *)x->data)[j * size + i]);
}

/* Handles weights [Y, X] in bfloat16 or int8, or [Y, (X + 1) / 2] in int4, their scales [Y, 0], f32 [Y, 1] of int8 or
 * bfloat16 [Y, (X + 31) / 32] of int4, and x [T, X] in f32 or bfloat16; the result [T, Y] has x's type. */
XLA_FFI_Error *on_weights(XLA_FFI_CallFrame *call) {
    if (asks_version(call)) return NULL;
    if (call->args.size != 3 || call->rets.size != 1) return refused(call, "weights: 3 operands and a result");
    const XLA_FFI_Buffer *weights = operand(call, 0), *scale = operand(call, 1), *x = operand(call, 2), *out = result(call, 0);
    int type = type_of(weights), brain = x->dtype == XLA_FFI_DataType_BF16;
    if (type < 0 || weights->rank != 2 || x->rank != 2 || (!brain && x->dtype != XLA_FFI_DataType_F32))
        return refused(call, "weights: types or ranks of operands");
    int64_t size = x->dims[1], groups = (size + GROUP - 1) / GROUP, rows = weights->dims[0], vectors = x->dims[0];
    if (!size || weights->dims[1] != (type == FOUR ? (size + 1) / 2 : size) || !has(out, x->dtype, (const int64_t[]){vectors, rows, -1}) ||
        (type == EIGHT && !HAS(scale, F32, rows, 1)) || (type == FOUR && !HAS(scale, BF16, rows, groups)))
        return refused(call, "weights: sizes do not agree");
    if (!rows || !vectors) return NULL;
    Product in = {weights->data, scale->data, NULL, out->data, rows, groups, (size + BLOCK - 1) / BLOCK * BLOCK, vectors,
                  weights->dims[1] * (type == BRAIN ? 2 : 1), 0, type, brain};
    float *reordered = room_for(vectors * in.width);
    if (!reordered) return refused(call, "weights: no memory for the vectors");
    widen(x, in.width, type, reordered);
    in.x = reordered;
    in.each = (PIECE / (in.bytes + 1) + ROWS) / ROWS * ROWS;
    in_pieces(call, weight_products, &in, (rows + in.each - 1) / in.each, rows * size * vectors);
    return NULL;
}
