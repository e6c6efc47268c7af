/* The vocabulary of simd.h by AVX-512 (F, BW, VL, DQ), with BF16 and VNNI where the compiler is told to use them. */
#ifndef BATON_SIMD_AVX512_H
#define BATON_SIMD_AVX512_H

#include <immintrin.h>

typedef __m512 lanes;
typedef __m512i words16;
typedef __mmask16 lane_mask;

enum { LANE_REGISTERS = 32 };

INLINE lane_mask first_lanes(long count) {
    return count >= LANES ? (lane_mask)0xffff : count <= 0 ? (lane_mask)0 : (lane_mask)((1u << count) - 1);
}

/* ------------------------------------------------------------------------------------------------------------ floats */

INLINE lanes zeros(void) { return _mm512_setzero_ps(); }
INLINE lanes fill(float x) { return _mm512_set1_ps(x); }
INLINE lanes load(const float *p) { return _mm512_loadu_ps(p); }
INLINE lanes load_part(const float *p, lane_mask mask) { return _mm512_maskz_loadu_ps(mask, p); }
INLINE void store(float *p, lanes v) { _mm512_storeu_ps(p, v); }
INLINE void store_part(float *p, lane_mask mask, lanes v) { _mm512_mask_storeu_ps(p, mask, v); }
INLINE lanes keep(lane_mask mask, lanes v) { return _mm512_maskz_mov_ps(mask, v); }

INLINE lanes add(lanes a, lanes b) { return _mm512_add_ps(a, b); }
INLINE lanes sub(lanes a, lanes b) { return _mm512_sub_ps(a, b); }
INLINE lanes mul(lanes a, lanes b) { return _mm512_mul_ps(a, b); }
INLINE lanes divide(lanes a, lanes b) { return _mm512_div_ps(a, b); }
INLINE lanes fused(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }
INLINE lanes fused_minus(lanes a, lanes b, lanes c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE lanes higher(lanes a, lanes b) { return _mm512_max_ps(a, b); }
INLINE lanes lower(lanes a, lanes b) { return _mm512_min_ps(a, b); }
INLINE lanes higher_part(lanes top, lane_mask mask, lanes v) { return _mm512_mask_max_ps(top, mask, top, v); }
INLINE lanes magnitude(lanes v) { return _mm512_abs_ps(v); }
INLINE lanes to_whole(lanes v) { return _mm512_roundscale_ps(v, 0); }
INLINE lanes scale_by_power(lanes v, lanes n) { return _mm512_scalef_ps(v, n); }
INLINE float first_lane(lanes v) { return _mm512_cvtss_f32(v); }

INLINE float sum_lanes(lanes v) {
    v = add(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = add(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = add(v, _mm512_permute_ps(v, 0x4e));
    v = add(v, _mm512_permute_ps(v, 0xb1));
    return first_lane(v);
}

INLINE float top_lane(lanes v) {
    v = higher(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = higher(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = higher(v, _mm512_permute_ps(v, 0x4e));
    v = higher(v, _mm512_permute_ps(v, 0xb1));
    return first_lane(v);
}

/* ------------------------------------------------------------------------------------------------------------- words */

INLINE words16 zero_words(void) { return _mm512_setzero_si512(); }
INLINE words16 fill_words(int32_t x) { return _mm512_set1_epi32(x); }
INLINE words16 load_words(const void *p) { return _mm512_loadu_si512(p); }
INLINE words16 load_words_part(const void *p, lane_mask mask) { return _mm512_maskz_loadu_epi32(mask, p); }
INLINE void store_words(void *p, words16 w) { _mm512_storeu_si512(p, w); }
INLINE void store_words_part(void *p, lane_mask mask, words16 w) { _mm512_mask_storeu_epi32(p, mask, w); }
INLINE words16 bits_of(lanes v) { return _mm512_castps_si512(v); }
INLINE lanes lanes_of(words16 w) { return _mm512_castsi512_ps(w); }

INLINE words16 add_words(words16 a, words16 b) { return _mm512_add_epi32(a, b); }
INLINE words16 and_words(words16 a, words16 b) { return _mm512_and_si512(a, b); }
INLINE words16 or_words(words16 a, words16 b) { return _mm512_or_si512(a, b); }
INLINE words16 xor_words(words16 a, words16 b) { return _mm512_xor_si512(a, b); }
INLINE words16 wide_product(words16 a, words16 b, words16 *high) {
    const __mmask16 odd = 0xaaaa;
    const __m512i even = _mm512_mul_epu32(a, b);
    const __m512i other = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), odd, other);
    return _mm512_mask_mov_epi32(even, odd, _mm512_slli_epi64(other, 32));
}
INLINE void quads(const words16 in[4], words16 out[4]) {
    const words16 a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpackhi_epi32(in[0], in[1]);
    const words16 c = _mm512_unpacklo_epi32(in[2], in[3]), d = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}
INLINE uint32_t at_least(lanes a, lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE words16 shift_left(words16 w, int bits) { return _mm512_slli_epi32(w, (unsigned)bits); }
INLINE words16 shift_right(words16 w, int bits) { return _mm512_srli_epi32(w, (unsigned)bits); }

INLINE lanes to_floats(words16 w) { return _mm512_cvtepi32_ps(w); }
INLINE words16 to_ints(lanes v) { return _mm512_cvtps_epi32(v); }
INLINE words16 load_bytes(const int8_t *p, lane_mask mask) {
    return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, p));
}
INLINE void store_bytes(int8_t *p, lane_mask mask, words16 w) { _mm512_mask_cvtsepi32_storeu_epi8(p, mask, w); }

#ifdef __AVX512VNNI__
INLINE words16 dot_bytes(words16 sum, words16 u, words16 s) {
#ifdef __clang__
    return _mm512_dpbusd_epi32(sum, u, s);
#else
    /* not the intrinsic: gcc 12 moves the sums of a tile out of registers for it */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(s));
    return sum;
#endif
}
#endif

INLINE words16 dot_u8s8(words16 sum, words16 u, words16 s) {
#ifdef __AVX512VNNI__
    return dot_bytes(sum, u, s);
#else
    /* bytes in even and in odd places, as 16 bits: pairs of products are added in 32 */
    words16 even = _mm512_and_si512(u, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(u, 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8)));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, _mm512_srai_epi16(s, 8)));
#endif
}

/* Two products of at most 127 * 128 fit 16 bits. */
INLINE words16 dot_u7s8(words16 sum, words16 u, words16 s) {
#ifdef __AVX512VNNI__
    return dot_bytes(sum, u, s);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
#endif
}

INLINE void transpose(const words16 in[LANES], words16 out[LANES]) {
    words16 a[LANES], b[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 i + j], 128 bits l: column 4 l + j of rows 4 i .. 4 i + 3 */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        words16 even01 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), odd01 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
        words16 even23 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
        words16 odd23 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
        out[j] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        out[8 + j] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        out[4 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        out[12 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
}

/* -------------------------------------------------------------------------------------------------- floats of 16 bits */

INLINE words16 load_halves(const void *p, lane_mask mask) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
}
INLINE lanes load_float16(const void *p, lane_mask mask) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}
INLINE void store_float16(void *p, lane_mask mask, lanes v) {
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void store_halves(void *p, lane_mask mask, words16 w) {
    _mm256_mask_storeu_epi16(p, mask, _mm512_cvtepi32_epi16(w));
}

INLINE words16 or_nan(words16 w, lanes v) {
    return _mm512_mask_set1_epi32(w, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), 0x7fc00000);
}

#ifdef __AVX512BF16__
#define BATON_HAS_BFLOAT16 1
INLINE words16 to_bfloat16(lanes v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)); }
INLINE void store_bfloat16(void *p, lane_mask mask, lanes v) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}
INLINE lanes add_pairs(lanes sum, words16 a, words16 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

#endif
