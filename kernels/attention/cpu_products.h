/* What attention does with a few query rows: scores of keys, their weights, weighted values, and joining splits. */
#ifndef BATON_ATTENTION_PRODUCTS_H
#define BATON_ATTENTION_PRODUCTS_H

#include "native/simd.h"

enum { SPLIT = 512 };
/* Sums take three quarters of the registers, for up to so many query rows. */
enum { SUM_REGISTERS = LANE_REGISTERS * 3 / 4, MOST_ROWS = LANE_REGISTERS >= 32 ? 12 : 6 };
enum { SCORE_STRIDE = SPLIT + 4 * LANES };  /* floats from one row's scores to the next: room for a whole tile more */
enum { WEIGHT_STRIDE = SPLIT + 2 * LANES }; /* elements; neither is a power of two: rows would share cache sets */

/* Registers of sums a row. */
INLINE int columns_for(const int rows) { return 4 * rows <= SUM_REGISTERS ? 4 : 2 * rows <= SUM_REGISTERS ? 2 : 1; }

/* Scores, in powers of two, of `rows` query rows for columns * 16 keys. `q` holds a word of each row, then the next of
 * each, `stride` words apart; `keys` has a run of 16 keys a column, `ahead` the run to ask for meanwhile. */
INLINE void NAME(score_keys)(const int rows, const int columns, const int32_t *q, long stride,
                             const element *const *keys, const element *const *ahead, long words, float scale,
                             float *scores) {
    lanes sums[MOST_ROWS][4];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sums[r][c] = zeros();
    for (long w = 0; w < words; w++, q += stride) {
        words16 k[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            k[c] = load_words(keys[c] + w * LANES * PACK);
            ask_outer(ahead[c] + w * LANES * PACK);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            words16 v = word(q + r);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] = multiply_add(sums[r][c], k[c], v);
        }
    }
    const lanes factor = fill(scale);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store(scores + r * SCORE_STRIDE + c * LANES, mul(sums[r][c], factor));
}

/* Add the weighted values of `groups` times PACK keys, a run, to `columns` registers of sums of `rows` rows. With
 * `half` there is one more key, in the lower half of its words: what is beside it was never written. */
INLINE void NAME(weigh_run)(const int rows, const int columns, const element *weights, const element *values,
                            const element *ahead, long groups, int half, long head_dim, const lane_mask *masks,
                            lanes sums[MOST_ROWS][4]) {
    for (long g = 0; g < groups + half; g++, values += head_dim * PACK, ahead += head_dim * PACK) {
        words16 v[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            v[c] = load_words_part(values + c * LANES * PACK, masks[c]);
            ask_outer(ahead + c * LANES * PACK);
        }
        if (PACK == 2 && g == groups)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) v[c] = and_words(v[c], fill_words(0xffff));
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            words16 p = word(weights + r * WEIGHT_STRIDE + g * PACK);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] = multiply_add(sums[r][c], v[c], p);
        }
    }
}

/* 2^x for x <= 0, 0 far below, NaN for NaN: to about one unit in the last place, or to 3e-6 of it where the result is
 * rounded to bfloat16. (x - its nearest whole number) in a polynomial that is 1 at 0. */
INLINE lanes NAME(power_of_two)(lanes x, const int exactly) {
    x = higher(fill(-150.0f), x);
    lanes n = to_whole(x), r = sub(x, n), p;
    if (exactly) {
        p = fused(fill(1.535335e-4f), r, fill(1.3398875e-3f));
        p = fused(p, r, fill(9.618437e-3f));
        p = fused(p, r, fill(5.5503324e-2f));
        p = fused(p, r, fill(2.4022648e-1f));
        p = fused(p, r, fill(6.9314718e-1f));
    } else {
        p = fused(fill(9.582850e-3f), r, fill(5.5906426e-2f));
        p = fused(p, r, fill(2.4024099e-1f));
        p = fused(p, r, fill(6.9312418e-1f));
    }
    return scale_by_power(fused(p, r, fill(1.0f)), n);
}

/* Weights of the `visible` keys of a row, 2^(score - maximum), and 0 up to `end`. Returns their sum, as rounded. */
INLINE float NAME(soften)(const float *scores, long visible, long end, element *weights, float *maximum) {
    const long whole = visible / LANES * LANES;
    const lane_mask every = first_lanes(LANES);
    lanes top = fill(-INFINITY), second = top, total = zeros();
    element ones[LANES];
    long i = 0;
    for (; i + LANES < whole; i += 2 * LANES) {
        top = higher(top, load(scores + i));
        second = higher(second, load(scores + i + LANES));
    }
    for (; i < visible; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        top = higher_part(top, mask, load_part(scores + i, mask));
    }
    *maximum = top_lane(higher(top, second));
    const lanes high = fill(*maximum);
    for (i = 0; i < whole; i += LANES)
        store_lanes(weights + i, every, NAME(power_of_two)(sub(load(scores + i), high), PACK == 1));
    for (; i < pieces(end, LANES * PACK) * LANES * PACK; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        const lanes v = NAME(power_of_two)(sub(load_part(scores + i, mask), high), PACK == 1);
        store_lanes(weights + i, every, keep(mask, v));
    }
    store_lanes(ones, every, fill(1.0f));
    for (i = 0; i < visible; i += LANES * PACK) total = multiply_add(total, load_words(weights + i), word(ones));
    return sum_lanes(total);
}

/* What rows and splits leave: [head_dim + 2] floats a row: maximum, sum of weights, sums of weighted values. */
enum { TOP, SUM, VALUES };

/* Join a split's results of up to 16 rows to those of the splits before it. */
static void NAME(join)(int rows, float *const *states, const float *const *splits, long head_dim) {
    float before[LANES] = {0}, here[LANES] = {0}, old[LANES], new[LANES];
    for (int r = 0; r < rows; r++) before[r] = states[r][TOP], here[r] = splits[r][TOP];
    const lanes a = load(before), b = load(here), top = higher(a, b);
    store(old, NAME(power_of_two)(sub(a, top), 1));
    store(new, NAME(power_of_two)(sub(b, top), 1));
    store(before, top);
    for (int r = 0; r < rows; r++) {
        float *state = states[r];
        const float *split = splits[r];
        if (split[SUM] == 0.0f) continue; /* the row sees nothing there */
        state[TOP] = before[r];
        state[SUM] = state[SUM] * old[r] + split[SUM] * new[r];
        const lanes x = fill(old[r]), y = fill(new[r]);
        for (long i = 0; i < head_dim; i += LANES) {
            const lane_mask mask = first_lanes(head_dim - i);
            lanes v = mul(load_part(state + VALUES + i, mask), x);
            v = add(v, mul(load_part(split + VALUES + i, mask), y));
            store_part(state + VALUES + i, mask, v);
        }
    }
}

#endif
