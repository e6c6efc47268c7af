/* Packed linear: y = x W^T + b. W is packed elements [out / 32][in / PACK][32][PACK], or integers: cpu_quantized.h.
 *
 * An output is one chain of multiply-adds over its row's words in order, in float32 cut into pieces of MAX_SUM inputs
 * summed in order. Which rows are computed together does not enter it. */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include "activation/cpu_kernel.h"
#include "linear/cpu_quantized.h"
#include "native/model.h"
#include "native/simd.h"

enum { TILE_ROWS = LANE_REGISTERS >= 32 ? 12 : 3 };
/* Rows of an item lie in the second-level cache together, and there are at most so many. */
enum { PANEL_BYTES = 480 * 1024, PANEL_ROWS = 192 };
enum { MAX_SUM = 32 };
enum { MANY_ROWS = 6 }; /* see ask_weights */

/* What becomes of the sums of a block of 32 outputs. */
enum {
    TO_ELEMENTS, /* y, elements */
    TO_SUM,      /* added to y, float32: the residual stream */
    TO_GATED,    /* y, elements: 16 gates and 16 ups of a block become 16 values silu(gate) * up */
    TO_FLOATS,   /* y, float32: logits */
};

typedef struct {
    const baton_linear *linear;
    const element *x;
    void *y;
    long rows, x_stride, y_stride; /* strides in elements of their kind */
    int kind;
    void *quantized; /* where rows are quantized to, for a linear of integers */
} NAME(product);

INLINE long NAME(words)(long in) { return pieces(in, PACK); }

/* 32 sums of `rows` rows, at most TILE_ROWS; `rows` is a constant wherever this is expanded. */
INLINE void NAME(tile)(const int rows, const element *x, long stride, const element *w, long in,
                       float sums[][BLOCK]) {
    lanes acc[TILE_ROWS][2];
    const long whole = in / PACK, piece = BATON_BFLOAT16 ? whole : MAX_SUM;
    for (long begin = 0; begin < larger(whole, 1); begin += larger(piece, 1)) {
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = zeros();
        const long end = smaller(whole, begin + piece);
        for (long k = begin; k < end; k++) {
            const char *p = (const char *)w + k * BLOCK * 4;
            ask_weights(rows >= MANY_ROWS, p);
            words16 w0 = load_words(p), w1 = load_words(p + 64);
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                words16 v = word(x + m * stride + k * PACK);
                acc[m][0] = multiply_add(acc[m][0], w0, v);
                acc[m][1] = multiply_add(acc[m][1], w1, v);
            }
        }
#if BATON_BFLOAT16
        if (in % PACK) {
            const char *p = (const char *)w + whole * BLOCK * 4;
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                words16 v = fill_words(x[m * stride + in - 1]);
                acc[m][0] = multiply_add(acc[m][0], load_words(p), v);
                acc[m][1] = multiply_add(acc[m][1], load_words(p + 64), v);
            }
        }
#endif
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                lanes sum = begin ? add(load(sums[m] + h * LANES), acc[m][h]) : acc[m][h];
                store(sums[m] + h * LANES, sum);
            }
    }
}

#define TILE_OF(n) \
    case n: NAME(tile)(ROWS_OF(n, TILE_ROWS), x, stride, w, in, sums); break;

static void NAME(tiles)(int rows, const element *x, long stride, const element *w, long in,
                        float sums[][BLOCK]) {
    switch (rows) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
        TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
    }
}
#undef TILE_OF

/* 16 sums each of `rows` rows, biased, to where they go: y is the first row's place. `kind` is a constant here. */
INLINE void NAME(finish_half)(const NAME(product) *p, const int kind, char *y, int rows, lane_mask mask,
                              const float (*sums)[BLOCK], lanes bias) {
    const long stride = p->y_stride * (kind == TO_ELEMENTS ? (long)sizeof(element) : (long)sizeof(float));
    for (int m = 0; m < rows; m++, y += stride) {
        const lanes v = add(load(sums[m]), bias);
        if (kind == TO_ELEMENTS)
            store_lanes((element *)y, mask, v);
        else
            store_part((float *)y, mask, kind == TO_FLOATS ? v : add(load_part((float *)y, mask), v));
    }
}

INLINE void NAME(finish_gated)(const NAME(product) *p, long block, long row, int rows, const float (*sums)[BLOCK],
                               lanes gate_bias, lanes up_bias) {
    const lane_mask mask = first_lanes(p->linear->out / 2 - block * LANES);
    element *y = (element *)p->y + row * p->y_stride + block * LANES;
    for (int m = 0; m < rows; m++, y += p->y_stride)
        store_lanes(y, mask, silu_mul(add(load(sums[m]), gate_bias), add(load(sums[m] + LANES), up_bias)));
}

/* The sums of block `block` for rows from `row` on into y. */
static void NAME(finish)(const NAME(product) *p, long block, long row, int rows, const float (*sums)[BLOCK]) {
    lanes bias[2];
    for (int h = 0; h < 2; h++) /* minus zero changes nothing */
        bias[h] = p->linear->bias ? load(p->linear->bias + block * BLOCK + h * LANES) : fill(-0.0f);
    if (p->kind == TO_GATED) {
        NAME(finish_gated)(p, block, row, rows, sums, bias[0], bias[1]);
        return;
    }
    for (int h = 0; h < 2; h++) {
        const long first = block * BLOCK + h * LANES, at = row * p->y_stride + first;
        const lane_mask mask = first_lanes(p->linear->out - first);
        const float (*half)[BLOCK] = (const float (*)[BLOCK])(sums[0] + h * LANES);
        if (!mask) return;
        if (p->kind == TO_ELEMENTS)
            NAME(finish_half)(p, TO_ELEMENTS, (char *)((element *)p->y + at), rows, mask, half, bias[h]);
        else if (p->kind == TO_FLOATS)
            NAME(finish_half)(p, TO_FLOATS, (char *)((float *)p->y + at), rows, mask, half, bias[h]);
        else
            NAME(finish_half)(p, TO_SUM, (char *)((float *)p->y + at), rows, mask, half, bias[h]);
    }
}

/* ------------------------------------------------------------------------------------------------- rows, tiles, items */

/* Most rows of a tile. Few rows of integers are one, which reads the weights once; for many, narrow tiles are faster. */
INLINE long NAME(tile_rows)(const NAME(product) *p) {
    if (p->linear->format == FORMAT_ELEMENTS) return TILE_ROWS;
    return p->rows <= QUANTIZED_ROWS ? QUANTIZED_ROWS : HELD_ROWS;
}

INLINE long NAME(panel_rows)(const NAME(product) *p) {
    const baton_linear *linear = p->linear;
    const long row = linear->in * (linear->format == FORMAT_ELEMENTS ? (long)sizeof(element) : 1);
    const long tile = NAME(tile_rows)(p);
    return larger(1, smaller(PANEL_ROWS, PANEL_BYTES / larger(row, 1)) / tile) * tile;
}

/* The first row of tile `tile`, or the number of rows behind the last: tiles are full, but for the last two of a panel,
 * which are alike rather than a full one and a sliver. */
static long NAME(tile_begin)(const NAME(product) *p, long tile) {
    const long most = NAME(tile_rows)(p), tiles = pieces(p->rows, most);
    if (tile < tiles - 1) return tile * most;
    if (tile == tiles) return p->rows;
    const int first_of_panel = tile % (NAME(panel_rows)(p) / most) == 0;
    return first_of_panel ? tile * most : (tile - 1) * most + (p->rows - (tile - 1) * most + 1) / 2;
}

static long NAME(quantize_items)(const NAME(product) *p) {
    return pieces(p->rows, NAME(tile_rows)(p)) * pieces(p->linear->in, CHUNK);
}

/* An item is a chunk of the inputs of a tile of rows. */
static void NAME(quantize_item)(const void *argument, long item, int thread) {
    (void)thread;
    const NAME(product) *p = argument;
    const long chunks = pieces(p->linear->in, CHUNK), tile = item / chunks, row = NAME(tile_begin)(p, tile);
    const int rows = (int)(NAME(tile_begin)(p, tile + 1) - row);
    NAME(quantize_tile)(p->linear, p->x + row * p->x_stride, p->x_stride, rows, item % chunks,
                        quantized_at(p->quantized, p->linear, p->rows, row));
}

static long NAME(product_items)(const NAME(product) *p) {
    return pieces(p->linear->out, BLOCK) * pieces(p->rows, NAME(panel_rows)(p));
}

/* An item is a block of outputs for some rows: neighbouring items share the block, which then lies in the cache. */
static void NAME(product_item)(const void *argument, long item, int thread) {
    (void)thread;
    const NAME(product) *p = argument;
    const baton_linear *linear = p->linear;
    const long most = NAME(tile_rows)(p), panel = NAME(panel_rows)(p), panels = pieces(p->rows, panel);
    const long block = item / panels, first = item % panels * (panel / most);
    const long last = smaller(pieces(p->rows, most), first + panel / most);
    const element *w = (const element *)linear->weight + block * BLOCK * PACK * NAME(words)(linear->in);
    _Alignas(64) float sums[TILE_ROWS][BLOCK];
    for (long tile = first; tile < last; tile++) {
        const long row = NAME(tile_begin)(p, tile);
        const int rows = (int)(NAME(tile_begin)(p, tile + 1) - row);
        if (linear->format == FORMAT_ELEMENTS)
            NAME(tiles)(rows, p->x + row * p->x_stride, p->x_stride, w, linear->in, sums);
        else
            quantized_tile(rows, linear, quantized_at(p->quantized, linear, p->rows, row), block, sums);
        NAME(finish)(p, block, row, rows, (const float (*)[BLOCK])sums);
    }
}

#endif
