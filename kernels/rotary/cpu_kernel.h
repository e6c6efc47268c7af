/* Rotate a token's query and key heads, and store its keys and values in the pool. */
#ifndef BATON_ROTARY_H
#define BATON_ROTARY_H

#include "native/simd.h"
#include "store_kv/cpu_kernel.h"

typedef struct {
    element *qkv; /* [tokens, stride]: query heads and key heads, which are rotated in place, value heads */
    const float *table; /* [positions, 2, head_dim]: cos, then sin with the sign of its half */
    const int64_t *positions, *slots; /* [tokens]; a slot of -1: not stored */
    tiles_of_layer pool;
    long stride, q_heads;
} NAME(rotation);

/* Rotate a head in place. */
INLINE void NAME(rotate)(element *x, const float *cosine, const float *sine, long head_dim) {
    const long half = head_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const lane_mask mask = first_lanes(half - i);
        lanes low = load_lanes(x + i, mask), high = load_lanes(x + half + i, mask);
        lanes c = load_part(cosine + i, mask), s = load_part(sine + half + i, mask);
        store_lanes(x + i, mask, sub(mul(low, c), mul(high, s)));
        store_lanes(x + half + i, mask, add(mul(high, c), mul(low, s)));
    }
}

static void NAME(rotation_item)(const void *argument, long token, int thread) {
    (void)thread;
    const NAME(rotation) *p = argument;
    const long d = p->pool.head_dim, slot = p->slots[token];
    element *q = p->qkv + token * p->stride, *k = q + p->q_heads * d, *v = k + p->pool.kv_heads * d;
    const float *cosine = p->table + p->positions[token] * 2 * d, *sine = cosine + d;
    for (long h = 0; h < p->q_heads; h++) NAME(rotate)(q + h * d, cosine, sine, d);
    if (slot < 0) return;
    for (long h = 0; h < p->pool.kv_heads; h++) NAME(rotate)(k + h * d, cosine, sine, d);
    NAME(store_token)(&p->pool, slot, k, v);
}

#endif
