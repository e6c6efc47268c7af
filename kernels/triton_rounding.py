"""Rounding to 8 bits, spelled out in float32, so that Triton's interpreter and every chip round alike."""

from __future__ import annotations

import triton
import triton.language as tl

INT8_MAX = 127.0
FP8_MAX = 448.0


@triton.jit
def rounded(b_x, IS_INT8: tl.constexpr):
    """Values over their scale, at most LARGEST, rounded to what an int8 or a float8 e4m3 holds; halves to even. The
    cast that follows has nothing left to round. What is not a number becomes 0."""
    LARGEST: tl.constexpr = 127.0 if IS_INT8 else 448.0
    b_x = tl.where(b_x == b_x, tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST), 0.0)
    if IS_INT8:
        b_y = b_x + 12582912.0 - 12582912.0
    else:
        # three bits after the point
        bits = b_x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        # below the smallest normal number, 2**-6, steps are even: 2**-9
        small = b_x + 24576.0 - 24576.0
        b_y = tl.where(tl.abs(b_x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return b_y


@triton.jit
def row_scale(b_top, b_sum, IS_INT8: tl.constexpr):
    """The scale of a row from its largest magnitude and its sum; 1 for zeros, NaN where a value is not finite."""
    b_top += b_sum * 0.0
    return tl.where(b_top == 0, 1.0, tl.div_rn(b_top, 127.0 if IS_INT8 else 448.0))
