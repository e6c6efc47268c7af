/* Rotate a token's query and key heads, and store its keys and values in the pool. */
#ifndef BATON_ROTARY_H
#define BATON_ROTARY_H

#include "native/simd.h"
#include "store_kv/cpu_kernel.h"

typedef struct {
    void *qkv; /* [tokens, stride]: query heads and key heads, which are rotated in place, value heads; elements, or
                * float32 where keys and values are stored as halves: then nothing is rounded before */
    const float *table; /* [positions, 2, head_dim]: cos, then sin with the sign of its half */
    const int64_t *positions, *slots; /* [tokens]; a slot of -1: not stored */
    tiles_of_layer pool;
    long stride, q_heads;
} NAME(rotation);

INLINE lanes NAME(get)(const void *x, long i, lane_mask mask, const int floats) {
    return floats ? load_part((const float *)x + i, mask) : load_lanes((const element *)x + i, mask);
}

INLINE void NAME(put)(void *x, long i, lane_mask mask, const int floats, lanes v) {
    if (floats)
        store_part((float *)x + i, mask, v);
    else
        store_lanes((element *)x + i, mask, v);
}

/* Rotate a head in place. */
INLINE void NAME(rotate)(void *x, const int floats, const float *cosine, const float *sine, long head_dim) {
    const long half = head_dim / 2;
    for (long i = 0; i < half; i += LANES) {
        const lane_mask mask = first_lanes(half - i);
        lanes low = NAME(get)(x, i, mask, floats), high = NAME(get)(x, half + i, mask, floats);
        lanes c = load_part(cosine + i, mask), s = load_part(sine + half + i, mask);
        NAME(put)(x, i, mask, floats, sub(mul(low, c), mul(high, s)));
        NAME(put)(x, half + i, mask, floats, add(mul(high, c), mul(low, s)));
    }
}

INLINE void NAME(rotate_token)(const NAME(rotation) *p, long token, const int floats) {
    const long slot = p->slots[token], d = p->pool.head_dim;
    const long head = d * (floats ? (long)sizeof(float) : (long)sizeof(element));
    char *q = (char *)p->qkv + token * (p->stride * (head / d)), *k = q + p->q_heads * head;
    const float *cosine = p->table + p->positions[token] * 2 * d, *sine = cosine + d;
    for (long h = 0; h < p->q_heads; h++) NAME(rotate)(q + h * head, floats, cosine, sine, d);
    if (slot < 0) return;
    for (long h = 0; h < p->pool.kv_heads; h++) NAME(rotate)(k + h * head, floats, cosine, sine, d);
    NAME(store_token)(&p->pool, slot, k, k + p->pool.kv_heads * head);
}

static void NAME(rotation_item)(const void *argument, long token, int thread) {
    (void)thread;
    const NAME(rotation) *p = argument;
    if (p->pool.format == KV_FLOAT16)
        NAME(rotate_token)(p, token, 1);
    else
        NAME(rotate_token)(p, token, 0);
}

#endif
