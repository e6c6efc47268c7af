/* Scores, weights and weighted values of a few query rows, and what reads keys and values for them.
 *
 * Included once for each kind of keys and values that are floats, KV_HALVES 0 or 1:
 *
 *   kv_number, KV_PACK   what the pool holds, and how many of them a word has
 *   kv_operand           of queries and weights: as many to 32 bits
 *   KIND(name)           a name of its own
 *
 * Elements are multiplied as in any product. Halves become float32, exactly, and so are queries and weights: the sums
 * are those of float32 elements of the same values, at every level and whatever the element type. */
#undef KIND
#undef KV_PACK
#undef kv_number
#undef kv_operand
#if KV_HALVES
#define KIND(name) NAME(name##_halves)
#define KV_PACK 1
#define kv_number uint16_t
#define kv_operand float
INLINE words16 KIND(load_kv)(const kv_number *p, lane_mask mask) { return bits_of(load_float16(p, mask)); }
INLINE void KIND(store_operands)(kv_operand *p, lane_mask mask, lanes v) { store_part(p, mask, v); }
INLINE lanes KIND(multiply_kv)(lanes sum, words16 a, words16 b) { return fused(lanes_of(a), lanes_of(b), sum); }
#else
#define KIND(name) NAME(name)
#define KV_PACK PACK
#define kv_number element
#define kv_operand element
INLINE words16 KIND(load_kv)(const kv_number *p, lane_mask mask) { return load_words_part(p, mask); }
INLINE void KIND(store_operands)(kv_operand *p, lane_mask mask, lanes v) { store_lanes(p, mask, v); }
INLINE lanes KIND(multiply_kv)(lanes sum, words16 a, words16 b) { return multiply_add(sum, a, b); }
#endif

/* Scores, in powers of two, of `rows` query rows for columns * 16 keys. `q` holds a word of each row, then the next of
 * each, `stride` words apart; `keys` has a run of 16 keys a column, `ahead` the run to ask for meanwhile. */
INLINE void KIND(score_keys)(const int rows, const int columns, const int32_t *q, long stride,
                             const kv_number *const *keys, const kv_number *const *ahead, long words, float scale,
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
            k[c] = KIND(load_kv)(keys[c] + w * LANES * KV_PACK, first_lanes(LANES));
            ask_outer(ahead[c] + w * LANES * KV_PACK);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            words16 v = word(q + r);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] = KIND(multiply_kv)(sums[r][c], k[c], v);
        }
    }
    const lanes factor = fill(scale);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store(scores + r * SCORE_STRIDE + c * LANES, mul(sums[r][c], factor));
}

/* Add the weighted values of `groups` times KV_PACK keys, a run, to `columns` registers of sums of `rows` rows. With
 * `half` there is one more key, in the lower half of its words: what is beside it was never written. */
INLINE void KIND(weigh_run)(const int rows, const int columns, const kv_operand *weights, const kv_number *values,
                            const kv_number *ahead, long groups, int half, long head_dim, const lane_mask *masks,
                            lanes sums[MOST_ROWS][4]) {
    for (long g = 0; g < groups + half; g++, values += head_dim * KV_PACK, ahead += head_dim * KV_PACK) {
        words16 v[4];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            v[c] = KIND(load_kv)(values + c * LANES * KV_PACK, masks[c]);
            ask_outer(ahead + c * LANES * KV_PACK);
        }
        if (KV_PACK == 2 && g == groups)
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) v[c] = and_words(v[c], fill_words(0xffff));
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            words16 p = word(weights + r * WEIGHT_STRIDE + g * KV_PACK);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sums[r][c] = KIND(multiply_kv)(sums[r][c], v[c], p);
        }
    }
}

/* Weights of the `visible` keys of a row, 2^(score - maximum), and 0 up to `end`. Returns their sum, as rounded. */
INLINE float KIND(soften)(const float *scores, long visible, long end, kv_operand *weights, float *maximum) {
    const long whole = visible / LANES * LANES;
    const lane_mask every = first_lanes(LANES);
    lanes top = fill(-INFINITY), second = top, total = zeros();
    kv_operand ones[LANES];
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
        KIND(store_operands)(weights + i, every, NAME(power_of_two)(sub(load(scores + i), high), KV_PACK == 1));
    for (; i < pieces(end, LANES * KV_PACK) * LANES * KV_PACK; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        const lanes v = NAME(power_of_two)(sub(load_part(scores + i, mask), high), KV_PACK == 1);
        KIND(store_operands)(weights + i, every, keep(mask, v));
    }
    KIND(store_operands)(ones, every, fill(1.0f));
    for (i = 0; i < visible; i += LANES * KV_PACK) total = KIND(multiply_kv)(total, load_words(weights + i), word(ones));
    return sum_lanes(total);
}
