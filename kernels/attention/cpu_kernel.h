/* Causal attention over the paged pool, decode, chunk and verification alike. See README.md for the order of sums.
 *
 * A piece is some query tokens of one sequence. A unit is a piece with all its splits of 512 keys, one after the other,
 * or pieces of few tokens with one split, which they may read from the same blocks. An item is a unit and a KV head. */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "attention/cpu_products.h"
#include "native/threads.h"
#include "store_kv/cpu_kernel.h"

enum { PIECE_ROWS = 96 };    /* query rows of a KV head in a unit, about: what keys and values are read for */
enum { AHEAD_BYTES = 8192 }; /* how far before its use memory is asked for */
enum { SCORES_SLOT = 0, WEIGHTS_SLOT, QUERIES_SLOT, RESULT_SLOT, STATE_SLOT };

typedef struct {
    long row, tokens, position; /* first row in the batch; tokens; absolute position of the first */
    const int64_t *table;       /* block ids of the sequence */
    long seen;                  /* whole blocks that all its rows see */
    long splits;
    long partial; /* of few tokens: index of its first partial result; or -1 */
} query_piece;

typedef struct {
    long piece, count; /* pieces[piece .. piece + count) */
    long split;        /* or -1: all, of one piece */
    long common;       /* keys of the split, from its first, that lie in the same blocks for all the pieces */
} query_unit;

typedef struct {
    const element *q; /* [rows, q_stride] */
    element *y;       /* [rows, y_stride] */
    NAME(tiles_of_layer) pool;
    const query_piece *pieces;
    const query_unit *units;
    float *partials; /* [*, head_dim + 2] */
    uint64_t *ended; /* [pieces, kv_heads] splits computed, of all layers so far */
    baton_team *team;
    long num_units, q_stride, y_stride, kv_heads, group;
    float scale;
} NAME(attention);

/* Keys `first` .. `last` of a split that rows first_row .. first_row + rows of a tile read from one table. */
typedef struct {
    const int64_t *table;
    long head, begin, first, last; /* the split's first position; places in it */
    int first_row, rows;
    int cold; /* nobody has just read them */
} query_range;

/* Query rows that are computed together: of one piece, or of several that are small and have common keys. */
typedef struct {
    long head, begin, common;
    int rows, ranges;
    const element *q[MOST_ROWS];
    float *result[MOST_ROWS]; /* where their results go, or what they are joined to */
    long visible[MOST_ROWS];
    query_range range[MOST_ROWS + 1]; /* the common one first */
    query_range next;                 /* what is read after this tile */
    int joined;
} NAME(row_tile);

/* -------------------------------------------------------------------------------------------------- reading a range */

INLINE const element *NAME(run_of)(const NAME(attention) *p, const query_range *range, long at, int values) {
    return NAME(keys_at)(&p->pool, range->table, range->head, range->begin + at) + (values ? p->pool.value_offset : 0);
}

/* The run of 16 keys or values that will be read AHEAD_BYTES after the one at `at` of a range: first come the keys of
 * all ranges, then their values, then keys of the next tile. NULL: nothing is known of that. */
INLINE const element *NAME(run_ahead)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, long at,
                                      int values) {
    const query_range *range = &tile->range[index];
    at += pieces(AHEAD_BYTES, p->pool.head_dim * (long)sizeof(element) * LANES) * LANES;
    while (at >= range->last || !range->cold) {
        if (range == &tile->next) return NULL;
        at -= range->cold ? range->last : range->first;
        if (++index == tile->ranges) {
            index = 0;
            range = values++ ? &tile->next : tile->range;
        } else {
            range = &tile->range[index];
        }
        at += range->first;
    }
    return NAME(run_of)(p, range, at / LANES * LANES, values == 1);
}

/* Scores of a range for its rows. */
INLINE void NAME(score_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                              const int32_t *q, float *scores) {
    const query_range *range = &tile->range[index];
    const int columns = columns_for(rows);
    for (long key = range->first; key < range->last; key += columns * LANES) {
        const element *keys[4], *ahead[4];
        for (int c = 0; c < columns; c++) {
            const long at = smaller(key + c * LANES, (range->last - 1) / LANES * LANES);
            keys[c] = NAME(run_of)(p, range, at, 0);
            ahead[c] = range->cold ? NAME(run_ahead)(p, tile, index, at, 0) : NULL;
            if (!ahead[c]) ahead[c] = keys[c];
        }
        NAME(score_keys)(rows, columns, q + range->first_row, tile->rows, keys, ahead, p->pool.head_dim / PACK,
                         p->scale, scores + range->first_row * SCORE_STRIDE + key);
    }
}

/* Weighted values of a range for its rows, `columns` registers from d on: begun with `fresh`, or added to `out`. */
INLINE void NAME(weigh_columns)(const int rows, const int columns, const NAME(attention) *p, const NAME(row_tile) *tile,
                                int index, long d, int fresh, const element *weights, float *out) {
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
        const element *values = NAME(run_of)(p, range, key, 1);
        const element *ahead = range->cold ? NAME(run_ahead)(p, tile, index, key, 1) : NULL;
        NAME(weigh_run)(rows, columns, weights + key, values + d * PACK, (ahead ? ahead : values) + d * PACK,
                        count / PACK, (int)(count % PACK), head_dim, masks, sums);
        key += count;
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) store_part(out + r * head_dim + c * LANES, masks[c], sums[r][c]);
}

INLINE void NAME(weigh_range)(const int rows, const NAME(attention) *p, const NAME(row_tile) *tile, int index,
                              int fresh, const element *weights, float *out) {
    const int columns = columns_for(rows);
    const long all = pieces(p->pool.head_dim, LANES);
    long column = 0;
    for (; column + columns <= all; column += columns)
        NAME(weigh_columns)(rows, columns, p, tile, index, column * LANES, fresh, weights, out);
    if (columns > 2 && column + 2 <= all) {
        NAME(weigh_columns)(rows, 2, p, tile, index, column * LANES, fresh, weights, out);
        column += 2;
    }
    if (columns > 1 && column < all)
        NAME(weigh_columns)(rows, 1, p, tile, index, column * LANES, fresh, weights, out);
}

#define FOR_ROWS(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)

#define CASE(n) \
    case n: NAME(score_range)(n <= MOST_ROWS ? n : 1, p, tile, index, q, scores); break;
static void NAME(score)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, const int32_t *q,
                        float *scores) {
    switch (tile->range[index].rows) { FOR_ROWS(CASE) }
}
#undef CASE

#define CASE(n) \
    case n: NAME(weigh_range)(n <= MOST_ROWS ? n : 1, p, tile, index, fresh, weights, out); break;
static void NAME(weigh)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, int fresh,
                        const element *weights, float *out) {
    switch (tile->range[index].rows) { FOR_ROWS(CASE) }
}
#undef CASE
#undef FOR_ROWS

/* --------------------------------------------------------------------------------------------------- a tile of rows */

/* Results of all rows of a tile in its split. */
static void NAME(attend_tile)(const NAME(attention) *p, const NAME(row_tile) *tile, int thread) {
    const long d = p->pool.head_dim;
    const int rows = tile->rows;
    int32_t *q = team_memory(p->team, thread, QUERIES_SLOT, 0);
    float *scores = team_memory(p->team, thread, SCORES_SLOT, 0), *values = scores + MOST_ROWS * SCORE_STRIDE;
    element *weights = team_memory(p->team, thread, WEIGHTS_SLOT, 0);
    float *result = team_memory(p->team, thread, RESULT_SLOT, 0);
    for (long w = 0; w < d / PACK; w++)
        for (int r = 0; r < rows; r++) memcpy(&q[w * rows + r], tile->q[r] + w * PACK, sizeof *q);
    for (int i = 0; i < tile->ranges; i++) NAME(score)(p, tile, i, q, scores);
    float *own[MOST_ROWS];
    for (int i = 0; i < tile->ranges; i++) {
        const query_range *range = &tile->range[i];
        if (tile->common && !i) continue;
        for (int r = range->first_row; r < range->first_row + range->rows; r++) {
            own[r] = tile->joined ? result + r * (d + VALUES) : tile->result[r];
            own[r][SUM] = NAME(soften)(scores + r * SCORE_STRIDE, tile->visible[r], range->last,
                                       weights + r * WEIGHT_STRIDE, &own[r][TOP]);
        }
    }
    for (int i = 0; i < tile->ranges; i++) NAME(weigh)(p, tile, i, !(tile->common && i), weights, values);
    for (int r = 0; r < rows; r++) memcpy(own[r] + VALUES, values + r * d, (size_t)d * sizeof(float));
    if (tile->joined) NAME(join)(rows, tile->result, (const float *const *)own, d);
}

/* Rows row .. row + rows of a piece into a tile, if they see something of the split. `to`: the result of the first. */
INLINE void NAME(add_rows)(const NAME(attention) *p, NAME(row_tile) *tile, const query_piece *piece, long row, int rows,
                           float *to, int cold) {
    const long d = p->pool.head_dim;
    for (int r = 0; r < rows; r++) {
        const long token = (row + r) / p->group, at = tile->rows + r;
        tile->q[at] = p->q + (piece->row + token) * p->q_stride + (tile->head * p->group + (row + r) % p->group) * d;
        tile->visible[at] = larger(0, smaller(piece->position + token + 1 - tile->begin, SPLIT));
        tile->result[at] = to + r * (d + VALUES);
    }
    /* what the last row sees, the others see less of */
    tile->range[tile->ranges++] = (query_range){
        piece->table, tile->head, tile->begin, tile->common, tile->visible[tile->rows + rows - 1], tile->rows, rows,
        cold,
    };
    tile->rows += rows;
}

INLINE void NAME(begin_tile)(NAME(row_tile) *tile, const query_piece *piece, long head, long split, long common,
                             int cold, int joined) {
    tile->head = head;
    tile->begin = split * SPLIT;
    tile->common = common;
    tile->rows = tile->ranges = 0;
    tile->joined = joined;
    tile->next = (query_range){0};
    if (common) tile->range[tile->ranges++] = (query_range){piece->table, head, tile->begin, 0, common, 0, 0, cold};
}

/* All rows of a piece in one split, tile by tile; `next` is read after them. */
static void NAME(attend_piece)(const NAME(attention) *p, const query_piece *piece, long head, long split, int joined,
                               query_range next, int thread, float *to) {
    const long all = piece->tokens * p->group;
    NAME(row_tile) tile;
    for (long row = 0; row < all;) {
        const long left = all - row;
        const int rows = (int)(left <= MOST_ROWS ? left : left < 2 * MOST_ROWS ? (left + 1) / 2 : MOST_ROWS);
        NAME(begin_tile)(&tile, piece, head, split, 0, 0, joined);
        NAME(add_rows)(p, &tile, piece, row, rows, to + row * (p->pool.head_dim + VALUES), !row);
        row += rows;
        if (row == all) tile.next = next;
        if (tile.range[0].last || !joined) NAME(attend_tile)(p, &tile, thread);
    }
}

/* ------------------------------------------------------------------------------------------------------------ items */

static void NAME(write_rows)(const NAME(attention) *p, const query_piece *piece, long head, const float *state) {
    const long d = p->pool.head_dim;
    for (long row = 0; row < piece->tokens * p->group; row++, state += d + VALUES) {
        element *y = p->y + (piece->row + row / p->group) * p->y_stride + (head * p->group + row % p->group) * d;
        const lanes total = fill(state[SUM]);
        for (long i = 0; i < d; i += LANES) {
            const lane_mask mask = first_lanes(d - i);
            store_lanes(y + i, mask, divide(load_part(state + VALUES + i, mask), total));
        }
    }
}

/* What a piece reads first in a split. */
INLINE query_range NAME(beginning)(const query_piece *piece, long head, long split) {
    const long end = piece->position + piece->tokens - split * SPLIT;
    return (query_range){piece->table, head, split * SPLIT, 0, larger(0, smaller(end, SPLIT)), 0, 0, 1};
}

static void NAME(attend_alone)(const NAME(attention) *p, const query_piece *piece, long head, int thread) {
    float *state = team_memory(p->team, thread, STATE_SLOT, 0);
    for (long split = 0; split < piece->splits; split++)
        NAME(attend_piece)(p, piece, head, split, split > 0, NAME(beginning)(piece, head, split + 1), thread, state);
    NAME(write_rows)(p, piece, head, state);
}

/* A piece's partial results of one split and head: [splits, tokens * group, head_dim + 2], heads outside. */
INLINE float *NAME(partials_of)(const NAME(attention) *p, const query_piece *piece, long head, long split) {
    const long rows = piece->tokens * p->group;
    return p->partials + (piece->partial * p->kv_heads * p->group + (head * piece->splits + split) * rows) *
                             (p->pool.head_dim + VALUES);
}

/* Who computes the last split of a piece joins them all, in order. */
static void NAME(end_split)(const NAME(attention) *p, const query_piece *piece, long head) {
    const long rows = piece->tokens * p->group, size = p->pool.head_dim + VALUES;
    uint64_t *ended = &p->ended[(piece - p->pieces) * p->kv_heads + head];
    if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) % (uint64_t)piece->splits) return;
    float *state = NAME(partials_of)(p, piece, head, 0);
    for (long split = 1; split < piece->splits; split++) {
        const float *partial = NAME(partials_of)(p, piece, head, split);
        for (long row = 0; row < rows; row += MOST_ROWS) {
            float *states[MOST_ROWS];
            const float *partials[MOST_ROWS];
            const int count = (int)smaller(rows - row, MOST_ROWS);
            for (int r = 0; r < count; r++) {
                states[r] = state + (row + r) * size;
                partials[r] = partial + (row + r) * size;
            }
            NAME(join)(count, states, partials, p->pool.head_dim);
        }
    }
    NAME(write_rows)(p, piece, head, state);
}

static void NAME(attend_together)(const NAME(attention) *p, const query_unit *unit, long head, query_range next,
                                  int thread) {
    const query_piece *all = &p->pieces[unit->piece];
    NAME(row_tile) tile;
    tile.rows = 0;
    for (long i = 0; i < unit->count; i++) {
        const long rows = all[i].tokens * p->group;
        const query_range after = i + 1 < unit->count ? NAME(beginning)(&all[i + 1], head, unit->split) : next;
        float *to = NAME(partials_of)(p, &all[i], head, unit->split);
        if (rows > MOST_ROWS || !unit->common) {
            NAME(attend_piece)(p, &all[i], head, unit->split, 0, after, thread, to);
            continue;
        }
        if (!tile.rows) NAME(begin_tile)(&tile, &all[i], head, unit->split, unit->common, !i, 0);
        NAME(add_rows)(p, &tile, &all[i], 0, (int)rows, to, 1);
        if (i + 1 < unit->count && tile.rows + all[i + 1].tokens * p->group <= MOST_ROWS) continue;
        tile.range[0].rows = tile.rows;
        tile.next = after;
        tile.next.first = smaller(tile.next.last, unit->common);
        NAME(attend_tile)(p, &tile, thread);
        tile.rows = 0;
    }
    for (long i = 0; i < unit->count; i++) NAME(end_split)(p, &all[i], head);
}

static void NAME(attention_item)(const void *argument, long item, int thread) {
    const NAME(attention) *p = argument;
    const query_unit *unit = &p->units[item / p->kv_heads];
    const long head = item % p->kv_heads;
    if (unit->split < 0) {
        NAME(attend_alone)(p, &p->pieces[unit->piece], head, thread);
        return;
    }
    query_range next = {0};
    const query_unit *follows = unit + (head + 1 == p->kv_heads);
    if (follows < p->units + p->num_units)
        next = NAME(beginning)(&p->pieces[follows->piece], (head + 1) % p->kv_heads, larger(0, follows->split));
    NAME(attend_together)(p, unit, head, next, thread);
}

#endif
