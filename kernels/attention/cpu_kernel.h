/* Causal attention over the paged pool, decode, chunk and verification alike. See README.md for the order of sums.
 *
 * A piece is some query tokens of one sequence. A unit is a piece with all its splits of 512 keys, one after the other,
 * or pieces of few tokens with one split, which they may read from the same blocks. An item is a unit and a KV head. */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "attention/cpu_integer_tile.h"
#define KV_HALVES 0
#include "attention/cpu_tile.h"
#undef KV_HALVES
#define KV_HALVES 1
#include "attention/cpu_tile.h"
#undef KV_HALVES

static void NAME(attend_rows)(const NAME(attention) *p, const NAME(row_tile) *tile, int thread) {
    if (p->pool.format == KV_INT8)
        NAME(attend_integers)(p, tile, thread);
    else if (p->pool.format == KV_FLOAT16)
        NAME(attend_tile_halves)(p, tile, thread);
    else
        NAME(attend_tile)(p, tile, thread);
}

/* Rows row .. row + rows of a piece into a tile, if they see something of the split. `to`: the result of the first. */
INLINE void NAME(add_rows)(const NAME(attention) *p, NAME(row_tile) *tile, const query_piece *piece, long row, int rows,
                           float *to, int cold) {
    const long d = p->pool.head_dim;
    for (int r = 0; r < rows; r++) {
        const long token = (row + r) / p->group, at = tile->rows + r;
        const long number = (piece->row + token) * p->q_stride + (tile->head * p->group + (row + r) % p->group) * d;
        tile->q[at] = (const char *)p->q + number * p->q_bytes;
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
        if (tile.range[0].last || !joined) NAME(attend_rows)(p, &tile, thread);
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
    return p->partials + (piece->partial * p->pool.kv_heads * p->group + (head * piece->splits + split) * rows) *
                             (p->pool.head_dim + VALUES);
}

/* Who computes the last split of a piece joins them all, in order. */
static void NAME(end_split)(const NAME(attention) *p, const query_piece *piece, long head) {
    const long rows = piece->tokens * p->group, size = p->pool.head_dim + VALUES;
    uint64_t *ended = &p->ended[(piece - p->pieces) * p->pool.kv_heads + head];
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
        NAME(attend_rows)(p, &tile, thread);
        tile.rows = 0;
    }
    for (long i = 0; i < unit->count; i++) NAME(end_split)(p, &all[i], head);
}

static void NAME(attention_item)(const void *argument, long item, int thread) {
    const NAME(attention) *p = argument;
    const query_unit *unit = &p->units[item / p->pool.kv_heads];
    const long head = item % p->pool.kv_heads;
    if (unit->split < 0) {
        const query_piece *piece = &p->pieces[unit->piece];
        if (piece->wanted || !p->wanted_only) NAME(attend_alone)(p, piece, head, thread);
        return;
    }
    query_range next = {0};
    const query_unit *follows = unit + (head + 1 == p->pool.kv_heads);
    if (follows < p->units + p->num_units)
        next = NAME(beginning)(&p->pieces[follows->piece], (head + 1) % p->pool.kv_heads, larger(0, follows->split));
    NAME(attend_together)(p, unit, head, next, thread);
}

#endif
