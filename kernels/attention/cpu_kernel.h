/* Causal attention over the paged pool, decode, chunk and verification alike. See README.md for the order of sums.
 *
 * An item is a piece (some query tokens of one sequence) and a KV head, and for short pieces of long sequences one
 * split of 512 keys as well. Keys of a split are packed [words of a head][64] a tile, so that scores of 16 keys stand
 * in one register and no sum runs across lanes; values are packed [keys / PACK][head_dim][PACK], as weights are. */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "native/simd.h"
#include "native/threads.h"
#include "rotary/cpu_kernel.h"

enum { KEY_TILE = 64, SPLIT = 512, TILE_QUERIES = 6 };
enum { PIECE_ROWS = 96 };  /* query rows of a KV head in a piece, about: what packed keys are used for */
enum { LONE_TOKENS = 8 };  /* pieces of at most so many tokens are cut by splits, too */
enum { KEYS_AHEAD = 48 };  /* how far before its use a key is asked for */
enum { KEYS_SLOT = 0, VALUES_SLOT, SCORES_SLOT, WEIGHTS_SLOT, STATE_SLOT };

typedef struct {
    long row, tokens, position; /* first row in the batch; tokens; absolute position of the first */
    const int64_t *table;       /* block ids of the sequence */
    long splits;
    long partial; /* index of its first partial result, or -1: splits one after the other in one item */
    long item;    /* its first item */
} query_piece;

typedef struct {
    const element *q; /* [rows, q_stride] */
    element *y;       /* [rows, y_stride] */
    NAME(tiles_of_layer) pool;
    const query_piece *pieces;
    const int32_t *piece_of; /* [items] */
    float *partials;         /* [*, head_dim + 2]: maximum, sum, weighted values */
    uint64_t *ended;         /* [pieces, kv_heads] splits computed, of all layers so far */
    baton_team *team;
    long q_stride, y_stride, kv_heads, group, head_dim;
    float scale;
} NAME(attention);

INLINE const element *NAME(key_row)(const NAME(attention) *p, const query_piece *piece, long head, long key) {
    const NAME(tiles_of_layer) *pool = &p->pool;
    return pool->base + piece->table[key >> pool->block_shift] * pool->block_stride + head * pool->head_stride +
           (key & ((1L << pool->block_shift) - 1)) * p->head_dim;
}

/* Ask for the keys that come up and for the values of those at hand, which are read once the scores are known. */
INLINE void NAME(ask_for)(const NAME(attention) *p, const query_piece *piece, long head, long key) {
    const long end = piece->position + piece->tokens, bytes = p->head_dim * (long)sizeof(element);
    for (long i = key; i < smaller(key + LANES, end); i++) {
        const char *values = (const char *)(NAME(key_row)(p, piece, head, i) + p->pool.value_offset);
        for (long at = 0; at < bytes; at += 64) ask_outer(values + at);
    }
    for (long i = key + KEYS_AHEAD; i < smaller(key + KEYS_AHEAD + LANES, end); i++) {
        const char *keys = (const char *)NAME(key_row)(p, piece, head, i);
        for (long at = 0; at < bytes; at += 64) ask(keys + at);
    }
}

/* Keys first .. first + count of a head, tiles filled up with zeros. */
static void NAME(pack_keys)(const NAME(attention) *p, const query_piece *piece, long head, long first, long count,
                            int32_t *to) {
    const long words = p->head_dim / PACK;
    for (long at = 0; at < pieces(count, KEY_TILE) * KEY_TILE; at += LANES) {
        int32_t *tile = to + at / KEY_TILE * KEY_TILE * words + at % KEY_TILE;
        const element *rows[LANES];
        NAME(ask_for)(p, piece, head, first + at);
        for (int i = 0; i < LANES; i++)
            rows[i] = at + i < count ? NAME(key_row)(p, piece, head, first + at + i) : NULL;
        for (long w = 0; w < words; w += LANES) {
            const lane_mask mask = first_lanes(words - w);
            words16 in[LANES], out[LANES];
            for (int i = 0; i < LANES; i++)
                in[i] = rows[i] ? load_words_part(rows[i] + w * PACK, mask) : zero_words();
            transpose(in, out);
            const int used = (int)smaller(words - w, LANES);
            for (int i = 0; i < used; i++) store_words(tile + (w + i) * KEY_TILE, out[i]);
        }
    }
}

static void NAME(pack_values)(const NAME(attention) *p, const query_piece *piece, long head, long first, long count,
                              element *to) {
    const long d = p->head_dim, offset = p->pool.value_offset;
#if BATON_BFLOAT16
    for (long key = 0; key < count; key += 2, to += 2 * d) {
        const element *even = NAME(key_row)(p, piece, head, first + key) + offset;
        const element *odd = key + 1 < count ? NAME(key_row)(p, piece, head, first + key + 1) + offset : NULL;
        for (long i = 0; i < d; i += LANES) {
            const lane_mask mask = first_lanes(d - i);
            words16 low = load_halves(even + i, mask);
            words16 high = zero_words();
            if (odd) high = load_halves(odd + i, mask);
            store_words_part(to + 2 * i, mask, or_words(low, shift_left(high, 16)));
        }
    }
#else
    for (long key = 0; key < count; key++)
        memcpy(to + key * d, NAME(key_row)(p, piece, head, first + key) + offset, (size_t)d * sizeof(element));
#endif
}

/* Scores of `rows` query rows against one packed tile of 64 keys. */
INLINE void NAME(score_tile)(const int rows, const element *const *q, const int32_t *keys, long words, float scale,
                             float *scores) {
    lanes acc[TILE_QUERIES][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = zeros();
    for (long w = 0; w < words; w++, keys += KEY_TILE) {
        words16 k0 = load_words(keys), k1 = load_words(keys + 16);
        words16 k2 = load_words(keys + 32), k3 = load_words(keys + 48);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            words16 v = word(q[r] + w * PACK);
            acc[r][0] = multiply_add(acc[r][0], k0, v);
            acc[r][1] = multiply_add(acc[r][1], k1, v);
            acc[r][2] = multiply_add(acc[r][2], k2, v);
            acc[r][3] = multiply_add(acc[r][3], k3, v);
        }
    }
    const lanes factor = fill(scale);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) store(scores + r * SPLIT + i * LANES, mul(acc[r][i], factor));
}

/* Weighted values, `columns` registers of them from d on, of `rows` rows over `groups` groups of PACK keys. */
INLINE void NAME(value_tile)(const int rows, const int columns, const element *weights, const element *values,
                             long groups, long head_dim, long d, float *out) {
    lanes acc[TILE_QUERIES][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < columns; i++) acc[r][i] = zeros();
    const element *v = values + d * PACK;
    lane_mask masks[4];
#pragma GCC unroll 4
    for (int i = 0; i < columns; i++) masks[i] = first_lanes(head_dim - d - i * LANES);
    for (long g = 0; g < groups; g++, v += head_dim * PACK) {
        words16 pairs[4];
#pragma GCC unroll 4
        for (int i = 0; i < columns; i++) pairs[i] = load_words_part(v + i * LANES * PACK, masks[i]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            words16 p = word(weights + r * SPLIT + g * PACK);
#pragma GCC unroll 4
            for (int i = 0; i < columns; i++) acc[r][i] = multiply_add(acc[r][i], pairs[i], p);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < columns; i++)
            store_part(out + r * head_dim + d + i * LANES, masks[i], acc[r][i]);
}

INLINE void NAME(value_tiles)(const int rows, const element *weights, const element *values, long groups,
                              long head_dim, float *out) {
    for (long d = 0; d < head_dim; d += 4 * LANES) {
        switch (smaller(pieces(head_dim - d, LANES), 4)) {
            case 1: NAME(value_tile)(rows, 1, weights, values, groups, head_dim, d, out); break;
            case 2: NAME(value_tile)(rows, 2, weights, values, groups, head_dim, d, out); break;
            case 3: NAME(value_tile)(rows, 3, weights, values, groups, head_dim, d, out); break;
            default: NAME(value_tile)(rows, 4, weights, values, groups, head_dim, d, out);
        }
    }
}

#define ROWS_OF(n) \
    case n: \
        for (long t = 0; t < tiles; t++) \
            NAME(score_tile)(n, q, keys + t * KEY_TILE * words, words, scale, scores + t * KEY_TILE); \
        break;
static void NAME(score)(int rows, const element *const *q, const int32_t *keys, long tiles, long words, float scale,
                        float *scores) {
    switch (rows) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6) }
}
#undef ROWS_OF

#define ROWS_OF(n) \
    case n: NAME(value_tiles)(n, weights, values, groups, head_dim, out); break;
static void NAME(weigh)(int rows, const element *weights, const element *values, long groups, long head_dim,
                        float *out) {
    switch (rows) { ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6) }
}
#undef ROWS_OF

/* Weights of the `visible` keys of a row, e^(score - maximum), and 0 up to `padded`. Returns their sum. */
INLINE float NAME(soften)(const float *scores, long visible, long padded, element *weights, float *maximum) {
    lanes top = fill(-INFINITY), total = zeros();
    for (long i = 0; i < visible; i += LANES)
        top = higher_part(top, first_lanes(visible - i), load(scores + i));
    *maximum = top_lane(top);
    const lanes high = fill(*maximum);
    for (long i = 0; i < padded; i += LANES) {
        const lane_mask mask = first_lanes(visible - i);
        lanes v = exponential(sub(load_part(scores + i, mask), high));
        v = rounded(keep(mask, v));
        store_lanes(weights + i, first_lanes(LANES), v);
        total = add(total, v);
    }
    return sum_lanes(total);
}

/* Join a split's (maximum, sum, values) to those of the splits before it. */
INLINE void NAME(join)(float *state, const float *split, long head_dim) {
    if (split[1] == 0.0f) return; /* the row sees nothing there */
    const float top = state[0] > split[0] ? state[0] : split[0];
    const float old = exponential_of(state[0] - top), new = exponential_of(split[0] - top);
    state[0] = top;
    state[1] = state[1] * old + split[1] * new;
    const lanes a = fill(old), b = fill(new);
    for (long i = 0; i < head_dim; i += LANES) {
        const lane_mask mask = first_lanes(head_dim - i);
        lanes v = mul(load_part(state + 2 + i, mask), a);
        v = add(v, mul(load_part(split + 2 + i, mask), b));
        store_part(state + 2 + i, mask, v);
    }
}

/* (maximum, sum, values) of all rows of a piece and a head in one split. `to` holds [rows, head_dim + 2]. With `first`
 * they are written, otherwise joined to what stands there. */
static void NAME(attend_split)(const NAME(attention) *p, const query_piece *piece, long head, long split, int first,
                               int thread, float *to) {
    const long d = p->head_dim, words = d / PACK, begin = split * SPLIT;
    const long count = smaller(piece->position + piece->tokens - begin, SPLIT);
    int32_t *keys = team_memory(p->team, thread, KEYS_SLOT, 0);
    element *values = team_memory(p->team, thread, VALUES_SLOT, 0);
    float *scores = team_memory(p->team, thread, SCORES_SLOT, 0);
    element *weights = team_memory(p->team, thread, WEIGHTS_SLOT, 0);
    float *state = team_memory(p->team, thread, STATE_SLOT, 0);
    NAME(pack_keys)(p, piece, head, begin, count, keys);
    NAME(pack_values)(p, piece, head, begin, count, values);
    const long all = piece->tokens * p->group;
    for (long row = 0; row < all;) {
        const long left = all - row;
        const int rows = (int)(left <= TILE_QUERIES       ? left
                               : left < 2 * TILE_QUERIES ? (left + 1) / 2
                                                          : TILE_QUERIES);
        const element *q[TILE_QUERIES];
        long visible[TILE_QUERIES];
        for (int r = 0; r < rows; r++) {
            const long token = (row + r) / p->group;
            q[r] = p->q + (piece->row + token) * p->q_stride + (head * p->group + (row + r) % p->group) * d;
            visible[r] = smaller(piece->position + token + 1 - begin, SPLIT);
        }
        /* what the last row sees, the others see less of */
        const long most = visible[rows - 1], padded = pieces(larger(most, 0), LANES) * LANES;
        float *values_of_rows = scores + TILE_QUERIES * SPLIT;
        if (most > 0) NAME(score)(rows, q, keys, pieces(most, KEY_TILE), words, p->scale, scores);
        float tops[TILE_QUERIES], sums[TILE_QUERIES];
        for (int r = 0; r < rows; r++)
            sums[r] = NAME(soften)(scores + r * SPLIT, visible[r], padded, weights + r * SPLIT, &tops[r]);
        NAME(weigh)(rows, weights, values, pieces(larger(most, 0), PACK), d, values_of_rows);
        for (int r = 0; r < rows; r++) {
            float *target = to + (row + r) * (d + 2), *own = first ? target : state;
            own[0] = tops[r];
            own[1] = sums[r];
            memcpy(own + 2, values_of_rows + r * d, (size_t)d * sizeof(float));
            if (!first) NAME(join)(target, own, d);
        }
        row += rows;
    }
}

static void NAME(write_rows)(const NAME(attention) *p, const query_piece *piece, long head, const float *state) {
    const long d = p->head_dim;
    for (long row = 0; row < piece->tokens * p->group; row++, state += d + 2) {
        element *y = p->y + (piece->row + row / p->group) * p->y_stride + (head * p->group + row % p->group) * d;
        const lanes total = fill(state[1]);
        for (long i = 0; i < d; i += LANES) {
            const lane_mask mask = first_lanes(d - i);
            store_lanes(y + i, mask, divide(load_part(state + 2 + i, mask), total));
        }
    }
}

static void NAME(attention_item)(const void *argument, long item, int thread) {
    const NAME(attention) *p = argument;
    const long at = p->piece_of[item];
    const query_piece *piece = &p->pieces[at];
    const long rows = piece->tokens * p->group, size = rows * (p->head_dim + 2);
    if (piece->partial < 0) {
        float *state = (float *)team_memory(p->team, thread, STATE_SLOT, 0) + p->head_dim + 2;
        const long head = item - piece->item;
        for (long split = 0; split < piece->splits; split++)
            NAME(attend_split)(p, piece, head, split, split == 0, thread, state);
        NAME(write_rows)(p, piece, head, state);
        return;
    }
    const long head = (item - piece->item) / piece->splits, split = (item - piece->item) % piece->splits;
    const long before = piece->partial * p->kv_heads * p->group + head * piece->splits * rows;
    float *partials = p->partials + before * (p->head_dim + 2);
    NAME(attend_split)(p, piece, head, split, 1, thread, partials + split * size);
    uint64_t *ended = &p->ended[at * p->kv_heads + head];
    if (__atomic_add_fetch(ended, 1, __ATOMIC_ACQ_REL) % (uint64_t)piece->splits) return;
    /* the last one joins them, in order */
    for (long i = 1; i < piece->splits; i++)
        for (long row = 0; row < rows; row++)
            NAME(join)(partials + row * (p->head_dim + 2), partials + i * size + row * (p->head_dim + 2), p->head_dim);
    NAME(write_rows)(p, piece, head, partials);
}

#endif
