/* Rotate a token's query and key heads, and store its keys and values in the pool. */
#ifndef BATON_ROTARY_H
#define BATON_ROTARY_H

#include "native/simd.h"

/* One layer's tiles of the pool, plain rows: of block b and head h, keys stand at
 * base + b * block_stride + h * head_stride, values value_offset further on; each [block_size, head_dim]. */
typedef struct {
    element *base;
    long block_stride, head_stride, value_offset;
    int block_shift; /* block_size = 1 << block_shift */
} NAME(tiles_of_layer);

typedef struct {
    element *qkv; /* [tokens, stride]: query heads, which are rotated in place, key heads, value heads */
    const float *table; /* [positions, 2, head_dim]: cos, then sin with the sign of its half */
    const int64_t *positions, *slots; /* [tokens]; a slot of -1: not stored */
    NAME(tiles_of_layer) pool;
    long stride, q_heads, kv_heads, head_dim;
} NAME(rotation);

INLINE void NAME(rotate)(const element *from, element *to, const float *cosine, const float *sine, long head_dim) {
    const long half = head_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const lane_mask mask = first_lanes(half - i);
        lanes low = load_lanes(from + i, mask), high = load_lanes(from + half + i, mask);
        lanes c = load_part(cosine + i, mask), s = load_part(sine + half + i, mask);
        store_lanes(to + i, mask, sub(mul(low, c), mul(high, s)));
        store_lanes(to + half + i, mask, add(mul(high, c), mul(low, s)));
    }
}

static void NAME(rotation_item)(const void *argument, long token, int thread) {
    (void)thread;
    const NAME(rotation) *p = argument;
    const long d = p->head_dim, slot = p->slots[token];
    element *q = p->qkv + token * p->stride, *k = q + p->q_heads * d, *v = k + p->kv_heads * d;
    const float *cosine = p->table + p->positions[token] * 2 * d, *sine = cosine + d;
    for (long h = 0; h < p->q_heads; h++) NAME(rotate)(q + h * d, q + h * d, cosine, sine, d);
    if (slot < 0) return;
    const long block = slot >> p->pool.block_shift, offset = slot - (block << p->pool.block_shift);
    element *tile = p->pool.base + block * p->pool.block_stride + offset * d;
    for (long h = 0; h < p->kv_heads; h++, tile += p->pool.head_stride) {
        NAME(rotate)(k + h * d, tile, cosine, sine, d);
        memcpy(tile + p->pool.value_offset, v + h * d, (size_t)d * sizeof(element));
    }
}

#endif
