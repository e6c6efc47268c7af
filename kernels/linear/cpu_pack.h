/* Rows of a plain matrix [rows, in] into a packed one, which is zero before. Row i becomes packed output
 * first + i / run * step + i % run. */
#ifndef BATON_PACK_H
#define BATON_PACK_H

#include "linear/cpu_kernel.h"

typedef struct {
    const void *from;
    void *to;
    long rows, in, first, run, step;
    long padded; /* inputs of a packed row of integers */
} row_packing;

INLINE long packed_output(const row_packing *p, long row) { return p->first + row / p->run * p->step + row % p->run; }

static void NAME(pack_item)(const void *argument, long row, int thread) {
    (void)thread;
    const row_packing *p = argument;
    const element *from = (const element *)p->from + row * p->in;
    const long at = packed_output(p, row);
    element *to = (element *)p->to + (at / BLOCK * BLOCK * NAME(words)(p->in) + at % BLOCK) * PACK;
    for (long k = 0; k < p->in; k++) to[k / PACK * BLOCK * PACK + k % PACK] = from[k];
}

static void pack_int8_item(const void *argument, long row, int thread) {
    (void)thread;
    const row_packing *p = argument;
    const uint8_t *from = (const uint8_t *)p->from + row * p->in;
    const long at = packed_output(p, row);
    uint8_t *to = (uint8_t *)p->to + at / BLOCK * BLOCK * p->padded + at % BLOCK * 4;
    for (long k = 0; k < p->in; k++) to[k / 4 * BLOCK * 4 + k % 4] = from[k];
}

static void pack_int4_item(const void *argument, long row, int thread) {
    (void)thread;
    const row_packing *p = argument;
    const uint8_t *from = (const uint8_t *)p->from + row * p->in;
    const long at = packed_output(p, row);
    uint8_t *to = (uint8_t *)p->to + at / BLOCK * BLOCK * (p->padded / 2) + at % BLOCK * 4;
    for (long k = 0; k < p->in; k++) to[k / 8 * BLOCK * 4 + k % 4] |= (uint8_t)((from[k] & 15) << (k % 8 / 4 * 4));
}

#endif
