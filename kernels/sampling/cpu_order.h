/* The largest of a row: tokens in the order of sampling, larger values first, lower ids first among equals. */
#ifndef BATON_SAMPLING_ORDER_H
#define BATON_SAMPLING_ORDER_H

#include <float.h>

#include "native/simd.h"
#include "sampling/cpu_keys.h"
#include "sampling/cpu_noise.h"

/* A row while it is sampled. A token's value is its logit over the divisor, less the largest of those: it is computed
 * where it is looked at, and never a negative zero. */
typedef struct {
    const float *logits;    /* [vocab], as given or, adjusted, in `own` */
    float *own;             /* [vocab] */
    float *tops;            /* [blocks, rounded up to LANES]: the largest value of each; minus infinity behind them */
    uint64_t *list, *spare; /* [blocks * TOKENS]: key_of(value) * 2^32 + id */
    long vocab, blocks;
    float divisor, top; /* the largest, over the divisor */
} sampled_row;

/* Values of 16 tokens; minus infinity behind the last. */
INLINE lanes values_at(const sampled_row *row, long first) {
    const lane_mask mask = first_lanes(row->vocab - first);
    lanes v = load_part(row->logits + first, mask);
    /* a small divisor can take a value past float32 */
    if (row->divisor != 1.0f) v = lower(divide(v, fill(row->divisor)), fill(FLT_MAX));
    v = add(sub(v, fill(row->top)), zeros()); /* no sum with zero is a negative one */
    return first + LANES <= row->vocab ? v : higher_part(fill(-INFINITY), mask, v);
}

/* e^(value - top) of a block: in loops that compilers take several at once of. */
INLINE void exponentials_of(const float *values, double top, double *exponentials) {
    double x[TOKENS];
    for (int i = 0; i < TOKENS; i++) x[i] = (double)values[i] - top;
    for (int i = 0; i < TOKENS; i++) x[i] = x[i] > LEAST_EXPONENT ? x[i] : LEAST_EXPONENT;
    for (int i = 0; i < TOKENS; i++) exponentials[i] = exponential_of_double(x[i]);
}

/* The sum of e^(value - top) of all tokens, in double. */
static double mass_above(const sampled_row *row, double top) {
    double sums[LANES] = {0}, mass = 0;
    for (long block = 0; block < row->blocks; block++) {
        float values[TOKENS];
        double masses[TOKENS];
        for (int i = 0; i < TOKENS; i += LANES) {
            const long first = block * TOKENS + i;
            store(values + i, first < row->vocab ? values_at(row, first) : fill(-INFINITY));
        }
        exponentials_of(values, top, masses);
        for (int i = 0; i < TOKENS; i += LANES)
            for (int j = 0; j < LANES; j++) sums[j] += masses[i + j];
    }
    for (int i = 0; i < LANES; i++) mass += sums[i];
    return mass;
}

INLINE long id_of(uint64_t entry) { return (long)(uint32_t)entry; }
INLINE float value_in(uint64_t entry) { return value_of((uint32_t)(entry >> 32)); }
INLINE double mass_in(uint64_t entry) {
    const double value = (double)value_in(entry);
    return exponential_of_double(value > LEAST_EXPONENT ? value : LEAST_EXPONENT);
}

/* A value that at least `wanted` tokens have, or more, and few others; of few wanted by the largest of blocks. */
static float nth_roughly(const sampled_row *row, long wanted) {
    if (wanted <= row->blocks) return nth_largest(row->tops, row->blocks, wanted);
    float *values = (float *)row->spare;
    const long quarters = pieces(row->vocab, LANES);
    const int few = wanted <= quarters;
    for (long i = 0; i < quarters; i++)
        if (few)
            values[i] = top_lane(values_at(row, i * LANES));
        else
            store(values + i * LANES, values_at(row, i * LANES));
    return nth_largest(values, few ? quarters : row->vocab, wanted);
}

/* Lists the finite values of at least `least` by id. Returns how many. */
static long gather(sampled_row *row, float least) {
    long count = 0;
    least = least > -FLT_MAX ? least : -FLT_MAX;
    for (long block = 0; block < row->blocks; block++) {
        if (row->tops[block] < least) continue;
        for (long first = block * TOKENS; first < smaller((block + 1) * TOKENS, row->vocab); first += LANES) {
            const lanes v = values_at(row, first);
            uint32_t bits = at_least(v, fill(least));
            if (!bits) continue;
            float values[LANES];
            store(values, v);
            for (; bits; bits &= bits - 1) {
                const int lane = __builtin_ctz(bits);
                row->list[count++] = (uint64_t)key_of(values[lane]) << 32 | (uint64_t)(first + lane);
            }
        }
    }
    return count;
}

/* Sorts the list by key; equal keys keep their order, so that lower ids stay first. */
static void sort_list(sampled_row *row, long count) {
    long starts[4][256] = {{0}};
    for (long i = 0; i < count; i++)
        for (int digit = 0; digit < 4; digit++) starts[digit][row->list[i] >> (32 + 8 * digit) & 255]++;
    for (int digit = 0; digit < 4; digit++) {
        const int shift = 32 + 8 * digit;
        if (count && starts[digit][row->list[0] >> shift & 255] == count) continue; /* all alike in it */
        long sum = 0;
        for (int value = 0; value < 256; value++) {
            const long here = starts[digit][value];
            starts[digit][value] = sum;
            sum += here;
        }
        for (long i = 0; i < count; i++) row->spare[starts[digit][row->list[i] >> shift & 255]++] = row->list[i];
        uint64_t *sorted = row->spare;
        row->spare = row->list;
        row->list = sorted;
    }
}

/* Lists, in order, the `wanted` largest and some that follow. Returns how many: fewer than wanted where there are no more
 * finite ones. */
static long list_largest(sampled_row *row, long wanted) {
    const long count = gather(row, nth_roughly(row, smaller(wanted, row->vocab)));
    sort_list(row, count);
    return count;
}

#endif
