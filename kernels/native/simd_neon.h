/* The vocabulary of simd.h by NEON (64-bit ARM), with its dot products where the compiler is told to use them: 16 lanes
 * are four registers. */
#ifndef BATON_SIMD_NEON_H
#define BATON_SIMD_NEON_H

#include <arm_neon.h>

typedef struct {
    float32x4_t q[4];
} lanes;
typedef struct {
    uint32x4_t q[4];
} words16;
typedef int lane_mask; /* how many of the lanes */

enum { LANE_REGISTERS = 8 };

INLINE lane_mask first_lanes(long count) { return count >= LANES ? LANES : count <= 0 ? 0 : (int)count; }

/* `expression` of i, for each of the four registers */
#define EACH(type, expression) \
    ({ \
        type each; \
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) each.q[i] = (expression); \
        each; \
    })

INLINE uint32x4_t mask_quarter(lane_mask mask, int i) {
    const int32x4_t first = {0, 1, 2, 3};
    return vcltq_s32(first, vdupq_n_s32(mask - 4 * i));
}

/* ------------------------------------------------------------------------------------------------------------ floats */

INLINE lanes zeros(void) { return EACH(lanes, vdupq_n_f32(0)); }
INLINE lanes fill(float x) { return EACH(lanes, vdupq_n_f32(x)); }
INLINE lanes load(const float *p) { return EACH(lanes, vld1q_f32(p + 4 * i)); }
INLINE lanes load_part(const float *p, lane_mask mask) {
    float part[LANES] = {0};
    return load(mask < LANES ? memcpy(part, p, (size_t)mask * sizeof *p) : p);
}
INLINE void store(float *p, lanes v) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v.q[i]);
}
INLINE void store_part(float *p, lane_mask mask, lanes v) {
    if (mask == LANES)
        store(p, v);
    else
        memcpy(p, &v, (size_t)mask * sizeof *p);
}
INLINE lanes keep(lane_mask mask, lanes v) {
    return EACH(lanes, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v.q[i]), mask_quarter(mask, i))));
}

INLINE lanes add(lanes a, lanes b) { return EACH(lanes, vaddq_f32(a.q[i], b.q[i])); }
INLINE lanes sub(lanes a, lanes b) { return EACH(lanes, vsubq_f32(a.q[i], b.q[i])); }
INLINE lanes mul(lanes a, lanes b) { return EACH(lanes, vmulq_f32(a.q[i], b.q[i])); }
INLINE lanes divide(lanes a, lanes b) { return EACH(lanes, vdivq_f32(a.q[i], b.q[i])); }
INLINE lanes fused(lanes a, lanes b, lanes c) { return EACH(lanes, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
INLINE lanes fused_minus(lanes a, lanes b, lanes c) { return EACH(lanes, vfmsq_f32(c.q[i], a.q[i], b.q[i])); }

/* by comparison: NEON's own maximum is a NaN where either is one */
INLINE float32x4_t higher_four(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE lanes higher(lanes a, lanes b) { return EACH(lanes, higher_four(a.q[i], b.q[i])); }
INLINE lanes lower(lanes a, lanes b) { return EACH(lanes, vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
INLINE lanes higher_part(lanes top, lane_mask mask, lanes v) {
    return EACH(lanes, vbslq_f32(mask_quarter(mask, i), higher_four(top.q[i], v.q[i]), top.q[i]));
}
INLINE lanes magnitude(lanes v) { return EACH(lanes, vabsq_f32(v.q[i])); }
INLINE lanes to_whole(lanes v) { return EACH(lanes, vrndnq_f32(v.q[i])); }
INLINE float first_lane(lanes v) { return vgetq_lane_f32(v.q[0], 0); }

INLINE float sum_lanes(lanes v) {
    float32x4_t four = vaddq_f32(vaddq_f32(v.q[0], v.q[2]), vaddq_f32(v.q[1], v.q[3]));
    four = vaddq_f32(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(vaddq_f32(four, vextq_f32(four, four, 1)), 0);
}

INLINE float top_lane(lanes v) {
    float32x4_t four = higher_four(higher_four(v.q[0], v.q[2]), higher_four(v.q[1], v.q[3]));
    four = higher_four(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(higher_four(four, vextq_f32(four, four, 1)), 0);
}

/* ------------------------------------------------------------------------------------------------------------- words */

INLINE int32x4_t signed_words(uint32x4_t w) { return vreinterpretq_s32_u32(w); }
INLINE uint32x4_t unsigned_words(int32x4_t w) { return vreinterpretq_u32_s32(w); }

INLINE words16 zero_words(void) { return EACH(words16, vdupq_n_u32(0)); }
INLINE words16 fill_words(int32_t x) { return EACH(words16, vdupq_n_u32((uint32_t)x)); }
INLINE words16 load_words(const void *p) {
    return EACH(words16, vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p + 16 * i)));
}
INLINE words16 load_words_part(const void *p, lane_mask mask) {
    uint32_t part[LANES] = {0};
    return load_words(mask < LANES ? memcpy(part, p, (size_t)mask * sizeof *part) : p);
}
INLINE void store_words(void *p, words16 w) {
    for (int i = 0; i < 4; i++) vst1q_u8((uint8_t *)p + 16 * i, vreinterpretq_u8_u32(w.q[i]));
}
INLINE void store_words_part(void *p, lane_mask mask, words16 w) {
    if (mask == LANES)
        store_words(p, w);
    else
        memcpy(p, &w, (size_t)mask * sizeof(uint32_t));
}
INLINE words16 bits_of(lanes v) { return EACH(words16, vreinterpretq_u32_f32(v.q[i])); }
INLINE lanes lanes_of(words16 w) { return EACH(lanes, vreinterpretq_f32_u32(w.q[i])); }

INLINE words16 add_words(words16 a, words16 b) { return EACH(words16, vaddq_u32(a.q[i], b.q[i])); }
INLINE words16 and_words(words16 a, words16 b) { return EACH(words16, vandq_u32(a.q[i], b.q[i])); }
INLINE words16 or_words(words16 a, words16 b) { return EACH(words16, vorrq_u32(a.q[i], b.q[i])); }
INLINE words16 xor_words(words16 a, words16 b) { return EACH(words16, veorq_u32(a.q[i], b.q[i])); }
INLINE words16 wide_product(words16 a, words16 b, words16 *high) {
    words16 low;
    for (int i = 0; i < 4; i++) {
        const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a.q[i]), vget_low_u32(b.q[i])));
        const uint32x4_t last = vreinterpretq_u32_u64(vmull_high_u32(a.q[i], b.q[i]));
        low.q[i] = vuzp1q_u32(first, last);
        high->q[i] = vuzp2q_u32(first, last);
    }
    return low;
}
INLINE uint32_t at_least(lanes a, lanes b) {
    const uint32x4_t bit = {1, 2, 4, 8};
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= vaddvq_u32(vandq_u32(vcgeq_f32(a.q[i], b.q[i]), bit)) << 4 * i;
    return bits;
}
INLINE words16 shift_left(words16 w, int bits) { return EACH(words16, vshlq_u32(w.q[i], vdupq_n_s32(bits))); }
INLINE words16 shift_right(words16 w, int bits) { return EACH(words16, vshlq_u32(w.q[i], vdupq_n_s32(-bits))); }

INLINE lanes to_floats(words16 w) { return EACH(lanes, vcvtq_f32_s32(signed_words(w.q[i]))); }
INLINE words16 to_ints(lanes v) { return EACH(words16, unsigned_words(vcvtnq_s32_f32(v.q[i]))); }

INLINE words16 load_bytes(const int8_t *p, lane_mask mask) {
    int8_t part[LANES] = {0};
    const int8x16_t all = vld1q_s8(mask < LANES ? memcpy(part, p, (size_t)mask) : p);
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return (words16){{unsigned_words(vmovl_s16(vget_low_s16(low))), unsigned_words(vmovl_high_s16(low)),
                      unsigned_words(vmovl_s16(vget_low_s16(high))), unsigned_words(vmovl_high_s16(high))}};
}
INLINE void store_bytes(int8_t *p, lane_mask mask, words16 w) {
    const int16x4_t q0 = vqmovn_s32(signed_words(w.q[0])), q2 = vqmovn_s32(signed_words(w.q[2]));
    const int16x8_t low = vqmovn_high_s32(q0, signed_words(w.q[1])), high = vqmovn_high_s32(q2, signed_words(w.q[3]));
    const int8x16_t all = vqmovn_high_s16(vqmovn_s16(low), high);
    if (mask == LANES)
        vst1q_s8(p, all);
    else
        memcpy(p, &all, (size_t)mask);
}

INLINE uint32x4_t dot_quarter(uint32x4_t sum, uint32x4_t unsigned_bytes, uint32x4_t signed_bytes) {
    const uint8x16_t u = vreinterpretq_u8_u32(unsigned_bytes);
    const int8x16_t s = vreinterpretq_s8_u32(signed_bytes);
#ifdef __ARM_FEATURE_DOTPROD
    /* u = (u - 128) + 128, and the sum modulo 2^32 */
    const int8x16_t less = vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(0x80)));
    const int32x4_t rest = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), s), 7);
    return unsigned_words(vaddq_s32(vdotq_s32(signed_words(sum), less, s), rest));
#else
    const int16x8_t u0 = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u))), s0 = vmovl_s8(vget_low_s8(s));
    const int16x8_t u1 = vreinterpretq_s16_u16(vmovl_high_u8(u)), s1 = vmovl_high_s8(s);
    const int32x4_t a = vpaddq_s32(vmull_s16(vget_low_s16(u0), vget_low_s16(s0)), vmull_high_s16(u0, s0));
    const int32x4_t b = vpaddq_s32(vmull_s16(vget_low_s16(u1), vget_low_s16(s1)), vmull_high_s16(u1, s1));
    return vaddq_u32(sum, unsigned_words(vpaddq_s32(a, b)));
#endif
}
INLINE words16 dot_u8s8(words16 sum, words16 u, words16 s) {
    return EACH(words16, dot_quarter(sum.q[i], u.q[i], s.q[i]));
}

#ifdef __ARM_FEATURE_DOTPROD
INLINE words16 dot_u7s8(words16 sum, words16 u, words16 s) {
    return EACH(words16, unsigned_words(vdotq_s32(signed_words(sum.q[i]), vreinterpretq_s8_u32(u.q[i]),
                                                  vreinterpretq_s8_u32(s.q[i]))));
}
#else
INLINE words16 dot_u7s8(words16 sum, words16 u, words16 s) { return dot_u8s8(sum, u, s); }
#endif

INLINE void transpose_four(const uint32x4_t in[4], uint32x4_t out[4]) {
    const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(in[0], in[1]));
    const uint64x2_t b = vreinterpretq_u64_u32(vtrn2q_u32(in[0], in[1]));
    const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(in[2], in[3]));
    const uint64x2_t d = vreinterpretq_u64_u32(vtrn2q_u32(in[2], in[3]));
    out[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
    out[1] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
    out[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
    out[3] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
}

INLINE void quads(const words16 in[4], words16 out[4]) {
    for (int i = 0; i < 4; i++) {
        const uint32x4_t from[4] = {in[0].q[i], in[1].q[i], in[2].q[i], in[3].q[i]};
        uint32x4_t to[4];
        transpose_four(from, to);
        for (int j = 0; j < 4; j++) out[j].q[i] = to[j];
    }
}

INLINE void transpose(const words16 in[LANES], words16 out[LANES]) {
    for (int rows = 0; rows < 4; rows++)
        for (int columns = 0; columns < 4; columns++) {
            uint32x4_t from[4], to[4];
            for (int i = 0; i < 4; i++) from[i] = in[rows * 4 + i].q[columns];
            transpose_four(from, to);
            for (int i = 0; i < 4; i++) out[columns * 4 + i].q[rows] = to[i];
        }
}

INLINE lanes scale_by_power(lanes v, lanes n) {
    /* in two factors, as 2^n may be no normal number: the first product is exact */
    const words16 whole = to_ints(n), bias = fill_words(127);
    const words16 half = EACH(words16, unsigned_words(vshrq_n_s32(signed_words(whole.q[i]), 1)));
    const words16 rest = EACH(words16, vsubq_u32(whole.q[i], half.q[i]));
    const lanes first = lanes_of(shift_left(add_words(half, bias), 23));
    return mul(mul(v, first), lanes_of(shift_left(add_words(rest, bias), 23)));
}

/* -------------------------------------------------------------------------------------------------- floats of 16 bits */

INLINE words16 load_halves(const void *p, lane_mask mask) {
    uint16_t part[LANES] = {0};
    if (mask < LANES) p = memcpy(part, p, (size_t)mask * sizeof *part);
    return EACH(words16, vmovl_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t *)p + 8 * i))));
}
INLINE lanes load_float16(const void *p, lane_mask mask) {
    const words16 w = load_halves(p, mask);
    return EACH(lanes, vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(w.q[i]))));
}
INLINE void store_halves(void *p, lane_mask mask, words16 w) {
    uint16_t all[LANES];
    for (int i = 0; i < 4; i++) vst1_u16(all + 4 * i, vmovn_u32(w.q[i]));
    memcpy(p, all, (size_t)mask * sizeof *all);
}
INLINE void store_float16(void *p, lane_mask mask, lanes v) {
    store_halves(p, mask, EACH(words16, vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(v.q[i])))));
}
INLINE words16 or_nan(words16 w, lanes v) {
    return EACH(words16, vbslq_u32(vceqq_f32(v.q[i], v.q[i]), w.q[i], vdupq_n_u32(0x7fc00000)));
}

#endif
