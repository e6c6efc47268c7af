/* The largest logits of rows, exactly, without reading the whole head: a head of 8-bit integers first, then the real one
 * for each block of outputs that could hold one that matters.
 *
 * A row x goes to the integers as two, itself and what quantizing it loses, r: together they miss x by little. With E the
 * real product and A the sum of the two, |E - A| <= D |v| + X |w - v| + rounding, where X is the norm of x, D bounds that
 * of what is still missed, v are the values of an output's integers and w its weights. The largest lower bound A - |E - A|
 * of any output is at most the largest E, so a block whose upper bounds are all below it holds no largest one, nor its
 * equal. Other logits become minus infinity. A row that is not finite or very large has no bounds: all of it is
 * computed.
 *
 * Of a row that draws from its k largest, k blocks have an output of at least the k-th largest of the blocks' lower bounds,
 * so the k-th largest E is no less; of one that draws from those within a distance of the largest, and from no share of
 * them, the same with that distance. Values drawn by are logits over the temperature, less the largest, each rounded: a
 * logit that equals the last one there differs from it by less than 2^-22 of the three. */
#ifndef BATON_TOP_H
#define BATON_TOP_H

#include <float.h>

#include "linear/cpu_kernel.h"
#include "sampling/cpu_keys.h"

enum { SLICE = 64 }; /* blocks of outputs that one item looks at */
static const double MOST_NORM = 1e15; /* of a row or an output: products of two stay far below the largest float */

typedef struct {
    const baton_linear *head, *quick;
    const float *norms;  /* [blocks][2][32]: |v| and |w - v| of every output */
    const element *x;    /* [rows, x_stride] */
    element *pairs;      /* [rows][2][x_stride]: rows, and what quantizing loses of them */
    const float *quick_logits; /* [rows][2][out] of those */
    float *logits;       /* [rows, out] */
    const baton_row *draws; /* [rows], or NULL: by the largest */
    float *factors;      /* [rows][2]: of the two norms in a bound */
    float *limits;       /* [rows]: logits below it do not matter */
    float *uppers;       /* [rows][slices] */
    float *lowers;       /* [rows][blocks] */
    int64_t *rechecked;  /* [rows]: blocks computed by the real head */
    long rows, x_stride;
} NAME(top);

INLINE long NAME(slices)(const baton_linear *head) { return pieces(pieces(head->out, BLOCK), SLICE); }

/* Bytes of a row's factors, limit and bounds. */
INLINE size_t NAME(bounds_bytes)(const baton_linear *head) {
    return (size_t)(3 + NAME(slices)(head) + pieces(head->out, BLOCK)) * sizeof(float);
}

/* What quantizing a group loses, as quantize_groups does it; their squares are added. */
INLINE void NAME(split_group)(const element *x, long count, element *lost, lanes *norm, lanes *missed) {
    lanes top = zeros();
    for (long i = 0; i < count; i += LANES) top = higher(magnitude(load_lanes(x + i, first_lanes(count - i))), top);
    const lanes largest = fill(top_lane(higher(top, fill(SMALLEST))));
    const lanes scale = divide(largest, fill(127.0f)), inverse = divide(fill(127.0f), largest);
    for (long i = 0; i < count; i += LANES) {
        const lane_mask mask = first_lanes(count - i);
        const lanes v = load_lanes(x + i, mask);
        const lanes whole = to_floats(to_ints(higher(mul(v, inverse), fill(-127.0f))));
        const lanes rest = fused_minus(scale, whole, v);
        store_lanes(lost + i, mask, rest);
        *norm = fused(v, v, *norm);
        *missed = fused(rest, rest, *missed);
    }
}

/* Both rows of a row, and the factors of its bounds. */
static void NAME(split_item)(const void *argument, long row, int thread) {
    (void)thread;
    const NAME(top) *p = argument;
    const long in = p->quick->in, size = p->quick->group;
    const element *x = p->x + row * p->x_stride;
    element *pair = p->pairs + 2 * row * p->x_stride;
    memcpy(pair, x, (size_t)in * sizeof(element));
    lanes squares = zeros(), missed = zeros();
    for (long k = 0; k < in; k += size)
        NAME(split_group)(x + k, smaller(size, in - k), pair + p->x_stride + k, &squares, &missed);
    /* squares of small values may have become zero: each lost less than FLT_MIN, which also keeps norms above it */
    const double smallest = (double)in * FLT_MIN;
    const double norm = sqrt(sum_lanes(squares) + smallest), lost = sqrt(sum_lanes(missed) + smallest);
    /* a group's values are missed by half a step, the largest over 127, and by their rounding to elements before */
    const double still = lost * (sqrt((double)size) / 254 + 1.0 / 256);
    /* more than the sums, the squares and the bounds themselves can lose to rounding */
    const double rounding = (double)(in + 64) / (1 << 22) * (norm + lost);
    const int bounded = norm < MOST_NORM;
    p->factors[2 * row] = bounded ? (float)((still + rounding) * 1.001) : INFINITY;
    p->factors[2 * row + 1] = bounded ? (float)((norm + rounding) * 1.001) : INFINITY;
    p->rechecked[row] = 0;
}

/* The largest upper and lower bounds of a block's outputs. */
INLINE void NAME(bounds)(const NAME(top) *p, long row, long block, float *most, float *least) {
    const lanes missed = fill(p->factors[2 * row]), size = fill(p->factors[2 * row + 1]);
    const float *norms = p->norms + block * 2 * BLOCK;
    const float *quick = p->quick_logits + 2 * row * p->head->out + block * BLOCK;
    lanes upper = fill(-INFINITY), under = fill(-INFINITY);
    for (int h = 0; h < 2; h++) {
        const lane_mask mask = first_lanes(p->head->out - block * BLOCK - h * LANES);
        if (!mask) break;
        const lanes sum = add(load_part(quick + h * LANES, mask), load_part(quick + p->head->out + h * LANES, mask));
        lanes bound = fused(missed, load(norms + h * LANES), mul(size, load(norms + BLOCK + h * LANES)));
        bound = add(bound, fill(1e-30f));
        upper = higher_part(upper, mask, add(sum, bound));
        under = higher_part(under, mask, sub(sum, bound));
    }
    *most = top_lane(upper);
    *least = top_lane(under);
}

/* The larger; a NaN stays. */
INLINE float NAME(larger_bound)(float a, float b) { return a != a || b <= a ? a : b; }

/* An item is a slice of a row's blocks. */
static void NAME(lower_item)(const void *argument, long item, int thread) {
    (void)thread;
    const NAME(top) *p = argument;
    const long slices = NAME(slices)(p->head), row = item / slices, slice = item % slices;
    const long last = smaller(pieces(p->head->out, BLOCK), (slice + 1) * SLICE);
    float *lowers = p->lowers + row * pieces(p->head->out, BLOCK), top = -INFINITY;
    for (long block = slice * SLICE; block < last; block++) {
        float most, least;
        NAME(bounds)(p, row, block, &most, &least);
        lowers[block] = least > -INFINITY ? least + 0.0f : -INFINITY; /* neither NaN nor negative zero */
        top = NAME(larger_bound)(top, most);
    }
    p->uppers[item] = top;
}

/* Below it, no logit of the row matters. */
static void NAME(limit_item)(const void *argument, long row, int thread) {
    (void)thread;
    const NAME(top) *p = argument;
    const long slices = NAME(slices)(p->head), blocks = pieces(p->head->out, BLOCK);
    const float *lowers = p->lowers + row * blocks;
    const baton_row *draw = p->draws ? p->draws + row : 0;
    float best = -INFINITY, top = -INFINITY;
    for (long i = 0; i < blocks; i++)
        if (lowers[i] > best) best = lowers[i];
    p->limits[row] = best;
    if (!draw || !(draw->temperature > 0.0f)) return;
    for (long i = 0; i < slices; i++) top = NAME(larger_bound)(top, p->uppers[row * slices + i]);
    double limit = -INFINITY;
    if (draw->top_k > 0 && draw->top_k <= blocks) limit = (double)nth_largest(lowers, blocks, draw->top_k);
    const double within = (double)best + draw->log_min_p * draw->temperature * (1 + 1e-6);
    /* a share of the k largest counts all of them, those too that min-p takes afterwards */
    if (within > limit && !(draw->top_p < 1.0)) limit = within;
    /* logits that are drawn from lie between the limit and the top */
    p->limits[row] = (float)(limit - (fabs(limit) + fabs((double)top)) / (1 << 18) - 1e-30);
}

static void NAME(recheck_item)(const void *argument, long item, int thread) {
    (void)thread;
    const NAME(top) *p = argument;
    const baton_linear *head = p->head;
    const long slices = NAME(slices)(head), row = item / slices, slice = item % slices;
    const long last = smaller(pieces(head->out, BLOCK), (slice + 1) * SLICE), words = NAME(words)(head->in);
    const NAME(product) product = {.linear = head, .y = p->logits, .y_stride = head->out, .kind = TO_FLOATS};
    const int bounded = p->factors[2 * row] < INFINITY && p->factors[2 * row + 1] < INFINITY;
    float *logits = p->logits + row * head->out;
    const float limit = p->limits[row];
    long computed = 0;
    for (long block = slice * SLICE; block < last; block++) {
        float most, least;
        NAME(bounds)(p, row, block, &most, &least);
        /* infinite norms of a weight make NaN or infinity of them: neither is below */
        if (bounded && most < limit) {
            for (long i = block * BLOCK; i < smaller(head->out, (block + 1) * BLOCK); i++) logits[i] = -INFINITY;
            continue;
        }
        _Alignas(64) float sums[1][BLOCK];
        const element *w = (const element *)head->weight + block * BLOCK * PACK * words;
        NAME(tiles)(1, p->x + row * p->x_stride, p->x_stride, w, head->in, sums);
        NAME(finish)(&product, block, row, 1, (const float (*)[BLOCK])sums);
        computed++;
    }
    __atomic_fetch_add(&p->rechecked[row], computed, __ATOMIC_RELAXED);
}

#endif
