/* RMSNorm of rows of the float32 residual stream. The addition before it is part of the product that makes the update:
 * see TO_SUM in linear/cpu_kernel.h. */
#ifndef BATON_NORM_H
#define BATON_NORM_H

#include "native/simd.h"

typedef struct {
    const float *x;      /* [*, x_stride] */
    const float *weight; /* [size] */
    element *y;          /* [rows, y_stride] */
    long rows, size, x_stride, y_stride;
    float eps;
} NAME(norm);

static void NAME(norm_item)(const void *argument, long row, int thread) {
    (void)thread;
    const NAME(norm) *p = argument;
    const float *x = p->x + row * p->x_stride;
    lanes squares = zeros();
    for (long i = 0; i < p->size; i += LANES) {
        lanes v = load_part(x + i, first_lanes(p->size - i));
        squares = fused(v, v, squares);
    }
    const lanes factor = fill(1.0f / sqrtf(sum_lanes(squares) / (float)p->size + p->eps));
    for (long i = 0; i < p->size; i += LANES) {
        const lane_mask mask = first_lanes(p->size - i);
        lanes v = mul(load_part(x + i, mask), factor);
        store_lanes(p->y + row * p->y_stride + i, mask, mul(v, load_part(p->weight + i, mask)));
    }
}

#endif
