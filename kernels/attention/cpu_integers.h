/* Attention over keys and values of 8-bit integers (KV_INT8), for a few query rows. See README.md for the arithmetic.
 *
 * Both products are of integers and exact: a row's query becomes 16-bit integers with one scale, its weights of a split,
 * times the scales of their values, 15-bit ones. Each is two bytes, and the products of the upper and the lower ones are
 * added up apart. No sum depends on its order, nor on the instruction set. */
#ifndef BATON_ATTENTION_INTEGERS_H
#define BATON_ATTENTION_INTEGERS_H

#include "attention/cpu_products.h"
#include "store_kv/cpu_kernel.h"

enum { UPPER_AND_LOWER = 2 };
/* The largest integers, whose upper byte is 127 at most: 512 products with 127 or -128 stay within 32 bits. */
static const float MOST_QUERY = 32639.0f, MOST_WEIGHT = 32767.0f;

/* Query rows as integers: words of four upper bytes of each row, words of their lower bytes of each row, and so on. */
typedef struct {
    int32_t *words;             /* [head_dim / 4][2][rows] */
    float factors[MOST_ROWS];   /* of the products: scale of the row, and of scores */
    int32_t offsets[MOST_ROWS]; /* what is added to the products, as keys are bytes less 128 */
} integer_rows;

/* Rows whose sums stand in registers together, and registers a row of either kind: at least two, so that a word of a
 * row, once fetched, is multiplied with several others. */
enum { INTEGER_ROWS = LANE_REGISTERS >= 32 ? 7 : 2 };
INLINE int integer_columns(const int rows) { return rows * 8 <= LANE_REGISTERS - 4 ? 4 : 2; }

/* One query row into the words of `rows` rows. */
INLINE void NAME(round_query)(const element *x, long head_dim, float scale, int row, int rows, integer_rows *to) {
    const float top = NAME(top_of)(x, head_dim);
    const lanes inverse = divide(fill(MOST_QUERY), fill(top));
    words16 sum = zero_words();
    int32_t *word_of = to->words + row;
    for (long i = 0; i < head_dim; i += LANES) {
        const words16 value = NAME(integers)(x + i, first_lanes(head_dim - i), inverse, MOST_QUERY);
        const words16 moved = add_words(value, fill_words((1 << 15) + 128)), minus = fill_words(-128);
        int8_t upper[LANES], lower[LANES];
        store_bytes(upper, first_lanes(LANES), add_words(shift_right(moved, 8), minus));
        store_bytes(lower, first_lanes(LANES), add_words(and_words(moved, fill_words(255)), minus));
        for (long j = 0; j < smaller(LANES, head_dim - i); j += WORD_BYTES, word_of += UPPER_AND_LOWER * rows) {
            memcpy(word_of, upper + j, WORD_BYTES);
            memcpy(word_of + rows, lower + j, WORD_BYTES);
        }
        sum = add_words(sum, value);
    }
    to->factors[row] = top / MOST_QUERY * scale;
    to->offsets[row] = -128 * (int32_t)sum_lanes(to_floats(sum)); /* at most 512 * 32639: exact in float32 */
}

/* Scores as NAME(score_keys) has them, of rows first .. first + rows of `q`, which are `stride` in all. */
INLINE void score_integers(const int rows, const int columns, const integer_rows *q, int first, long stride,
                           const char *const *keys, const char *const *ahead, const float *const *scales, long words,
                           float *scores) {
    words16 upper[INTEGER_ROWS][4], lower[INTEGER_ROWS][4];
    const int32_t *word_of = q->words + first;
#pragma GCC unroll 7
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) upper[r][c] = lower[r][c] = zero_words();
    for (long w = 0; w < words; w++, word_of += UPPER_AND_LOWER * stride) {
        words16 k[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            k[c] = load_words(keys[c] + w * LANES * WORD_BYTES);
            ask_outer(ahead[c] + w * LANES * WORD_BYTES);
        }
#pragma GCC unroll 7
        for (int r = 0; r < rows; r++) {
            const words16 high = word(word_of + r), low = word(word_of + stride + r);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                upper[r][c] = dot_u8s8(upper[r][c], k[c], high);
                lower[r][c] = dot_u8s8(lower[r][c], k[c], low);
            }
        }
    }
#pragma GCC unroll 7
    for (int r = 0; r < rows; r++) {
        const words16 offset = fill_words(q->offsets[first + r]);
        const lanes factor = fill(q->factors[first + r]);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            const words16 sum = add_words(add_words(shift_left(upper[r][c], 8), lower[r][c]), offset);
            store(scores + r * SCORE_STRIDE + c * LANES, mul(mul(to_floats(sum), load(scales[c])), factor));
        }
    }
}

/* Weights of a row: upper bytes, then WEIGHT_STRIDE further lower ones, from one row to the next twice that. */
enum { INTEGER_STRIDE = UPPER_AND_LOWER * WEIGHT_STRIDE };

/* As NAME(weigh_run), of `groups` times four keys; sums are of upper bytes, then of lower ones. */
INLINE void weigh_integers(const int rows, const int columns, const uint8_t *weights, const char *values,
                           const char *ahead, long groups, long head_dim, const lane_mask *masks,
                           words16 upper[INTEGER_ROWS][4], words16 lower[INTEGER_ROWS][4]) {
    for (long g = 0; g < groups; g++, values += head_dim * WORD_BYTES, ahead += head_dim * WORD_BYTES) {
        words16 v[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            v[c] = load_words_part(values + c * LANES * WORD_BYTES, masks[c]);
            ask_outer(ahead + c * LANES * WORD_BYTES);
        }
#pragma GCC unroll 7
        for (int r = 0; r < rows; r++) {
            const uint8_t *of_row = weights + r * INTEGER_STRIDE + g * WORD_BYTES;
            const words16 high = word(of_row), low = word(of_row + WEIGHT_STRIDE);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) {
                upper[r][c] = dot_u7s8(upper[r][c], high, v[c]);
                lower[r][c] = dot_u8s8(lower[r][c], low, v[c]);
            }
        }
    }
}

/* What a row's weights become: their maximum and sum as NAME(soften) has them, and what an integer of one stands for. */
typedef struct {
    float top, sum, unit;
} softened;

/* Weights of the `visible` keys of a row times their values' scales as integers, and zeros up to `end`. `scales` holds
 * those of every run of 16 keys. No weight is above 1, so that their largest scale is the largest of the products. A
 * weight or scale that is no number has no integer either: then the sum or the unit is none. */
INLINE softened soften_integers(const float *scores, long visible, long end, const float *const *scales,
                                uint8_t *weights) {
    const lane_mask every = first_lanes(LANES);
    const words16 below = fill_words(-128), half = fill_words(128), byte = fill_words(255);
    lanes top = fill(-INFINITY), total = zeros(), most = fill(LEAST_TOP), strange = zeros();
    for (long i = 0; i < visible; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        const lanes scale = load_part(scales[i / LANES], mask);
        top = higher_part(top, mask, load_part(scores + i, mask));
        most = higher(scale, most);
        strange = fused(scale, zeros(), strange);
    }
    const float highest = top_lane(top), largest = top_lane(most);
    const lanes high = fill(highest), inverse = divide(fill(MOST_WEIGHT), fill(largest));
    long i = 0;
    for (; i < visible; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        const lanes weight = keep(mask, NAME(power_of_two)(sub(load_part(scores + i, mask), high), 0));
        const words16 whole = to_ints(mul(mul(weight, load_part(scales[i / LANES], mask)), inverse));
        total = add(total, weight);
        const words16 low = add_words(and_words(add_words(whole, half), byte), below); /* signed, of the same bits */
        store_bytes((int8_t *)weights + i, every, shift_right(whole, 8));
        store_bytes((int8_t *)weights + WEIGHT_STRIDE + i, every, low);
    }
    for (; i < end; i += LANES) {
        store_bytes((int8_t *)weights + i, every, zero_words());
        store_bytes((int8_t *)weights + WEIGHT_STRIDE + i, every, zero_words());
    }
    return (softened){highest, sum_lanes(total), largest / MOST_WEIGHT + sum_lanes(strange)};
}

#endif
