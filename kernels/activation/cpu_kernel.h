/* SiLU gating of 16 values: applied to the sums of the gate and up products where they stand. */
#ifndef BATON_ACTIVATION_H
#define BATON_ACTIVATION_H

#include "native/simd.h"

INLINE lanes silu_mul(lanes gate, lanes up) {
    lanes denominator = add(fill(1.0f), exponential(sub(zeros(), gate)));
    return mul(divide(gate, denominator), up);
}

#endif
