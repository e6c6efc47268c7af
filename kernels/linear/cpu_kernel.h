/* Packed linear: y = x W^T + b, W packed [out / 32][in / PACK][32][PACK].
 *
 * An output is one chain of multiply-adds over its row's words in order, in float32 cut into pieces of MAX_SUM inputs
 * summed in order. Which rows are computed together does not enter it. */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include "activation/cpu_kernel.h"
#include "native/model.h"
#include "native/simd.h"

enum { BLOCK = 32, TILE_ROWS = 12, ROWS_AN_ITEM = 192 };
enum { MAX_SUM = 32 };
enum { PREFETCH_BYTES = 2048 };

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
} NAME(product);

INLINE long NAME(words)(long in) { return pieces(in, PACK); }

/* 32 sums of `rows` rows, at most TILE_ROWS; `rows` is a constant wherever this is expanded. */
INLINE void NAME(tile)(const int rows, const element *x, long stride, const element *w, long in,
                       float sums[TILE_ROWS][BLOCK]) {
    lanes acc[TILE_ROWS][2];
    const long whole = in / PACK, piece = BATON_BFLOAT16 ? whole : MAX_SUM;
    for (long begin = 0; begin < larger(whole, 1); begin += larger(piece, 1)) {
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = zeros();
        const long end = smaller(whole, begin + piece);
        for (long k = begin; k < end; k++) {
            const char *p = (const char *)w + k * BLOCK * 4;
            ask(p + PREFETCH_BYTES);
            ask(p + PREFETCH_BYTES + 64);
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
    case n: NAME(tile)(n, x, stride, w, in, sums); break;

static void NAME(tiles)(int rows, const element *x, long stride, const element *w, long in,
                        float sums[TILE_ROWS][BLOCK]) {
    switch (rows) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
        TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
    }
}
#undef TILE_OF

/* One row's 32 sums of block `block` into y. */
INLINE void NAME(finish)(const NAME(product) *p, long block, long row, const float *sums) {
    lanes v[2] = {load(sums), load(sums + LANES)};
    if (p->linear->bias)
        for (int h = 0; h < 2; h++)
            v[h] = add(v[h], load(p->linear->bias + block * BLOCK + h * LANES));
    if (p->kind == TO_GATED) {
        const long first = block * LANES;
        const lane_mask mask = first_lanes(p->linear->out / 2 - first);
        store_lanes((element *)p->y + row * p->y_stride + first, mask, silu_mul(v[0], v[1]));
        return;
    }
    for (int h = 0; h < 2; h++) {
        const long first = block * BLOCK + h * LANES;
        const lane_mask mask = first_lanes(p->linear->out - first);
        if (!mask) return;
        const long at = row * p->y_stride + first;
        float *y = (float *)p->y + at;
        if (p->kind == TO_ELEMENTS)
            store_lanes((element *)p->y + at, mask, v[h]);
        else if (p->kind == TO_FLOATS)
            store_part(y, mask, v[h]);
        else
            store_part(y, mask, add(load_part(y, mask), v[h]));
    }
}

static long NAME(linear_blocks)(const baton_linear *linear) { return pieces(linear->out, BLOCK); }

static long NAME(product_items)(const NAME(product) *p) {
    return NAME(linear_blocks)(p->linear) * pieces(p->rows, ROWS_AN_ITEM);
}

/* An item is a block of outputs for some rows: neighbouring items share the block, which then lies in the cache. */
static void NAME(product_item)(const void *argument, long item, int thread) {
    (void)thread;
    const NAME(product) *p = argument;
    const baton_linear *linear = p->linear;
    const long a_block = pieces(p->rows, ROWS_AN_ITEM), block = item / a_block;
    const long first = item % a_block * ROWS_AN_ITEM, last = smaller(p->rows, first + ROWS_AN_ITEM);
    const element *w = (const element *)linear->weight + block * BLOCK * PACK * NAME(words)(linear->in);
    _Alignas(64) float sums[TILE_ROWS][BLOCK];
    for (long row = first; row < last;) {
        const long left = last - row;
        /* the last two tiles alike, rather than a full one and a sliver */
        const int rows = (int)(left <= TILE_ROWS ? left : left < 2 * TILE_ROWS ? (left + 1) / 2 : TILE_ROWS);
        NAME(tiles)(rows, p->x + row * p->x_stride, p->x_stride, w, linear->in, sums);
        for (int m = 0; m < rows; m++) NAME(finish)(p, block, row + m, sums[m]);
        row += rows;
    }
}

/* Rows of a plain matrix [rows, in] into a packed one, which is zero before. Row i becomes packed output
 * first + i / run * step + i % run. */
typedef struct {
    const element *from;
    element *to;
    long rows, in, first, run, step;
} NAME(packing);

static void NAME(pack_item)(const void *argument, long row, int thread) {
    (void)thread;
    const NAME(packing) *p = argument;
    const long at = p->first + row / p->run * p->step + row % p->run;
    element *to = p->to + (at / BLOCK * BLOCK * NAME(words)(p->in) + at % BLOCK) * PACK;
    for (long k = 0; k < p->in; k++) to[k / PACK * BLOCK * PACK + k % PACK] = p->from[row * p->in + k];
}

#endif
