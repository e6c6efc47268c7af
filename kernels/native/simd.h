/* What the kernels need of an element type and an instruction set: 16 floats in a register, and the product of pairs.
 *
 * Included once per element type: BATON_BFLOAT16 is 1 or 0 (float32). A *word* is 32 bits of a row: two bfloat16
 * elements or one float32. `multiply_add` takes 16 words of one operand, and the same or 16 other words of the other,
 * and adds their products to 16 sums; so a sum over a row is a chain of `multiply_add` over its words, in order. */
#ifndef BATON_SIMD_H
#define BATON_SIMD_H

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if BATON_BFLOAT16
typedef uint16_t element;
enum { PACK = 2 };
#define NAME(name) name##_bfloat16
#else
typedef float element;
enum { PACK = 1 };
#define NAME(name) name##_float32
#endif

enum { LANES = 16 };

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE long pieces(long count, long size) { return (count + size - 1) / size; }

/* The first `count` of 16 lanes; none for a negative count. */
INLINE __mmask16 first_lanes(long count) {
    return count >= LANES ? (__mmask16)0xffff : count <= 0 ? (__mmask16)0 : (__mmask16)((1u << count) - 1);
}

INLINE __m512i word(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
}

#if BATON_BFLOAT16
INLINE __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
INLINE __m512 load_lanes(const element *p, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, p)); }

/* To nearest, ties to even. */
INLINE __m256i narrow(__m512 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    /* the sum would turn some NaN into an infinity or a zero */
    up = _mm512_mask_set1_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), 0x7fc00000);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}
INLINE void store_lanes(element *p, __mmask16 mask, __m512 v) { _mm256_mask_storeu_epi16(p, mask, narrow(v)); }
INLINE __m512 rounded(__m512 v) { return widen(narrow(v)); }

INLINE __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000);
    __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a, upper)), a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
    __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b, upper)), b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
    return _mm512_fmadd_ps(a0, b0, _mm512_fmadd_ps(a1, b1, sum));
#endif
}
#else
INLINE __m512 load_lanes(const element *p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
INLINE void store_lanes(element *p, __mmask16 mask, __m512 v) { _mm512_mask_storeu_ps(p, mask, v); }
INLINE __m512 rounded(__m512 v) { return v; }
INLINE __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
#endif

/* Halves are added to halves: the same order for every row. */
INLINE float sum_lanes(__m512 v) {
    v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    return _mm512_cvtss_f32(v);
}

INLINE float top_lane(__m512 v) {
    v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_max_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_max_ps(v, _mm512_permute_ps(v, 0xb1));
    return _mm512_cvtss_f32(v);
}

/* e^x to about one unit in the last place: reduced by multiples of ln 2 in two parts, then a polynomial of degree 6
 * (the coefficients of Cephes' expf). 0 below -104, NaN for NaN. */
INLINE __m512 exponential(__m512 x) {
    /* the second operand is what comes out for a NaN */
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.5f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

INLINE float exponential_of(float x) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x))); }

#endif
