"""Device functions of the linear kernels: the one order in which every product is summed.

A row of x and a row of the weight meet in pieces of BLOCK_K input features, summed from the first to the last of a
split, and splits are added in order. The size of a split depends on the weight's shape alone (`split_features`), so a
row's bits do not depend on how many rows there are nor on which launch shape serves them. The weight is the left
operand: its rows fill a tensor core whatever the number of rows of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_N = 64
"""Weight rows of a tile for few rows of x; splits are sized for it."""
_PROGRAMS = {"int8": 528, "int4": 528}
_FEW_PROGRAMS = 264
"""Programs wanted for a row of x: two for each multiprocessor of the largest chip we know, four where each has to
unpack. Constants, so that all chips cut alike."""
_MIN_SPLIT = 512


def split_features(kind: str, in_features: int, out_features: int) -> int:
    """Input features of a split, a multiple of 128: small where few weight rows would leave a chip idle."""
    splits = max(_PROGRAMS.get(kind, _FEW_PROGRAMS) // -(-out_features // BLOCK_N), 1)
    size = max(-(-in_features // splits), min(_MIN_SPLIT, in_features))
    return -(-size // 128) * 128


@triton.jit
def split_sum(
    x_ptr,  # [num_rows, in_features], rows contiguous
    w_ptr,  # see DeviceWeight.data
    scale_ptr,  # [groups, out_features], with GROUP
    zero_ptr,  # [groups, out_features], with HAS_ZERO; without it zeros are 8
    o_x,  # [BLOCK_M] int64, where the rows of x begin
    m_x,  # [BLOCK_M]
    o_n,  # [BLOCK_N] int64, rows of the weight
    m_n,  # [BLOCK_N]
    first,  # input features [first, last)
    last,
    in_features,
    out_features,
    GROUP: tl.constexpr,  # of int4; 0 = data is [out, in]
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,  # zeros are integers, 0 to 16
    ACC: tl.constexpr,
    EVEN_K: tl.constexpr,  # in_features is a multiple of BLOCK_K
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One split of w x^T: [BLOCK_N, BLOCK_M]."""
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC)
    if GROUP == 0:
        o_k = tl.arange(0, BLOCK_K)
        p_w = w_ptr + o_n[:, None] * in_features + o_k[None, :]
        p_x = x_ptr + o_x[None, :] + o_k[:, None]
        for k in range(first, last, BLOCK_K):
            m_k = (o_k >= 0) if EVEN_K else (o_k < last - k)
            b_w = tl.load(p_w + k, mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BLOCK_N, BLOCK_K]
            b_x = tl.load(p_x + k, mask=m_k[:, None] & m_x[None, :], other=0.0)  # [BLOCK_K, BLOCK_M]
            b_acc = _add_product(b_acc, b_w, b_x, ACC)
    else:
        HALF: tl.constexpr = GROUP // 2
        o_h = tl.arange(0, HALF)
        p_w = w_ptr + o_n[:, None] * HALF + o_h[None, :]
        p_x = x_ptr + o_x[None, :] + o_h[:, None]
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        for k in range(first, last, BLOCK_K):
            for i in tl.static_range(GROUPS):
                # int64: a matrix may hold more than 2**31 values
                i_g = k // GROUP + i + tl.zeros([], tl.int64)
                m_g = (i_g >= 0) if EVEN_K else (k + i * GROUP < last)
                o_s = i_g * out_features + o_n
                b_q = tl.load(p_w + i_g * out_features * HALF, mask=m_n[:, None] & m_g, other=0)  # [BLOCK_N, HALF]
                b_low = tl.load(p_x + i_g * GROUP, mask=m_x[None, :] & m_g, other=0.0)  # [HALF, BLOCK_M]
                b_high = tl.load(p_x + i_g * GROUP + HALF, mask=m_x[None, :] & m_g, other=0.0)  # [HALF, BLOCK_M]
                b_scale = tl.load(scale_ptr + o_s, mask=m_n & m_g, other=0.0).to(tl.float32)
                if HAS_ZERO:
                    b_zero = tl.load(zero_ptr + o_s, mask=m_n & m_g, other=0.0).to(tl.float32)
                else:
                    b_zero = tl.full([BLOCK_N], 8.0, tl.float32)
                b_steps = low_steps(b_q, b_zero[:, None], WHOLE_ZERO).to(b_low.dtype)
                b_part = tl.dot(b_steps, b_low, input_precision="ieee")
                b_steps = high_steps(b_q, b_zero[:, None], WHOLE_ZERO).to(b_low.dtype)
                b_part = tl.dot(b_steps, b_high, b_part, input_precision="ieee")
                b_acc += b_part * b_scale[:, None]
    return b_acc


@triton.jit
def _add_product(b_acc, b_w, b_x, ACC: tl.constexpr):
    if b_w.dtype == tl.int8 and b_x.dtype != tl.int8:
        # exact, and cheaper than a conversion of integers: the bits of 2**23 + 128 + w
        b_bits = ((b_w.to(tl.int32) & 0xFF) ^ 0x4B000080).to(tl.float32, bitcast=True)
        b_sum = tl.dot((b_bits - 8388736.0).to(b_x.dtype), b_x, b_acc, input_precision="ieee")
    elif b_w.dtype == tl.float8e4nv:
        # tensor cores add float8 products in few bits: each piece is added up outside. Below sm_90 a compiler that is
        # told of no such limit would fold the sum into the product
        b_sum = b_acc + tl.dot(b_w, b_x, max_num_imprecise_acc=b_w.shape[1], out_dtype=tl.float32)
    else:
        b_sum = tl.dot(b_w, b_x, b_acc, input_precision="ieee", out_dtype=ACC)
    return b_sum


@triton.jit
def low_steps(b_q, b_zero, WHOLE_ZERO: tl.constexpr):
    """q - zero of the low nibbles as float32: the bits of 2**23 + q, from which one subtraction takes both off.
    Zeros are of as many dimensions as the bytes."""
    b_bits = ((b_q.to(tl.int32) & 0xF) | 0x4B000000).to(tl.float32, bitcast=True)
    if WHOLE_ZERO:
        b_steps = b_bits - (b_zero + 8388608.0)
    else:
        b_steps = b_bits - 8388608.0 - b_zero
    return b_steps


@triton.jit
def high_steps(b_q, b_zero, WHOLE_ZERO: tl.constexpr):
    """q - zero of the high nibbles: they stay where they are, 2**23 + 16 q, and the product with 1 / 16 is exact."""
    b_bits = ((b_q.to(tl.int32) & 0xF0) | 0x4B000000).to(tl.float32, bitcast=True)
    if WHOLE_ZERO:
        b_steps = b_bits * 0.0625 - (b_zero + 524288.0)
    else:
        b_steps = b_bits * 0.0625 - 524288.0 - b_zero
    return b_steps


@triton.jit
def finished(
    b_sum,  # [rows, columns] float32 or int32
    row_scale_ptr, column_scale_ptr, bias_ptr,
    o_m, m_m, o_n, m_n,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums with scales and bias: [rows, columns] float32."""
    b_y = b_sum.to(tl.float32)
    if HAS_ROW_SCALE:
        b_y *= tl.load(row_scale_ptr + o_m, mask=m_m, other=0.0)[:, None]
    if HAS_COLUMN_SCALE:
        b_y *= tl.load(column_scale_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    return b_y
