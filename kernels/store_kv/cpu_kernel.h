/* Where a layer's keys and values lie in the pool, and how a token's get there.
 *
 * The tile of a block and a KV head holds its keys as [block_size / 16][words of a head][16]: a word of 16 keys is one
 * register, so that scores need no sum across lanes. Values are [block_size / PACK][head_dim][PACK]: one register holds
 * what 16 sums take of PACK keys. Either way 16 keys are one run of 16 * head_dim elements. */
#ifndef BATON_STORE_KV_H
#define BATON_STORE_KV_H

#include "native/simd.h"

/* Of block b and head h, keys stand at base + b * block_stride + h * head_stride, values value_offset further on. */
typedef struct {
    element *base;
    long block_stride, head_stride, value_offset, head_dim;
    int block_shift; /* block_size = 1 << block_shift, at least 16 */
} NAME(tiles_of_layer);

/* The run that begins with key `key` of a sequence: a multiple of 16 for keys, of PACK for values. */
INLINE const element *NAME(keys_at)(const NAME(tiles_of_layer) *pool, const int64_t *table, long head, long key) {
    return pool->base + table[key >> pool->block_shift] * pool->block_stride + head * pool->head_stride +
           (key & ((1L << pool->block_shift) - 1)) * pool->head_dim;
}

/* Keys and values of one token into its slot; [kv_heads, head_dim] each. */
static void NAME(store_token)(const NAME(tiles_of_layer) *pool, long slot, long kv_heads, const element *keys,
                              const element *values) {
    const long d = pool->head_dim, block = slot >> pool->block_shift, offset = slot - (block << pool->block_shift);
    element *tile = pool->base + block * pool->block_stride;
    for (long h = 0; h < kv_heads; h++, tile += pool->head_stride, keys += d, values += d) {
        element *key = tile + offset / LANES * LANES * d + offset % LANES * PACK;
        for (long i = 0; i < d; i += PACK) memcpy(key + i * LANES, keys + i, PACK * sizeof(element));
        element *value = tile + pool->value_offset + offset / PACK * PACK * d + offset % PACK;
        for (long i = 0; i < d; i++) value[i * PACK] = values[i];
    }
}

#endif
