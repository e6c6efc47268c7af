/* The noise of kernels/sampling/noise.py: Philox4x32-10 of (token id / 4, position), keyed by the seed, 64 tokens at a
 * time, and Gumbel noise of a word of it. */
#ifndef BATON_SAMPLING_NOISE_H
#define BATON_SAMPLING_NOISE_H

#include "native/simd.h"
#include "sampling/cpu_math.h"

enum { TOKENS = 64 }; /* of a block */

/* Words of tokens TOKENS * block and the following, in their order. */
INLINE void noise_words(uint64_t seed, uint64_t position, long block, words16 words[4]) {
    /* lanes hold groups of four tokens in the order that makes quads of their words consecutive */
    static const int32_t order[LANES] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const words16 first = fill_words((int32_t)0xd2511f53u), second = fill_words((int32_t)0xcd9e8d57u);
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    words16 c0 = add_words(fill_words((int32_t)(block * LANES)), load_words(order));
    words16 c1 = fill_words((int32_t)(uint32_t)position), c2 = fill_words((int32_t)(position >> 32));
    words16 c3 = zero_words(); /* STREAM_SAMPLE */
#pragma GCC unroll 1
    for (int round = 0; round < 10; round++, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
        words16 high0, high1;
        const words16 low0 = wide_product(c0, first, &high0), low1 = wide_product(c2, second, &high1);
        c0 = xor_words(xor_words(high1, c1), fill_words((int32_t)key0));
        c1 = low1;
        c2 = xor_words(xor_words(high0, c3), fill_words((int32_t)key1));
        c3 = low0;
    }
    const words16 counters[4] = {c0, c1, c2, c3};
    quads(counters, words);
}

INLINE float gumbel_of(uint32_t word) {
    const double uniform = ((double)word + 0.5) * 0x1p-32;
    return (float)-logarithm_of_double(-logarithm_of_double(uniform));
}

#endif
