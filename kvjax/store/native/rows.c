/* Copies the rows that a token adds to blocks from XLA's memory to Python's arrays. */
#include "rows.h"
#include "arguments.h"

typedef struct { /* the shape of a layer, and the format of its elements in the buffer protocol */
    long long batch, heads, num_blocks, block_rows, width, item;
    const char *format;
} Layer;

/* put_rows(block, row, rows, (ids, places, data), count, first, (batch, heads, num_blocks, block_rows, width, item, format))
 * -> count */
PyObject *put_rows(PyObject *self, PyObject *args) {
    Buffers buffers = {.count = 0};
    PyObject *given[3], *to[3];
    long long count, first;
    Layer layer;
    if (!PyArg_ParseTuple(args, "OOO(OOO)LL(LLLLLLs)", &given[0], &given[1], &given[2], &to[0], &to[1], &to[2], &count, &first,
                          &layer.batch, &layer.heads, &layer.num_blocks, &layer.block_rows, &layer.width, &layer.item,
                          &layer.format))
        return NULL;
    WRITE(int64_t, ids, to[0]);
    WRITE(int32_t, places, to[1]);
    WRITE(char, data, to[2]);
    int64_t lanes = layer.batch * layer.heads, row_bytes = layer.width * layer.item;
    if (count < 0 || places_size != ids_size || data_size != ids_size * row_bytes)
        return refuse(&buffers, "put_rows: sizes do not agree");
    const long long shape[] = {layer.batch, layer.heads, layer.width};
    const int32_t *block = take_shaped(&buffers, given[0], sizeof *block, 0, "i", 2, shape), *row = NULL;
    if (block) row = take_shaped(&buffers, given[1], sizeof *row, 0, "i", 2, shape);
    const char *rows = row ? take_shaped(&buffers, given[2], layer.item, 0, layer.format, 3, shape) : NULL;
    if (!rows || count + lanes > ids_size) {
        release(&buffers);
        return PyLong_FromLong(-1);
    }
    for (int64_t lane = 0; lane < lanes; lane++) {
        if (block[lane] < 0 || block[lane] >= layer.num_blocks || row[lane] < 0 || row[lane] >= layer.block_rows) continue;
        ids[count] = first + lane * layer.num_blocks + block[lane];
        places[count] = row[lane];
        memcpy(data + count++ * row_bytes, rows + lane * row_bytes, row_bytes);
    }
    release(&buffers);
    return PyLong_FromLongLong(count);
}
