/* Where a layer's keys and values lie in the pool, and how a token's get there.
 *
 * The tile of a block and a KV head holds its keys as [block_size / 16][words of a head][16]: a word of 16 keys is one
 * register, so that scores need no sum across lanes. Values are [block_size / n][head_dim][n], where a word holds n:
 * one register holds what 16 sums take of n keys. Either way 16 keys are one run of as many vectors.
 *
 *   KV_ELEMENTS  a word is PACK elements
 *   KV_FLOAT16   a word is one half, 16 bits: converted to float32 lane by lane. What goes beyond the largest, 65504,
 *                is stored as that; a NaN or an infinity as a NaN
 *   KV_INT8      a word is four bytes, key = scale * (byte - 128), value = scale * signed byte; the scales are float32
 *                [layers][2][kv_heads][block_size] behind all tiles of the block. A vector with a NaN or an infinity has
 *                the scale NaN. */
#ifndef BATON_STORE_KV_H
#define BATON_STORE_KV_H

#include "native/model.h"
#include "native/simd.h"

/* Distances are bytes. Of block b and head h, keys stand at base + b * block_stride + h * head_stride, values
 * value_offset further on; their scales at scales + b * block_stride. */
typedef struct {
    char *base, *scales;
    long block_stride, head_stride, value_offset, vector_bytes, head_dim, kv_heads;
    int block_shift; /* block_size = 1 << block_shift, at least 16 */
    int format;
} tiles_of_layer;

/* What the largest magnitude of a vector is at least taken for: the inverse of its scale would not be finite. */
static const float LEAST_TOP = 1e-30f;

INLINE long offset_in_block(const tiles_of_layer *pool, long key) { return key & ((1L << pool->block_shift) - 1); }

/* The run that begins with key `key` of a sequence: a multiple of 16 for keys, of a word's keys for values. */
INLINE const char *keys_at(const tiles_of_layer *pool, const int64_t *table, long head, long key) {
    return pool->base + table[key >> pool->block_shift] * pool->block_stride + head * pool->head_stride +
           offset_in_block(pool, key) * pool->vector_bytes;
}

INLINE long scale_index(const tiles_of_layer *pool, long head, int values, long offset) {
    return (((values ? pool->kv_heads : 0) + head) << pool->block_shift) + offset;
}

/* Scales of the keys or values from `key` on, within its block. */
INLINE const float *scales_at(const tiles_of_layer *pool, const int64_t *table, long head, long key, int values) {
    const char *block = pool->scales + table[key >> pool->block_shift] * pool->block_stride;
    return (const float *)block + scale_index(pool, head, values, offset_in_block(pool, key));
}

/* ------------------------------------------------------------------------------------------------------------ storing */

/* Keys and values of one token into its place of a block; [kv_heads, head_dim] each. */
static void NAME(store_elements)(const tiles_of_layer *pool, char *tile, long offset, const element *keys,
                                 const element *values) {
    const long d = pool->head_dim;
    for (long h = 0; h < pool->kv_heads; h++, tile += pool->head_stride, keys += d, values += d) {
        element *key = (element *)tile + offset / LANES * LANES * d + offset % LANES * PACK;
        for (long i = 0; i < d; i += PACK) memcpy(key + i * LANES, keys + i, PACK * sizeof(element));
        element *value = (element *)(tile + pool->value_offset) + offset / PACK * PACK * d + offset % PACK;
        for (long i = 0; i < d; i++) value[i * PACK] = values[i];
    }
}

/* The largest magnitude of a vector, at least LEAST_TOP; NaN if one of its elements is no finite number. */
INLINE float NAME(top_of)(const element *x, long d) {
    lanes top = fill(LEAST_TOP), strange = zeros();
    for (long i = 0; i < d; i += LANES) {
        const lanes v = load_lanes(x + i, first_lanes(d - i));
        top = higher(magnitude(v), top);
        strange = fused(v, zeros(), strange);
    }
    return top_lane(top) + sum_lanes(strange);
}

/* 16 elements over their vector's scale as integers of at most `most`, exactly `-most` for what is no number. */
INLINE words16 NAME(integers)(const element *x, lane_mask mask, lanes inverse, float most) {
    return to_ints(higher(mul(load_lanes(x, mask), inverse), fill(-most)));
}

enum { WORD_BYTES = 4 };

/* A head's vector as integers, `step` bytes from word to word or byte to byte; `unit`: bytes that stay together. */
INLINE void NAME(store_integers)(const element *x, long d, float top, char *to, long step, long unit, uint8_t flip) {
    const lanes inverse = divide(fill(127.0f), fill(top));
    for (long i = 0; i < d; i += LANES) {
        int8_t bytes[LANES];
        store_bytes(bytes, first_lanes(LANES), NAME(integers)(x + i, first_lanes(d - i), inverse, 127.0f));
        for (long j = 0; j < smaller(LANES, d - i); j++)
            to[(i + j) / unit * step + (i + j) % unit] = (char)((uint8_t)bytes[j] ^ flip);
    }
}

static void NAME(store_int8)(const tiles_of_layer *pool, char *tile, float *scales, long offset, const element *keys,
                             const element *values) {
    const long d = pool->head_dim;
    for (long h = 0; h < pool->kv_heads; h++, tile += pool->head_stride, keys += d, values += d) {
        const float key_top = NAME(top_of)(keys, d), value_top = NAME(top_of)(values, d);
        scales[scale_index(pool, h, 0, offset)] = key_top / 127.0f;
        scales[scale_index(pool, h, 1, offset)] = value_top / 127.0f;
        char *key = tile + offset / LANES * LANES * d + offset % LANES * WORD_BYTES;
        NAME(store_integers)(keys, d, key_top, key, LANES * WORD_BYTES, WORD_BYTES, 0x80);
        char *value = tile + pool->value_offset + offset / WORD_BYTES * WORD_BYTES * d + offset % WORD_BYTES;
        NAME(store_integers)(values, d, value_top, value, WORD_BYTES, 1, 0);
    }
}

static const float MOST_HALF = 65504.0f;

INLINE void store_half(void *p, lane_mask mask, lanes v) {
    const lanes within = lower(fill(MOST_HALF), higher(fill(-MOST_HALF), v));
    store_float16(p, mask, fused(v, zeros(), within)); /* an infinity times zero is a NaN */
}

static void store_float16_token(const tiles_of_layer *pool, char *tile, long offset, const float *keys,
                                const float *values) {
    const long d = pool->head_dim;
    for (long h = 0; h < pool->kv_heads; h++, tile += pool->head_stride, keys += d, values += d) {
        uint16_t *key = (uint16_t *)tile + offset / LANES * LANES * d + offset % LANES;
        uint16_t *value = (uint16_t *)(tile + pool->value_offset) + offset * d;
        for (long i = 0; i < d; i += LANES) {
            const lane_mask mask = first_lanes(d - i);
            uint16_t halves[LANES];
            store_half(halves, first_lanes(LANES), load_part(keys + i, mask));
            for (long j = 0; j < smaller(LANES, d - i); j++) key[(i + j) * LANES] = halves[j];
            store_half(value + i, mask, load_part(values + i, mask));
        }
    }
}

/* Keys and values of one token into its slot; [kv_heads, head_dim] each, of KV_FLOAT16 float32. */
static void NAME(store_token)(const tiles_of_layer *pool, long slot, const void *keys, const void *values) {
    const long block = slot >> pool->block_shift, offset = offset_in_block(pool, slot);
    char *tile = pool->base + block * pool->block_stride;
    if (pool->format == KV_INT8)
        NAME(store_int8)(pool, tile, (float *)(pool->scales + block * pool->block_stride), offset, keys, values);
    else if (pool->format == KV_FLOAT16)
        store_float16_token(pool, tile, offset, keys, values);
    else
        NAME(store_elements)(pool, tile, offset, keys, values);
}

#endif
