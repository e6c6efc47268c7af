/* The vocabulary of simd.h by AVX2, FMA and F16C: 16 lanes are two registers. */
#ifndef BATON_SIMD_AVX2_H
#define BATON_SIMD_AVX2_H

#include <immintrin.h>

typedef struct {
    __m256 low, high;
} lanes;
typedef struct {
    __m256i low, high;
} words16;
typedef int lane_mask; /* how many of the lanes */

enum { LANE_REGISTERS = 8 };

INLINE lane_mask first_lanes(long count) { return count >= LANES ? LANES : count <= 0 ? 0 : (int)count; }

INLINE words16 mask_words(lane_mask mask) {
    const __m256i count = _mm256_set1_epi32(mask);
    return (words16){_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                     _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

/* ------------------------------------------------------------------------------------------------------------ floats */

INLINE lanes zeros(void) { return (lanes){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE lanes fill(float x) { return (lanes){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE lanes load(const float *p) { return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE lanes load_part(const float *p, lane_mask mask) {
    if (mask == LANES) return load(p);
    const words16 m = mask_words(mask);
    return (lanes){_mm256_maskload_ps(p, m.low), _mm256_maskload_ps(p + 8, m.high)};
}
INLINE void store(float *p, lanes v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
INLINE void store_part(float *p, lane_mask mask, lanes v) {
    if (mask == LANES) {
        store(p, v);
        return;
    }
    const words16 m = mask_words(mask);
    _mm256_maskstore_ps(p, m.low, v.low);
    _mm256_maskstore_ps(p + 8, m.high, v.high);
}
INLINE lanes keep(lane_mask mask, lanes v) {
    const words16 m = mask_words(mask);
    return (lanes){_mm256_and_ps(v.low, _mm256_castsi256_ps(m.low)), _mm256_and_ps(v.high, _mm256_castsi256_ps(m.high))};
}

INLINE lanes add(lanes a, lanes b) { return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE lanes sub(lanes a, lanes b) { return (lanes){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE lanes mul(lanes a, lanes b) { return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE lanes divide(lanes a, lanes b) { return (lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
INLINE lanes fused(lanes a, lanes b, lanes c) {
    return (lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE lanes fused_minus(lanes a, lanes b, lanes c) {
    return (lanes){_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
INLINE lanes higher(lanes a, lanes b) { return (lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE lanes lower(lanes a, lanes b) { return (lanes){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
INLINE lanes higher_part(lanes top, lane_mask mask, lanes v) {
    const words16 m = mask_words(mask);
    const lanes both = higher(top, v);
    return (lanes){_mm256_blendv_ps(top.low, both.low, _mm256_castsi256_ps(m.low)),
                   _mm256_blendv_ps(top.high, both.high, _mm256_castsi256_ps(m.high))};
}
INLINE lanes magnitude(lanes v) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (lanes){_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
}
INLINE lanes to_whole(lanes v) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return (lanes){_mm256_round_ps(v.low, NEAREST), _mm256_round_ps(v.high, NEAREST)};
}
INLINE float first_lane(lanes v) { return _mm256_cvtss_f32(v.low); }

INLINE float sum_lanes(lanes v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_permute_ps(four, 0x4e));
    return _mm_cvtss_f32(_mm_add_ps(four, _mm_permute_ps(four, 0xb1)));
}

INLINE float top_lane(lanes v) {
    const __m256 eight = _mm256_max_ps(v.low, v.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_permute_ps(four, 0x4e));
    return _mm_cvtss_f32(_mm_max_ps(four, _mm_permute_ps(four, 0xb1)));
}

/* ------------------------------------------------------------------------------------------------------------- words */

INLINE words16 zero_words(void) { return (words16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE words16 fill_words(int32_t x) { return (words16){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE words16 load_words(const void *p) {
    return (words16){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE words16 load_words_part(const void *p, lane_mask mask) {
    if (mask == LANES) return load_words(p);
    const words16 m = mask_words(mask);
    return (words16){_mm256_maskload_epi32(p, m.low), _mm256_maskload_epi32((const int *)p + 8, m.high)};
}
INLINE void store_words(void *p, words16 w) {
    _mm256_storeu_si256(p, w.low);
    _mm256_storeu_si256((__m256i *)p + 1, w.high);
}
INLINE void store_words_part(void *p, lane_mask mask, words16 w) {
    if (mask == LANES) {
        store_words(p, w);
        return;
    }
    const words16 m = mask_words(mask);
    _mm256_maskstore_epi32(p, m.low, w.low);
    _mm256_maskstore_epi32((int *)p + 8, m.high, w.high);
}
INLINE words16 bits_of(lanes v) { return (words16){_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
INLINE lanes lanes_of(words16 w) { return (lanes){_mm256_castsi256_ps(w.low), _mm256_castsi256_ps(w.high)}; }

INLINE words16 add_words(words16 a, words16 b) {
    return (words16){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
INLINE words16 and_words(words16 a, words16 b) {
    return (words16){_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
INLINE words16 or_words(words16 a, words16 b) {
    return (words16){_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
INLINE words16 xor_words(words16 a, words16 b) {
    return (words16){_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
INLINE __m256i wide_half(__m256i a, __m256i b, __m256i *high) {
    const __m256i even = _mm256_mul_epu32(a, b);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
INLINE words16 wide_product(words16 a, words16 b, words16 *high) {
    const __m256i low = wide_half(a.low, b.low, &high->low);
    return (words16){low, wide_half(a.high, b.high, &high->high)};
}
INLINE void quads_half(__m256i in[4]) {
    const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpackhi_epi32(in[0], in[1]);
    const __m256i c = _mm256_unpacklo_epi32(in[2], in[3]), d = _mm256_unpackhi_epi32(in[2], in[3]);
    in[0] = _mm256_unpacklo_epi64(a, c);
    in[1] = _mm256_unpackhi_epi64(a, c);
    in[2] = _mm256_unpacklo_epi64(b, d);
    in[3] = _mm256_unpackhi_epi64(b, d);
}
INLINE void quads(const words16 in[4], words16 out[4]) {
    __m256i low[4], high[4];
    for (int i = 0; i < 4; i++) {
        low[i] = in[i].low;
        high[i] = in[i].high;
    }
    quads_half(low);
    quads_half(high);
    for (int i = 0; i < 4; i++) out[i] = (words16){low[i], high[i]};
}
INLINE uint32_t at_least(lanes a, lanes b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    return (uint32_t)(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)) << 8);
}
INLINE words16 shift_left(words16 w, int bits) {
    return (words16){_mm256_slli_epi32(w.low, bits), _mm256_slli_epi32(w.high, bits)};
}
INLINE words16 shift_right(words16 w, int bits) {
    return (words16){_mm256_srli_epi32(w.low, bits), _mm256_srli_epi32(w.high, bits)};
}

INLINE lanes to_floats(words16 w) { return (lanes){_mm256_cvtepi32_ps(w.low), _mm256_cvtepi32_ps(w.high)}; }
INLINE words16 to_ints(lanes v) { return (words16){_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }

/* What AVX2's packing of two registers gives, in the order of the lanes. */
INLINE __m256i in_order(__m256i packed) { return _mm256_permute4x64_epi64(packed, 0xd8); }

INLINE words16 load_bytes(const int8_t *p, lane_mask mask) {
    int8_t part[LANES] = {0};
    if (mask < LANES) p = memcpy(part, p, (size_t)mask);
    const __m128i all = _mm_loadu_si128((const __m128i *)p);
    return (words16){_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
INLINE void store_bytes(int8_t *p, lane_mask mask, words16 w) {
    const __m256i halves = in_order(_mm256_packs_epi32(w.low, w.high));
    const __m128i all = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if (mask == LANES)
        _mm_storeu_si128((__m128i *)p, all);
    else
        memcpy(p, &all, (size_t)mask);
}

/* Bytes in even and in odd places, as 16 bits: pairs of products are added in 32. */
INLINE __m256i dot_half(__m256i sum, __m256i u, __m256i s) {
    const __m256i even = _mm256_and_si256(u, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(u, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, _mm256_srai_epi16(s, 8)));
}
INLINE words16 dot_u8s8(words16 sum, words16 u, words16 s) {
    return (words16){dot_half(sum.low, u.low, s.low), dot_half(sum.high, u.high, s.high)};
}

/* Two products of at most 127 * 128 fit 16 bits. */
INLINE __m256i dot_small_half(__m256i sum, __m256i u, __m256i s) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
INLINE words16 dot_u7s8(words16 sum, words16 u, words16 s) {
    return (words16){dot_small_half(sum.low, u.low, s.low), dot_small_half(sum.high, u.high, s.high)};
}

INLINE void transpose_eight(const __m256i in[8], __m256i out[8]) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 i + j], 128 bits l: column 4 l + j of rows 4 i .. 4 i + 3 */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        out[j] = _mm256_permute2x128_si256(b[j], b[4 + j], 0x20);
        out[4 + j] = _mm256_permute2x128_si256(b[j], b[4 + j], 0x31);
    }
}

INLINE void transpose(const words16 in[LANES], words16 out[LANES]) {
    for (int rows = 0; rows < LANES; rows += 8) {
        __m256i from[2][8], to[2][8];
        for (int i = 0; i < 8; i++) {
            from[0][i] = in[rows + i].low;
            from[1][i] = in[rows + i].high;
        }
        for (int columns = 0; columns < 2; columns++) {
            transpose_eight(from[columns], to[columns]);
            for (int i = 0; i < 8; i++)
                if (rows == 0)
                    out[columns * 8 + i].low = to[columns][i];
                else
                    out[columns * 8 + i].high = to[columns][i];
        }
    }
}

INLINE lanes scale_by_power(lanes v, lanes n) {
    /* in two factors, as 2^n may be no normal number: the first product is exact */
    const words16 whole = to_ints(n), bias = fill_words(127);
    const words16 half = {_mm256_srai_epi32(whole.low, 1), _mm256_srai_epi32(whole.high, 1)};
    const words16 rest = {_mm256_sub_epi32(whole.low, half.low), _mm256_sub_epi32(whole.high, half.high)};
    const lanes first = lanes_of(shift_left(add_words(half, bias), 23));
    return mul(mul(v, first), lanes_of(shift_left(add_words(rest, bias), 23)));
}

/* -------------------------------------------------------------------------------------------------- floats of 16 bits */

typedef struct {
    __m128i low, high;
} halves16;

INLINE halves16 load_halves_narrow(const void *p, lane_mask mask) {
    uint16_t part[LANES] = {0};
    if (mask < LANES) p = memcpy(part, p, (size_t)mask * sizeof *part);
    return (halves16){_mm_loadu_si128(p), _mm_loadu_si128((const __m128i *)p + 1)};
}
INLINE words16 load_halves(const void *p, lane_mask mask) {
    const halves16 h = load_halves_narrow(p, mask);
    return (words16){_mm256_cvtepu16_epi32(h.low), _mm256_cvtepu16_epi32(h.high)};
}
INLINE lanes load_float16(const void *p, lane_mask mask) {
    const halves16 h = load_halves_narrow(p, mask);
    return (lanes){_mm256_cvtph_ps(h.low), _mm256_cvtph_ps(h.high)};
}
INLINE void store_halves_narrow(void *p, lane_mask mask, __m256i all) {
    if (mask == LANES)
        _mm256_storeu_si256(p, all);
    else
        memcpy(p, &all, (size_t)mask * sizeof(uint16_t));
}
INLINE void store_halves(void *p, lane_mask mask, words16 w) {
    w = and_words(w, fill_words(0xffff));
    store_halves_narrow(p, mask, in_order(_mm256_packus_epi32(w.low, w.high)));
}
INLINE void store_float16(void *p, lane_mask mask, lanes v) {
    const __m128i low = _mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT);
    store_halves_narrow(p, mask, _mm256_setr_m128i(low, _mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT)));
}
INLINE words16 or_nan(words16 w, lanes v) {
    const lanes nan = lanes_of(fill_words(0x7fc00000)), own = lanes_of(w);
    return bits_of((lanes){_mm256_blendv_ps(own.low, nan.low, _mm256_cmp_ps(v.low, v.low, _CMP_UNORD_Q)),
                           _mm256_blendv_ps(own.high, nan.high, _mm256_cmp_ps(v.high, v.high, _CMP_UNORD_Q))});
}

#endif
