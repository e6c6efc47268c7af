/* Attention of a tile of query rows in one split, over keys and values of 8-bit integers: cpu_tile.h's other half. */
#ifndef BATON_ATTENTION_INTEGER_TILE_H
#define BATON_ATTENTION_INTEGER_TILE_H

#include "attention/cpu_integers.h"
#include "attention/cpu_range.h"

/* Ask for the scales of values that go with keys, and for those of the run ahead. Returns where that lies, or NULL. */
INLINE const char *NAME(ask_scales)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, long at) {
    const key_run run = NAME(ahead_of)(p, tile, index, at, 0);
    ask(NAME(scales_of_run)(p, &tile->range[index], at, 1));
    if (!run.range) return NULL;
    if (!run.values) ask(NAME(scales_of_run)(p, run.range, run.at, 0));
    return NAME(run_of)(p, run.range, run.at, run.values);
}

/* Scores of a range for rows first .. first + rows of the tile; `cold`: nobody has just read the keys. */
INLINE void NAME(score_integer_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                                      int first, int cold, const integer_rows *q, float *scores) {
    const query_range *range = &tile->range[index];
    const int columns = integer_columns(rows);
    for (long key = range->first; key < range->last; key += columns * LANES) {
        const char *keys[4], *ahead[4];
        const float *scales[4];
        for (int c = 0; c < columns; c++) {
            const long at = smaller(key + c * LANES, (range->last - 1) / LANES * LANES);
            keys[c] = NAME(run_of)(p, range, at, 0);
            scales[c] = NAME(scales_of_run)(p, range, at, 0);
            ahead[c] = cold ? NAME(ask_scales)(p, tile, index, at) : NULL;
            if (!ahead[c]) ahead[c] = keys[c];
        }
        score_integers(rows, columns, q, first, tile->rows, keys, ahead, scales, p->pool.head_dim / WORD_BYTES,
                       scores + first * SCORE_STRIDE + key);
    }
}

/* Weighted values of a range for the same rows, `columns` registers from d on: begun with `fresh`, or added to `out`. */
INLINE void NAME(weigh_integer_columns)(const int rows, const int columns, const NAME(attention) *p,
                                        const NAME(row_tile) *tile, int index, int first, int cold, long d, int fresh,
                                        const uint8_t *weights, int32_t *out) {
    const query_range *range = &tile->range[index];
    const long head_dim = p->pool.head_dim, block = 1L << p->pool.block_shift;
    words16 upper[INTEGER_ROWS][4], lower[INTEGER_ROWS][4];
    lane_mask masks[4];
    out += first * head_dim + d;
    weights += first * INTEGER_STRIDE;
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) masks[c] = first_lanes(head_dim - d - c * LANES);
#pragma GCC unroll 7
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            upper[r][c] = zero_words();
            lower[r][c] = fresh ? zero_words() : load_words_part(out + r * head_dim + c * LANES, masks[c]);
        }
    for (long key = range->first; key < range->last;) {
        const long count = smaller(range->last - key, smaller(block - (key & (block - 1)), 2 * LANES));
        const char *values = NAME(run_of)(p, range, key, 1) + d * WORD_BYTES;
        const char *ahead = cold ? NAME(run_ahead)(p, tile, index, key, 1) : NULL;
        weigh_integers(rows, columns, weights + key, values, ahead ? ahead + d * WORD_BYTES : values,
                       pieces(count, WORD_BYTES), head_dim, masks, upper, lower);
        key += count;
    }
#pragma GCC unroll 7
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            store_words_part(out + r * head_dim + c * LANES, masks[c],
                             add_words(shift_left(upper[r][c], 8), lower[r][c]));
}

INLINE void NAME(weigh_integer_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                                      int first, int cold, int fresh, const uint8_t *weights, int32_t *out) {
    const int columns = integer_columns(rows);
    const long all = pieces(p->pool.head_dim, LANES);
    long column = 0;
    for (; column + columns <= all; column += columns)
        NAME(weigh_integer_columns)(rows, columns, p, tile, index, first, cold, column * LANES, fresh, weights, out);
    for (; column < all; column++)
        NAME(weigh_integer_columns)(rows, 1, p, tile, index, first, cold, column * LANES, fresh, weights, out);
}

#define FOR_ROWS(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#define CASE(n) \
    case n: NAME(score_integer_range)(n <= INTEGER_ROWS ? n : 1, p, tile, index, first, cold, q, scores); break;
static void NAME(score_integer_rows)(int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                                     int first, int cold, const integer_rows *q, float *scores) {
    switch (rows) { FOR_ROWS(CASE) }
}
#undef CASE

#define CASE(n) \
    case n: NAME(weigh_integer_range)(n <= INTEGER_ROWS ? n : 1, p, tile, index, first, cold, fresh, weights, out); \
        break;
static void NAME(weigh_integer_rows)(int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                                     int first, int cold, int fresh, const uint8_t *weights, int32_t *out) {
    switch (rows) { FOR_ROWS(CASE) }
}
#undef CASE
#undef FOR_ROWS

/* Rows of a range that are computed together, of so many left: as evenly as their registers allow. */
INLINE int rows_together(int left) { return (int)pieces(left, pieces(left, INTEGER_ROWS)); }

/* Results of all rows of a tile in its split. */
static void NAME(attend_integers)(const NAME(attention) *p, const NAME(row_tile) *tile, int thread) {
    const long d = p->pool.head_dim;
    const int rows = tile->rows;
    float *scores = team_memory(p->team, thread, SCORES_SLOT, 0);
    int32_t *sums = (int32_t *)(scores + MOST_ROWS * SCORE_STRIDE);
    uint8_t *weights = team_memory(p->team, thread, WEIGHTS_SLOT, 0);
    float *result = team_memory(p->team, thread, RESULT_SLOT, 0), *own[MOST_ROWS], units[MOST_ROWS];
    integer_rows q = {.words = team_memory(p->team, thread, QUERIES_SLOT, 0)};
    for (int r = 0; r < rows; r++) NAME(round_query)((const element *)tile->q[r], d, p->scale, r, rows, &q);
    for (int i = 0; i < tile->ranges; i++) {
        const query_range *range = &tile->range[i];
        for (int r = 0, n; r < range->rows; r += n) {
            n = rows_together(range->rows - r);
            NAME(score_integer_rows)(n, p, tile, i, range->first_row + r, range->cold && !r, &q, scores);
        }
    }
    for (int i = 0; i < tile->ranges; i++) {
        const query_range *range = &tile->range[i];
        if (tile->common && !i) continue;
        const float *scales[SPLIT / LANES]; /* the blocks in common stand in every table */
        for (long at = 0; at < range->last; at += LANES) scales[at / LANES] = NAME(scales_of_run)(p, range, at, 1);
        for (int r = range->first_row; r < range->first_row + range->rows; r++) {
            own[r] = tile->joined ? result + r * (d + VALUES) : tile->result[r];
            const softened s = soften_integers(scores + r * SCORE_STRIDE, tile->visible[r], range->last, scales,
                                               weights + r * INTEGER_STRIDE);
            own[r][TOP] = s.top;
            own[r][SUM] = s.sum;
            units[r] = s.unit;
        }
    }
    for (int i = 0; i < tile->ranges; i++) {
        const query_range *range = &tile->range[i];
        for (int r = 0, n; r < range->rows; r += n) {
            n = rows_together(range->rows - r);
            NAME(weigh_integer_rows)(n, p, tile, i, range->first_row + r, range->cold && !r, !(tile->common && i),
                                     weights, sums);
        }
    }
    for (int r = 0; r < rows; r++)
        for (long i = 0; i < d; i += LANES) {
            const lane_mask mask = first_lanes(d - i);
            const lanes v = to_floats(load_words_part(sums + r * d + i, mask));
            store_part(own[r] + VALUES + i, mask, mul(v, fill(units[r])));
        }
    if (tile->joined) NAME(join)(rows, tile->result, (const float *const *)own, d);
}

#endif
