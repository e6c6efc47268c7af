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
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < p->size; i += LANES) {
        __m512 v = _mm512_maskz_loadu_ps(first_lanes(p->size - i), x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / sqrtf(sum_lanes(squares) / (float)p->size + p->eps));
    for (long i = 0; i < p->size; i += LANES) {
        const __mmask16 mask = first_lanes(p->size - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), factor);
        store_lanes(p->y + row * p->y_stride + i, mask, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, p->weight + i)));
    }
}

#endif
