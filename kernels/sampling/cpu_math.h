/* Exponentials and logarithms in double that no library has a say in: elementwise, so that a compiler may take several at
 * once, and every multiply-add written out, so that all levels give the same bits. */
#ifndef BATON_SAMPLING_MATH_H
#define BATON_SAMPLING_MATH_H

#include "native/simd.h"

INLINE double bits_as_double(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint64_t double_as_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static const double LEAST_EXPONENT = -708.0; /* e^x of less is taken for e^that: no share of 1 is so small */

/* e^x of x between LEAST_EXPONENT and 0, to about one unit in the last place: reduced by multiples of ln 2 in two parts,
 * then Taylor's polynomial. */
INLINE double exponential_of_double(double x) {
    const double shift = 0x1.8p52; /* added, it leaves the nearest whole number in the lower bits */
    const double shifted = __builtin_fma(x, 1.44269504088896338700, shift), n = shifted - shift;
    double r = __builtin_fma(n, -6.93147180369123816490e-01, x);
    r = __builtin_fma(n, -1.90821492927058770002e-10, r);
    double p = 1.0 / 6227020800.0;
    p = __builtin_fma(p, r, 1.0 / 479001600.0);
    p = __builtin_fma(p, r, 1.0 / 39916800.0);
    p = __builtin_fma(p, r, 1.0 / 3628800.0);
    p = __builtin_fma(p, r, 1.0 / 362880.0);
    p = __builtin_fma(p, r, 1.0 / 40320.0);
    p = __builtin_fma(p, r, 1.0 / 5040.0);
    p = __builtin_fma(p, r, 1.0 / 720.0);
    p = __builtin_fma(p, r, 1.0 / 120.0);
    p = __builtin_fma(p, r, 1.0 / 24.0);
    p = __builtin_fma(p, r, 1.0 / 6.0);
    p = __builtin_fma(p, r, 0.5);
    p = __builtin_fma(p, r, 1.0);
    p = __builtin_fma(p, r, 1.0);
    /* 2^n: what is added to the exponent, of a p between 1/2 and 2 */
    return bits_as_double(double_as_bits(p) + (double_as_bits(shifted) << 52));
}

/* The logarithm of a positive normal number, to less than one unit in the last place: fdlibm's polynomial. */
INLINE double logarithm_of_double(double x) {
    const uint64_t bits = double_as_bits(x);
    /* x = 2^k * m, m between sqrt(1/2) and sqrt(2) */
    const uint64_t above = bits - 0x3fe6a09e667f3bcdull;
    const double k = (double)((int64_t)above >> 52);
    const double f = bits_as_double(bits - (above & 0xfff0000000000000ull)) - 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    double odd = __builtin_fma(w, 1.531383769920937332e-01, 2.222219843214978396e-01);
    double even = __builtin_fma(w, 1.479819860511658591e-01, 1.818357216161805012e-01);
    odd = __builtin_fma(w, odd, 3.999999999940941908e-01);
    even = __builtin_fma(w, __builtin_fma(w, even, 2.857142874366239149e-01), 6.666666666666735130e-01);
    const double rest = __builtin_fma(z, even, w * odd);
    const double low = __builtin_fma(s, half + rest, k * 1.90821492927058770002e-10);
    return k * 6.93147180369123816490e-01 - ((half - low) - f);
}

#endif
