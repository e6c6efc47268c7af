/* Floats as integers in the order of sampling, and the n-th largest of some. No NaN, no negative zero. */
#ifndef BATON_SAMPLING_KEYS_H
#define BATON_SAMPLING_KEYS_H

#include "native/simd.h"

/* Ascending as values descend. */
INLINE uint32_t key_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? bits : 0x7fffffffu - bits;
}
INLINE float value_of(uint32_t key) {
    const uint32_t bits = key >> 31 ? key : 0x7fffffffu - key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The `wanted`-th largest of values, from 1 to their count: digit by digit of its key. */
static float nth_largest(const float *values, long count, long wanted) {
    uint32_t known = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        long counts[256] = {0};
        for (long i = 0; i < count; i++) {
            const uint32_t key = key_of(values[i]);
            if (!((key ^ known) & mask)) counts[key >> shift & 255]++;
        }
        uint32_t digit = 0;
        while (counts[digit] < wanted) wanted -= counts[digit++];
        known |= digit << shift;
        mask |= 255u << shift;
    }
    return value_of(known);
}

#endif
