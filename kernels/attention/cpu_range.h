/* Which query rows are computed together, and the keys and values that they read, in their order. */
#ifndef BATON_ATTENTION_RANGE_H
#define BATON_ATTENTION_RANGE_H

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
    int wanted;   /* one of its rows has its logits wanted */
} query_piece;

typedef struct {
    long piece, count; /* pieces[piece .. piece + count) */
    long split;        /* or -1: all, of one piece */
    long common;       /* keys of the split, from its first, that lie in the same blocks for all the pieces */
} query_unit;

typedef struct {
    const void *q; /* [rows, q_stride] elements, or float32 for keys and values of halves */
    element *y;    /* [rows, y_stride] */
    tiles_of_layer pool;
    const query_piece *pieces;
    const query_unit *units;
    float *partials; /* [*, head_dim + 2] */
    uint64_t *ended; /* [pieces, kv_heads] splits computed, of all layers so far */
    baton_team *team;
    long num_units, q_stride, q_bytes, y_stride, group; /* q_bytes: of a number of q */
    float scale;
    int wanted_only; /* of long pieces: nobody looks at what the others would be */
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
    const char *q[MOST_ROWS];
    float *result[MOST_ROWS]; /* where their results go, or what they are joined to */
    long visible[MOST_ROWS];
    query_range range[MOST_ROWS + 1]; /* the common one first */
    query_range next;                 /* what is read after this tile */
    int joined;
} NAME(row_tile);

/* -------------------------------------------------------------------------------------------------- reading a range */

INLINE const char *NAME(run_of)(const NAME(attention) *p, const query_range *range, long at, int values) {
    return keys_at(&p->pool, range->table, range->head, range->begin + at) + (values ? p->pool.value_offset : 0);
}

INLINE const float *NAME(scales_of_run)(const NAME(attention) *p, const query_range *range, long at, int values) {
    return scales_at(&p->pool, range->table, range->head, range->begin + at, values);
}

/* A run of 16 keys or values: of which range, its place in the split. */
typedef struct {
    const query_range *range; /* NULL: of nobody */
    long at;
    int values;
} key_run;

/* The run that will be read AHEAD_BYTES after the one at `at` of a range: first come the keys of all ranges, then their
 * values, then keys of the next tile; of nobody where nothing is known of that. */
INLINE key_run NAME(ahead_of)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, long at, int values) {
    const query_range *range = &tile->range[index];
    at += pieces(AHEAD_BYTES, p->pool.vector_bytes * LANES) * LANES;
    while (at >= range->last || !range->cold) {
        if (range == &tile->next) return (key_run){0};
        at -= range->cold ? range->last : range->first;
        if (++index == tile->ranges) {
            index = 0;
            range = values++ ? &tile->next : tile->range;
        } else {
            range = &tile->range[index];
        }
        at += range->first;
    }
    return (key_run){range, at / LANES * LANES, values == 1};
}

/* Where that run lies, or NULL. */
INLINE const char *NAME(run_ahead)(const NAME(attention) *p, const NAME(row_tile) *tile, int index, long at,
                                   int values) {
    const key_run run = NAME(ahead_of)(p, tile, index, at, values);
    return run.range ? NAME(run_of)(p, run.range, run.at, run.values) : NULL;
}

#endif
