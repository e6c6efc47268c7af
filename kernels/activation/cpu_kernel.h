/* SiLU gating of 16 values: applied to the sums of the gate and up products where they stand. */
#ifndef BATON_ACTIVATION_H
#define BATON_ACTIVATION_H

#include "native/simd.h"

INLINE __m512 silu_mul(__m512 gate, __m512 up) {
    __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), gate);
    __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(minus));
    return _mm512_mul_ps(_mm512_div_ps(gate, denominator), up);
}

#endif
