/* What attention does with a few query rows over keys and values of any format: sizes, powers of two, joining splits. */
#ifndef BATON_ATTENTION_PRODUCTS_H
#define BATON_ATTENTION_PRODUCTS_H

#include "native/simd.h"

enum { SPLIT = 512 };
/* Sums take three quarters of the registers, for up to so many query rows. */
enum { SUM_REGISTERS = LANE_REGISTERS * 3 / 4, MOST_ROWS = LANE_REGISTERS >= 32 ? 12 : 6 };
enum { SCORE_STRIDE = SPLIT + 4 * LANES };  /* floats from one row's scores to the next: room for a whole tile more */
enum { WEIGHT_STRIDE = SPLIT + 2 * LANES }; /* weights; neither is a power of two: rows would share cache sets */

/* Registers of sums a row. */
INLINE int columns_for(const int rows) { return 4 * rows <= SUM_REGISTERS ? 4 : 2 * rows <= SUM_REGISTERS ? 2 : 1; }

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
