/* Attention of a tile of query rows in one split, over keys and values of elements or halves: see cpu_rows.h. */
#include "attention/cpu_range.h"
#include "attention/cpu_rows.h"

/* Scores of a range for its rows. */
INLINE void KIND(score_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                              const int32_t *q, float *scores) {
    const query_range *range = &tile->range[index];
    const int columns = columns_for(rows);
    for (long key = range->first; key < range->last; key += columns * LANES) {
        const kv_number *keys[4], *ahead[4];
        for (int c = 0; c < columns; c++) {
            const long at = smaller(key + c * LANES, (range->last - 1) / LANES * LANES);
            const char *run = NAME(run_of)(p, range, at, 0);
            const char *next = range->cold ? NAME(run_ahead)(p, tile, index, at, 0) : NULL;
            keys[c] = (const kv_number *)run;
            ahead[c] = (const kv_number *)(next ? next : run);
        }
        KIND(score_keys)(rows, columns, q + range->first_row, tile->rows, keys, ahead, p->pool.head_dim / KV_PACK,
                         p->scale, scores + range->first_row * SCORE_STRIDE + key);
    }
}

/* Weighted values of a range for its rows, `columns` registers from d on: begun with `fresh`, or added to `out`. */
INLINE void KIND(weigh_columns)(const int rows, const int columns, const NAME(attention) *p, const NAME(row_tile) *tile,
                                int index, long d, int fresh, const kv_operand *weights, float *out) {
    const query_range *range = &tile->range[index];
    const long head_dim = p->pool.head_dim, block = 1L << p->pool.block_shift;
    lanes sums[MOST_ROWS][4];
    lane_mask masks[4];
    out += range->first_row * head_dim + d;
    weights += range->first_row * WEIGHT_STRIDE;
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) masks[c] = first_lanes(head_dim - d - c * LANES);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            sums[r][c] = fresh ? zeros() : load_part(out + r * head_dim + c * LANES, masks[c]);
    for (long key = range->first; key < range->last;) {
        const long count = smaller(range->last - key, smaller(block - (key & (block - 1)), 2 * LANES));
        const kv_number *values = (const kv_number *)NAME(run_of)(p, range, key, 1);
        const kv_number *ahead = range->cold ? (const kv_number *)NAME(run_ahead)(p, tile, index, key, 1) : NULL;
        KIND(weigh_run)(rows, columns, weights + key, values + d * KV_PACK, (ahead ? ahead : values) + d * KV_PACK,
                        count / KV_PACK, (int)(count % KV_PACK), head_dim, masks, sums);
        key += count;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store_part(out + r * head_dim + c * LANES, masks[c], sums[r][c]);
}

INLINE void KIND(weigh_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                              int fresh, const kv_operand *weights, float *out) {
    const int columns = columns_for(rows);
    const long all = pieces(p->pool.head_dim, LANES);
    long column = 0;
    for (; column + columns <= all; column += columns)
        KIND(weigh_columns)(rows, columns, p, tile, index, column * LANES, fresh, weights, out);
    if (columns > 2 && column + 2 <= all) {
        KIND(weigh_columns)(rows, 2, p, tile, index, column * LANES, fresh, weights, out);
        column += 2;
    }
    if (columns > 1 && column < all)
        KIND(weigh_columns)(rows, 1, p, tile, index, column * LANES, fresh, weights, out);
}

#define FOR_ROWS(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

#define CASE(n) \
    case n: KIND(score_range)(n <= MOST_ROWS ? n : 1, p, tile, index, q, scores); break;
static void KIND(score)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, const int32_t *q,
                        float *scores) {
    switch (tile->range[index].rows) { FOR_ROWS(CASE) }
}
#undef CASE

#define CASE(n) \
    case n: KIND(weigh_range)(n <= MOST_ROWS ? n : 1, p, tile, index, fresh, weights, out); break;
static void KIND(weigh)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, int fresh,
                        const kv_operand *weights, float *out) {
    switch (tile->range[index].rows) { FOR_ROWS(CASE) }
}
#undef CASE
#undef FOR_ROWS

/* --------------------------------------------------------------------------------------------------- a tile of rows */

/* Results of all rows of a tile in its split. */
static void KIND(attend_tile)(const NAME(attention) *p, const NAME(row_tile) *tile, int thread) {
    const long d = p->pool.head_dim;
    const int rows = tile->rows;
    int32_t *q = team_memory(p->team, thread, QUERIES_SLOT, 0);
    float *scores = team_memory(p->team, thread, SCORES_SLOT, 0), *values = scores + MOST_ROWS * SCORE_STRIDE;
    kv_operand *weights = team_memory(p->team, thread, WEIGHTS_SLOT, 0);
    float *result = team_memory(p->team, thread, RESULT_SLOT, 0);
    for (long w = 0; w < d / KV_PACK; w++)
        for (int r = 0; r < rows; r++) memcpy(&q[w * rows + r], tile->q[r] + w * sizeof *q, sizeof *q);
    for (int i = 0; i < tile->ranges; i++) KIND(score)(p, tile, i, q, scores);
    float *own[MOST_ROWS];
    for (int i = 0; i < tile->ranges; i++) {
        const query_range *range = &tile->range[i];
        if (tile->common && !i) continue;
        for (int r = range->first_row; r < range->first_row + range->rows; r++) {
            own[r] = tile->joined ? result + r * (d + VALUES) : tile->result[r];
            own[r][SUM] = KIND(soften)(scores + r * SCORE_STRIDE, tile->visible[r], range->last,
                                       weights + r * WEIGHT_STRIDE, &own[r][TOP]);
        }
    }
    for (int i = 0; i < tile->ranges; i++) KIND(weigh)(p, tile, i, !(tile->common && i), weights, values);
    for (int r = 0; r < rows; r++) memcpy(own[r] + VALUES, values + r * d, (size_t)d * sizeof(float));
    if (tile->joined) NAME(join)(rows, tile->result, (const float *const *)own, d);
}
