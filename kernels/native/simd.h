/* What the kernels need of an instruction set, 16 floats or words at a time, and of an element type.
 *
 * Kernels use these names and no intrinsics; simd_<level>.h gives them for one instruction set each, to the same bits
 * (bfloat16 products excepted, below).
 *
 *   lanes, words16, lane_mask       16 float32; 16 words of 32 bits (or 64 bytes); the first so many of 16 lanes
 *   first_lanes(count)              the mask of them; 0 where count <= 0: a mask is true if it has a lane
 *   zeros() fill(x)                 lanes of 0, of x
 *   load(p) load_part(p, mask)      floats at p, unaligned; the others 0, their memory not touched
 *   store(p, v) store_part(p, mask, v)
 *   keep(mask, v)                   v, the lanes outside the mask 0
 *   add sub mul divide (a, b)
 *   fused(a, b, c)                  a * b + c, rounded once
 *   fused_minus(a, b, c)            c - a * b, rounded once
 *   higher(a, b) lower(a, b)        maximum and minimum; b where either is NaN
 *   higher_part(top, mask, v)       higher(top, v) within the mask, top outside
 *   magnitude(v) to_whole(v)        without the sign; to the nearest whole number, ties to even
 *   scale_by_power(v, n)            v * 2^n, rounded once; v of 1/2 to 2, n whole and within -250 .. 250
 *   sum_lanes(v) top_lane(v)        over the lanes, halves with halves: the same order for every row
 *   first_lane(v)                   lane 0
 *   exponential(v) exponential_of(x)
 *
 *   zero_words() fill_words(i) word(p)  words of 0, of i, of the four bytes at p
 *   load_words(p) load_words_part(p, mask) store_words(p, w) store_words_part(p, mask, w)
 *   bits_of(v) lanes_of(w)          the same bits
 *   to_floats(w) to_ints(v)         int32 to float32, and to the nearest int32, ties to even
 *   load_bytes(p, mask) store_bytes(p, mask, w)  16 int8 and their int32; what does not fit becomes -128 or 127
 *   add_words and_words or_words (a, b), shift_left shift_right (w, bits): of 32 bits, zeros shifted in
 *   xor_words(a, b)
 *   wide_product(a, b, high)        the lower 32 bits of a * b, unsigned; the upper ones to *high
 *   quads(in, out)                  4 words16, each four at a time: out[i] word 4 j + k = in[k] word 4 j + i
 *   at_least(a, b)                  bit i is set where lane i of a is at least that of b, and neither is NaN
 *   dot_u8s8(sum, u, s)             sum + the four products u8 * s8 in each word: exact, modulo 2^32
 *   dot_u7s8(sum, u, s)             the same for u of at most 127: cheaper where there is no such instruction
 *   transpose(in, out)              16 words16: out[i] word j = in[j] word i
 *
 *   load_halves(p, mask)            16 uint16, widened to words
 *   store_halves(p, mask, w)        the lower 16 bits of words
 *   load_float16(p, mask) load_bfloat16(p, mask)  as floats
 *   store_float16(p, mask, v)       16 floats, rounded to nearest, ties to even
 *   or_nan(w, v)                    w, the bits of a NaN where v is one
 *   to_bfloat16(v)                  in the lower halves of words; to nearest, ties to even
 *   store_bfloat16(p, mask, v)      16 floats, so rounded
 *   add_pairs(sum, a, b)            sum + the two products of bfloat16 in each word; avx512_bf16 rounds them otherwise
 *
 *   ask(p) ask_outer(p)             prefetch a cache line to the first, to the second level
 *   LANE_REGISTERS                  how many `lanes` the registers hold: what a tile's sums are chosen by
 *
 * Included once per element type: BATON_BFLOAT16 is 1 or 0 (float32). A *word* is 32 bits of a row: two bfloat16
 * elements or one float32.
 *
 *   element, PACK, NAME(name)       the type, how many there are in a word, a name of its own
 *   load_lanes(p, mask) store_lanes(p, mask, v) rounded(v)  elements as floats, and back
 *   multiply_add(sum, a, b)         16 sums of products of a word's elements: a sum over a row is a chain of them over
 *                                   its words, in order
 */
#ifndef BATON_SIMD_H
#define BATON_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

#if defined __AVX512F__
#include "native/simd_avx512.h"
#elif defined __AVX2__
#include "native/simd_avx2.h"
#elif defined __aarch64__
#include "native/simd_neon.h"
#else
#error "the kernels are written for AVX-512, AVX2 with FMA and F16C, and 64-bit NEON"
#endif

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long pieces(long count, long size) { return (count + size - 1) / size; }

INLINE void ask(const void *p) { __builtin_prefetch(p, 0, 3); }
INLINE void ask_outer(const void *p) { __builtin_prefetch(p, 0, 2); }

INLINE words16 word(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return fill_words(value);
}

/* e^x to about one unit in the last place: reduced by multiples of ln 2 in two parts, then a polynomial of degree 6
 * (the coefficients of Cephes' expf). 0 below -104, NaN for NaN. */
INLINE lanes exponential(lanes x) {
    x = lower(fill(89.0f), higher(fill(-104.5f), x));
    lanes n = to_whole(mul(x, fill(1.44269504088896341f)));
    lanes r = fused_minus(n, fill(0.693359375f), x);
    r = fused_minus(n, fill(-2.12194440e-4f), r);
    lanes p = fill(1.9875691500e-4f);
    p = fused(p, r, fill(1.3981999507e-3f));
    p = fused(p, r, fill(8.3334519073e-3f));
    p = fused(p, r, fill(4.1665795894e-2f));
    p = fused(p, r, fill(1.6666665459e-1f));
    p = fused(p, r, fill(5.0000001201e-1f));
    p = fused(p, mul(r, r), add(r, fill(1.0f)));
    return scale_by_power(p, n);
}

INLINE float exponential_of(float x) { return first_lane(exponential(fill(x))); }

/* ---------------------------------------------------------------------------------------------------------- bfloat16 */

INLINE lanes load_bfloat16(const void *p, lane_mask mask) { return lanes_of(shift_left(load_halves(p, mask), 16)); }

#ifndef BATON_HAS_BFLOAT16
INLINE words16 to_bfloat16(lanes v) {
    words16 bits = bits_of(v), odd = and_words(shift_right(bits, 16), fill_words(1));
    words16 up = add_words(bits, add_words(odd, fill_words(0x7fff)));
    /* the sum would turn some NaN into an infinity or a zero */
    return shift_right(or_nan(up, v), 16);
}

INLINE void store_bfloat16(void *p, lane_mask mask, lanes v) { store_halves(p, mask, to_bfloat16(v)); }

INLINE lanes add_pairs(lanes sum, words16 a, words16 b) {
    const words16 upper = fill_words((int32_t)0xffff0000);
    lanes a1 = lanes_of(and_words(a, upper)), a0 = lanes_of(shift_left(a, 16));
    lanes b1 = lanes_of(and_words(b, upper)), b0 = lanes_of(shift_left(b, 16));
    return fused(a0, b0, fused(a1, b1, sum));
}
#endif

/* ------------------------------------------------------------------------------------------------------ element type */

#if BATON_BFLOAT16
typedef uint16_t element;
enum { PACK = 2 };
#define NAME(name) name##_bfloat16
INLINE lanes load_lanes(const element *p, lane_mask mask) { return load_bfloat16(p, mask); }
INLINE void store_lanes(element *p, lane_mask mask, lanes v) { store_bfloat16(p, mask, v); }
INLINE lanes rounded(lanes v) { return lanes_of(shift_left(to_bfloat16(v), 16)); }
INLINE lanes multiply_add(lanes sum, words16 a, words16 b) { return add_pairs(sum, a, b); }
#else
typedef float element;
enum { PACK = 1 };
#define NAME(name) name##_float32
INLINE lanes load_lanes(const element *p, lane_mask mask) { return load_part(p, mask); }
INLINE void store_lanes(element *p, lane_mask mask, lanes v) { store_part(p, mask, v); }
INLINE lanes rounded(lanes v) { return v; }
INLINE lanes multiply_add(lanes sum, words16 a, words16 b) { return fused(lanes_of(a), lanes_of(b), sum); }
#endif

#endif
