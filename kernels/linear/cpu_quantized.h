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
 *   FORMAT_INT4_STEPS  the same with value = scale[output, group] * (nibble + minimum[output, group])
 *
 * Inputs are padded to whole groups. Quantized rows lie in tiles, one after the other: values [in / 4][rows][4], scales
 * and sums [groups][rows]. */
#ifndef BATON_QUANTIZED_H
#define BATON_QUANTIZED_H

#include "native/model.h"
#include "native/simd.h"

enum { BLOCK = 32 };
/* Sums of a group stay in registers; those of all groups do where a tile has at most HELD_ROWS rows. */
enum { QUANTIZED_ROWS = LANE_REGISTERS >= 32 ? 12 : 2, HELD_ROWS = LANE_REGISTERS >= 32 ? 6 : 2 };
enum { NEAR_BYTES = 2048, FAR_BYTES = 8192, MANY_INTEGER_ROWS = 4 };
enum { CHUNK = 512 }; /* inputs of a tile that are quantized together: a multiple of every size of groups */
/* What the largest magnitude of a group is at least taken for: the inverse of its scale would not be finite. */
static const float SMALLEST = 1e-30f;

typedef struct {
    int8_t *values;
    float *scales; /* a value is scale * integer */
    void *sums;    /* FORMAT_INT8: int32, -128 times the sum of a group's integers; of 4 bits: float, of its values */
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

/* A tile's chunk of inputs while it is quantized: `groups` groups a row, row after row. */
enum { MOST_GROUPS = QUANTIZED_ROWS * CHUNK / 32 };
typedef struct {
    _Alignas(64) int8_t flat[QUANTIZED_ROWS][CHUNK];
    _Alignas(64) float scales[MOST_GROUPS], inverses[MOST_GROUPS];
    _Alignas(64) int32_t sums[MOST_GROUPS];
    words16 parts[MOST_GROUPS]; /* of a group: 16 magnitudes the largest is among, or 16 sums that make its own */
} quantizing;

/* 16 magnitudes that the largest of a group is among; `strange` becomes NaN for a value that is not finite. */
INLINE words16 NAME(largest)(const element *x, long count, long size, lanes *strange) {
    lanes top = zeros(), odd = *strange;
    #pragma GCC unroll 8
    for (long i = 0; i < size; i += LANES) {
        const lanes v = load_lanes(x + i, first_lanes(count - i));
        top = higher(magnitude(v), top);
        odd = fused(v, zeros(), odd);
    }
    *strange = odd;
    return bits_of(top);
}

INLINE void NAME(find_largest)(const element *x, long count, long size, long groups, words16 *parts, lanes *strange) {
    for (long g = 0; g < groups; g++, x += size, count -= size)
        parts[g] = count >= size ? NAME(largest)(x, size, size, strange) : NAME(largest)(x, count, size, strange);
}

INLINE void scales_of(quantizing *q, long count) {
    words16 lane[LANES];
    for (long i = 0; i < count; i += LANES) {
        transpose(q->parts + i, lane);
        lanes top = fill(SMALLEST);
        for (int j = 0; j < LANES; j++) top = higher(lanes_of(lane[j]), top);
        store(q->scales + i, divide(top, fill(127.0f)));
        store(q->inverses + i, divide(fill(127.0f), top));
    }
}

INLINE void NAME(round_group)(const element *x, long count, long size, lanes inverse, int8_t *to) {
    #pragma GCC unroll 8
    for (long i = 0; i < size; i += LANES) {
        /* the bound is for NaN, which has no integer */
        const lanes v = higher(mul(load_lanes(x + i, first_lanes(count - i)), inverse), fill(-127.0f));
        store_bytes(to + i, first_lanes(LANES), to_ints(v));
    }
}

INLINE void NAME(round_groups)(const element *x, long count, long size, long groups, const float *inverses,
                               int8_t *to) {
    for (long g = 0; g < groups; g++, x += size, count -= size, to += size)
        if (count >= size)
            NAME(round_group)(x, size, size, fill(inverses[g]), to);
        else
            NAME(round_group)(x, count, size, fill(inverses[g]), to);
}

INLINE void sum_groups(quantizing *q, long size, long groups, int rows) {
    const words16 ones = fill_words(0x01010101);
    for (int m = 0; m < rows; m++)
        for (long g = 0; g < groups; g++) {
            const int8_t *from = q->flat[m] + g * size;
            words16 sum = dot_u8s8(zero_words(), ones, load_words_part(from, first_lanes(size / 4)));
            if (size > 64) sum = dot_u8s8(sum, ones, load_words(from + 64));
            q->parts[m * groups + g] = sum;
        }
    for (long i = 0; i < rows * groups; i += LANES) {
        words16 lane[LANES], sum = zero_words();
        transpose(q->parts + i, lane);
        for (int j = 0; j < LANES; j++) sum = add_words(sum, lane[j]);
        store_words(q->sums + i, sum);
    }
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

/* Inputs from `chunk` * CHUNK on of a tile of `rows` rows, the first at `x`; `size` is a constant wherever this is
 * expanded. */
INLINE void NAME(quantize_groups)(const long size, const baton_linear *linear, const element *x, long stride, int rows,
                                  long chunk, quantized_rows to) {
    const long first = chunk * (CHUNK / size);
    const long groups = smaller(group_count(linear) - first, CHUNK / size), left = linear->in - first * size;
    lanes strange[QUANTIZED_ROWS];
    quantizing q;
    for (int m = 0; m < rows; m++) {
        strange[m] = zeros();
        NAME(find_largest)(x + m * stride, left, size, groups, q.parts + m * groups, &strange[m]);
    }
    for (long i = rows * groups; i % LANES; i++) q.parts[i] = zero_words();
    scales_of(&q, rows * groups);
    for (int m = 0; m < rows; m++)
        NAME(round_groups)(x + m * stride, left, size, groups, q.inverses + m * groups, q.flat[m]);
    sum_groups(&q, size, groups, rows);
    for (int m = 0; m < rows; m++) {
        q.scales[m * groups] += sum_lanes(strange[m]);
        for (long g = 0; g < groups; g++) {
            const long from = m * groups + g, at = (first + g) * rows + m;
            to.scales[at] = q.scales[from];
            if (linear->format == FORMAT_INT8)
                ((int32_t *)to.sums)[at] = -128 * q.sums[from];
            else
                ((float *)to.sums)[at] = q.scales[from] * (float)q.sums[from];
        }
    }
    interleave(q.flat, rows, groups * size / 4, to.values + first * size * rows);
}

/* A chunk of a tile in the order that the weights have. */
static void NAME(gather)(const baton_linear *linear, const element *x, long stride, int rows, long chunk,
                         element *to) {
    const int32_t *order = linear->order + chunk * CHUNK;
    const long count = smaller(linear->in - chunk * CHUNK, CHUNK);
    for (int m = 0; m < rows; m++, x += stride, to += CHUNK)
        for (long i = 0; i < count; i++) to[i] = x[order[i]];
}

/* Rows of `stride`, whole. */
static void NAME(quantize_tile)(const baton_linear *linear, const element *x, long stride, int rows, long chunk,
                                quantized_rows to) {
    element gathered[QUANTIZED_ROWS * CHUNK];
    if (linear->order) {
        NAME(gather)(linear, x, stride, rows, chunk, gathered);
        x = gathered;
        stride = CHUNK;
    } else
        x += chunk * CHUNK;
    switch (linear->group) {
        case 32: NAME(quantize_groups)(32, linear, x, stride, rows, chunk, to); break;
        case 64: NAME(quantize_groups)(64, linear, x, stride, rows, chunk, to); break;
        default: NAME(quantize_groups)(128, linear, x, stride, rows, chunk, to);
    }
}

/* --------------------------------------------------------------------------------------------------------- products */

/* Ask for weights that come after the 128 bytes at `p`. A tile of `many` rows computes about as long as its weights take
 * to come from memory: they are asked for early, into the second level. With few rows, what the processor reads ahead by
 * itself is as good. */
INLINE void ask_weights(const int many, const char *p) {
    if (many) {
        ask_outer(p + FAR_BYTES);
        ask_outer(p + FAR_BYTES + 64);
    } else {
        ask(p + NEAR_BYTES);
        ask(p + NEAR_BYTES + 64);
    }
}

/* 32 sums of `rows` rows; `rows` is a constant wherever these are expanded. */
INLINE void int8_tile(const int rows, const baton_linear *linear, quantized_rows x, long block,
                      float sums[QUANTIZED_ROWS][BLOCK]) {
    const long groups = group_count(linear), words = linear->group / 4;
    const int8_t *v = x.values;
    const char *w = (const char *)linear->weight + block * BLOCK * 4 * groups * words;
    const float *scales = (const float *)linear->scales + block * BLOCK;
    const int held = rows <= HELD_ROWS;
    lanes total[HELD_ROWS][2];
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            if (held)
                total[m][h] = zeros();
            else
                store(sums[m] + h * LANES, zeros());
    for (long g = 0; g < groups; g++) {
        const int32_t *corrections = (const int32_t *)x.sums + g * rows;
        const float *factors = x.scales + g * rows;
        words16 acc[QUANTIZED_ROWS][2];
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = word(corrections + m);
        for (long k = 0; k < words; k++, w += BLOCK * 4, v += rows * 4) {
            ask_weights(rows >= MANY_INTEGER_ROWS, w);
            const words16 w0 = load_words(w), w1 = load_words(w + 64);
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                const words16 part = word(v + m * 4);
                acc[m][0] = dot_u8s8(acc[m][0], w0, part);
                acc[m][1] = dot_u8s8(acc[m][1], w1, part);
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const lanes before = held ? total[m][h] : load(sums[m] + h * LANES);
                const lanes after = fused(to_floats(acc[m][h]), fill(factors[m]), before);
                if (held)
                    total[m][h] = after;
                else
                    store(sums[m] + h * LANES, after);
            }
        /* else gcc takes all of the sums into registers that are not there */
        if (!held) __asm__ volatile("" ::: "memory");
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const lanes sum = held ? total[m][h] : load(sums[m] + h * LANES);
            store(sums[m] + h * LANES, mul(sum, load(scales + h * LANES)));
        }
}

INLINE void int4_tile(const int rows, const baton_linear *linear, quantized_rows x, long block,
                      float sums[QUANTIZED_ROWS][BLOCK]) {
    const long groups = group_count(linear), words = linear->group / 4;
    const int8_t *v = x.values;
    const char *w = (const char *)linear->weight + block * BLOCK * 2 * groups * words;
    const uint16_t *scales = (const uint16_t *)linear->scales + block * groups * 2 * BLOCK;
    const words16 lower_nibbles = fill_words(0x0f0f0f0f);
    const int in_steps = linear->format == FORMAT_INT4_STEPS;
    const lane_mask whole = first_lanes(LANES);
    for (long g = 0; g < groups; g++, scales += 2 * BLOCK) {
        words16 acc[QUANTIZED_ROWS][2];
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = zero_words();
        for (long k = 0; k < words; k += 2, w += BLOCK * 4, v += rows * 8) {
            ask_weights(rows >= MANY_INTEGER_ROWS, w);
            const words16 w0 = load_words(w), w1 = load_words(w + 64);
            const words16 low0 = and_words(w0, lower_nibbles), low1 = and_words(w1, lower_nibbles);
            const words16 high0 = and_words(shift_right(w0, 4), lower_nibbles);
            const words16 high1 = and_words(shift_right(w1, 4), lower_nibbles);
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                const words16 low = word(v + m * 4), high = word(v + (rows + m) * 4);
                acc[m][0] = dot_u7s8(dot_u7s8(acc[m][0], low0, low), high0, high);
                acc[m][1] = dot_u7s8(dot_u7s8(acc[m][1], low1, low), high1, high);
            }
        }
        const float *factors = x.scales + g * rows, *totals = (const float *)x.sums + g * rows;
        ask(scales + 4 * BLOCK);
        ask(scales + 5 * BLOCK);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const lanes scale = load_float16(scales + h * LANES, whole);
            lanes minimum = load_float16(scales + BLOCK + h * LANES, whole);
            if (in_steps) minimum = mul(scale, minimum);
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                lanes sum = g ? load(sums[m] + h * LANES) : zeros();
                sum = fused(minimum, fill(totals[m]), sum);
                store(sums[m] + h * LANES, fused(to_floats(acc[m][h]), mul(scale, fill(factors[m])), sum));
            }
        }
    }
}

/* A constant up to what a tile has at most: cases beyond it are never reached. */
#define ROWS_OF(n, most) ((n) < (most) ? (n) : (most))
#define TILE_OF(n) \
    case n: if (linear->format == FORMAT_INT8) int8_tile(ROWS_OF(n, QUANTIZED_ROWS), linear, x, block, sums); \
            else int4_tile(ROWS_OF(n, QUANTIZED_ROWS), linear, x, block, sums); \
            break;

INLINE void quantized_tile(int rows, const baton_linear *linear, quantized_rows x, long block,
                           float sums[QUANTIZED_ROWS][BLOCK]) {
    switch (rows) {
        TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
        TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
    }
}
#undef TILE_OF

#endif
