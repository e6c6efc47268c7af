/* Linear layers whose weights are small integers, multiplied with rows that are quantized as they come.
 *
 * A row is cut into groups of inputs; a group becomes 8-bit integers and one scale, from its largest magnitude. Sums
 * within a group are exact integers, groups are added in order in float32: no bit depends on the rows beside it, nor on
 * the instruction set. A group with a NaN or an infinity makes all outputs of its row NaN.
 *
 *   FORMAT_INT8  value = scale[output] * (byte - 128); bytes [out / 32][in / 4][32][4]; scales float [out]
 *   FORMAT_INT4  value = scale[output, group] * nibble + minimum[output, group]; bytes [out / 32][in / 8][32][4], the
 *                lower nibbles of the first four inputs of eight, the upper ones of the others;
 *                float16 [out / 32][groups][scales, minima][32]
 *
 * Inputs are padded to whole groups. Quantized rows lie in tiles, one after the other: values [in / 4][rows][4], scales
 * and sums [groups][rows]. */
#ifndef BATON_QUANTIZED_H
#define BATON_QUANTIZED_H

#include "native/model.h"
#include "native/simd.h"

enum { BLOCK = 32, QUANTIZED_ROWS = 8 };
enum { CHUNK = 512 }; /* inputs of a tile that are quantized together: a multiple of every size of groups */
enum { QUANTIZED_AHEAD = 3072 };
/* A group whose magnitudes are all below is taken as zeros: the inverse of its scale would not be finite. */
static const float SMALLEST = 1e-30f;

typedef struct {
    int8_t *values;
    float *scales; /* a value is scale * integer */
    void *sums;    /* FORMAT_INT8: int32, -128 times the sum of a group's integers; FORMAT_INT4: float, of its values */
} quantized_rows;

INLINE long group_count(const baton_linear *linear) { return pieces(linear->in, linear->group); }

/* Bytes of `rows` quantized rows. */
INLINE size_t quantized_bytes(const baton_linear *linear, long rows) {
    const size_t groups = (size_t)group_count(linear);
    return (size_t)rows * groups * ((size_t)linear->group + sizeof(float) + sizeof(int32_t));
}

/* The parts of a memory of quantized_bytes: the place of row `first` of `rows`, which begins a tile. */
INLINE quantized_rows quantized_at(void *memory, const baton_linear *linear, long rows, long first) {
    const long groups = group_count(linear), padded = groups * linear->group;
    float *scales = (float *)((int8_t *)memory + rows * padded);
    float *sums = scales + rows * groups;
    return (quantized_rows){(int8_t *)memory + first * padded, scales + first * groups, sums + first * groups};
}

/* ------------------------------------------------------------------------------------------------- quantizing of rows */

/* `size` inputs of a row, of which `count` exist; `strange` becomes NaN for a value that is not finite. */
INLINE void NAME(quantize_group)(const element *x, long count, long size, int8_t *to, float *scale, float *sum,
                                 lanes *strange) {
    lanes top = zeros(), total = zeros();
    for (long i = 0; i < count; i += LANES) {
        const lanes v = load_lanes(x + i, first_lanes(count - i));
        top = higher(magnitude(v), top);
        *strange = fused(v, zeros(), *strange);
    }
    const float largest = top_lane(top);
    *scale = largest / 127.0f;
    const lanes inverse = fill(largest >= SMALLEST ? 127.0f / largest : 0.0f);
    for (long i = 0; i < size; i += LANES) {
        /* the bound is for NaN, which has no integer */
        const words16 q = to_ints(higher(mul(load_lanes(x + i, first_lanes(count - i)), inverse), fill(-127.0f)));
        total = add(total, to_floats(q));
        store_bytes(to + i, first_lanes(LANES), q);
    }
    *sum = sum_lanes(total);
}

/* Words of `rows` rows, `count` each, into turns. */
INLINE void interleave(int8_t flat[QUANTIZED_ROWS][CHUNK], int rows, long count, int8_t *to) {
    const lane_mask mask = first_lanes(rows);
    if (rows == 1) {
        memcpy(to, flat[0], (size_t)count * 4);
        return;
    }
    words16 in[LANES], out[LANES];
    for (int m = 0; m < LANES; m++) in[m] = zero_words();
    for (long k = 0; k < count; k += LANES) {
        for (int m = 0; m < rows; m++) in[m] = load_words(flat[m] + k * 4);
        transpose(in, out);
        for (int i = 0; i < smaller(LANES, count - k); i++) store_words_part(to + (k + i) * rows * 4, mask, out[i]);
    }
}

/* Inputs from `chunk` * CHUNK on of a tile of `rows` rows. */
static void NAME(quantize_tile)(const baton_linear *linear, const element *x, long stride, int rows, long chunk,
                                quantized_rows to) {
    const long size = linear->group, groups = group_count(linear);
    const long first = chunk * (CHUNK / size), last = smaller(groups, first + CHUNK / size);
    _Alignas(64) int8_t flat[QUANTIZED_ROWS][CHUNK];
    for (int m = 0; m < rows; m++) {
        lanes strange = zeros();
        for (long g = first; g < last; g++) {
            float *scale = to.scales + g * rows + m, sum;
            NAME(quantize_group)(x + m * stride + g * size, smaller(size, linear->in - g * size), size,
                                 flat[m] + (g - first) * size, scale, &sum, &strange);
            if (linear->format == FORMAT_INT8)
                ((int32_t *)to.sums)[g * rows + m] = -128 * (int32_t)sum;
            else
                ((float *)to.sums)[g * rows + m] = *scale * sum;
        }
        to.scales[first * rows + m] += sum_lanes(strange);
    }
    interleave(flat, rows, (last - first) * size / 4, to.values + first * size * rows);
}

/* --------------------------------------------------------------------------------------------------------- products */

/* 32 sums of `rows` rows; `rows` is a constant wherever these are expanded. */
INLINE void int8_tile(const int rows, const baton_linear *linear, quantized_rows x, long block,
                      float sums[QUANTIZED_ROWS][BLOCK]) {
    const long groups = group_count(linear), words = linear->group / 4;
    const int8_t *v = x.values;
    const char *w = (const char *)linear->weight + block * BLOCK * 4 * groups * words;
    const float *scales = (const float *)linear->scales + block * BLOCK;
    lanes total[QUANTIZED_ROWS][2];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++) total[m][0] = total[m][1] = zeros();
    for (long g = 0; g < groups; g++) {
        const int32_t *corrections = (const int32_t *)x.sums + g * rows;
        const float *factors = x.scales + g * rows;
        words16 acc[QUANTIZED_ROWS][2];
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = word(corrections + m);
        for (long k = 0; k < words; k++, w += BLOCK * 4, v += rows * 4) {
            ask(w + QUANTIZED_AHEAD);
            ask(w + QUANTIZED_AHEAD + 64);
            const words16 w0 = load_words(w), w1 = load_words(w + 64);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const words16 part = word(v + m * 4);
                acc[m][0] = dot_u8s8(acc[m][0], w0, part);
                acc[m][1] = dot_u8s8(acc[m][1], w1, part);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                total[m][h] = fused(to_floats(acc[m][h]), fill(factors[m]), total[m][h]);
            }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            store(sums[m] + h * LANES, mul(total[m][h], load(scales + h * LANES)));
}

INLINE void int4_tile(const int rows, const baton_linear *linear, quantized_rows x, long block,
                      float sums[QUANTIZED_ROWS][BLOCK]) {
    const long groups = group_count(linear), words = linear->group / 4;
    const int8_t *v = x.values;
    const char *w = (const char *)linear->weight + block * BLOCK * 2 * groups * words;
    const uint16_t *scales = (const uint16_t *)linear->scales + block * groups * 2 * BLOCK;
    const words16 lower_nibbles = fill_words(0x0f0f0f0f);
    const lane_mask whole = first_lanes(LANES);
    for (long g = 0; g < groups; g++, scales += 2 * BLOCK) {
        words16 acc[QUANTIZED_ROWS][2];
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = zero_words();
        for (long k = 0; k < words; k += 2, w += BLOCK * 4, v += rows * 8) {
            ask(w + QUANTIZED_AHEAD);
            ask(w + QUANTIZED_AHEAD + 64);
            const words16 w0 = load_words(w), w1 = load_words(w + 64);
            const words16 first0 = and_words(w0, lower_nibbles), first1 = and_words(w1, lower_nibbles);
            const words16 second0 = and_words(shift_right(w0, 4), lower_nibbles);
            const words16 second1 = and_words(shift_right(w1, 4), lower_nibbles);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const words16 first = word(v + m * 4), second = word(v + (rows + m) * 4);
                acc[m][0] = dot_u8s8(acc[m][0], first0, first);
                acc[m][1] = dot_u8s8(acc[m][1], first1, first);
                acc[m][0] = dot_u8s8(acc[m][0], second0, second);
                acc[m][1] = dot_u8s8(acc[m][1], second1, second);
            }
        }
        const float *factors = x.scales + g * rows, *totals = (const float *)x.sums + g * rows;
        ask(scales + 4 * BLOCK);
        ask(scales + 5 * BLOCK);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const lanes scale = load_float16(scales + h * LANES, whole);
            const lanes minimum = load_float16(scales + BLOCK + h * LANES, whole);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                lanes sum = g ? load(sums[m] + h * LANES) : zeros();
                sum = fused(minimum, fill(totals[m]), sum);
                store(sums[m] + h * LANES, fused(to_floats(acc[m][h]), mul(scale, fill(factors[m])), sum));
            }
        }
    }
}

#define TILE_OF(n) \
    case n: if (linear->format == FORMAT_INT8) int8_tile(n, linear, x, block, sums); \
            else int4_tile(n, linear, x, block, sums); \
            break;

static void quantized_tile(int rows, const baton_linear *linear, quantized_rows x, long block,
                           float sums[QUANTIZED_ROWS][BLOCK]) {
    switch (rows) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6) TILE_OF(7) TILE_OF(8)
    }
}
#undef TILE_OF

#endif
