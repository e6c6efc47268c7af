"""Kernels of a linear layer for a handful of rows with what stands before and behind it: see `triton_few_rows`.

All is float32 until a result is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.activation.triton_kernel import gated
from kernels.linear.triton_parts import high_steps, low_steps


@triton.jit
def _store(
    b_y, b_y_up,  # [BLOCK_N] float32, the second with GATE
    bias_ptr, y_ptr, i_m, o_n, m_n, out_features, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Bias, gate and residual, and the result of a row's tile."""
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATE != "":
        if HAS_BIAS:
            b_y_up += tl.load(bias_ptr + out_features + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y = gated(b_y, GATE) * b_y_up
    p_y = y_ptr + i_m * out_features + o_n
    if ADD:
        b_y += tl.load(p_y, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


@triton.jit
def few_rows_kernel(
    x_ptr,  # [num_rows, in_features], contiguous
    norm_ptr,  # [in_features], with HAS_NORM
    w_ptr,  # [out_features, in_features], or twice as many rows with GATE
    scale_ptr,  # as many float32 as the weight, of int8 or float8 then, has rows, with HAS_SCALE
    bias_ptr,  # as many as the weight has rows, with HAS_BIAS
    y_ptr,  # [num_rows, out_features], contiguous; the residual, read and written, with ADD
    in_features,
    out_features,
    eps,
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,  # "" or one of `kernels.activation.triton_kernel.GATES`
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # the launch before may still run
):
    """BLOCK_N features of a row. Grid: (num_rows, out_features / BLOCK_N): rows that share a tile run together."""
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < out_features
    p_w = w_ptr + o_n[:, None] * in_features + o_k[None, :]
    # x and norm by the same layout as the weight: repeated reads of a line cost less than an exchange between threads
    o_same = tl.zeros([BLOCK_N], tl.int32)[:, None] + o_k[None, :]
    p_x = x_ptr + i_m * in_features + o_same
    o_up = out_features.to(tl.int64) * in_features
    m_w = m_n[:, None] & (o_k < in_features)[None, :]
    b_w = tl.load(p_w, mask=m_w, other=0.0)  # [BLOCK_N, BLOCK_K]
    if GATE != "":
        b_up = tl.load(p_w + o_up, mask=m_w, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, in_features, BLOCK_K):
        m_k = (o_same + k) < in_features
        b_x = tl.load(p_x + k, mask=m_k, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += b_x * b_x
            # what all features of a row are divided by, the product can be divided by
            b_x *= tl.load(norm_ptr + o_same + k, mask=m_k, other=0.0).to(tl.float32) + OFFSET
        b_acc += b_w.to(tl.float32) * b_x
        m_next = m_n[:, None] & (o_same + k + BLOCK_K < in_features)
        b_w = tl.load(p_w + k + BLOCK_K, mask=m_next, other=0.0)
        if GATE != "":
            b_acc_up += b_up.to(tl.float32) * b_x
            b_up = tl.load(p_w + o_up + k + BLOCK_K, mask=m_next, other=0.0)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / in_features + eps)  # [BLOCK_N], all alike
    b_y, b_y_up = tl.sum(b_acc, axis=1) * scale, tl.sum(b_acc_up, axis=1) * scale
    if HAS_SCALE:
        b_y *= tl.load(scale_ptr + o_n, mask=m_n, other=0.0)
        if GATE != "":
            b_y_up *= tl.load(scale_ptr + out_features + o_n, mask=m_n, other=0.0)
    _store(b_y, b_y_up, bias_ptr, y_ptr, i_m, o_n, m_n, out_features, GATE, HAS_BIAS, ADD)


@triton.jit
def _load_groups(
    w_ptr, scale_ptr, zero_ptr,
    o_w,  # [BLOCK_N, GROUPS, HALF]
    o_s,  # [BLOCK_N, GROUPS]
    m_s,  # [BLOCK_N, GROUPS]
    HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Bytes of two values, and their groups' scales and zeros."""
    b_q = tl.load(w_ptr + o_w, mask=m_s[:, :, None], other=0)
    b_scale = tl.load(scale_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)
    if HAS_ZERO:
        b_zero = tl.load(zero_ptr + o_s, mask=m_s, other=0).to(tl.float32)
    else:
        b_zero = tl.full(b_scale.shape, 8.0, tl.float32)
    return b_q, b_scale, b_zero


@triton.jit
def _groups_product(b_q, b_scale, b_zero, b_low, b_high, WHOLE_ZERO: tl.constexpr):
    """[BLOCK_N, GROUPS, HALF]: each byte's two values times those of x."""
    b_zero = b_zero[:, :, None]
    b_part = low_steps(b_q, b_zero, WHOLE_ZERO) * b_low + high_steps(b_q, b_zero, WHOLE_ZERO) * b_high
    return b_part * b_scale[:, :, None]


@triton.jit
def few_rows_int4_kernel(
    x_ptr,  # [num_rows, in_features], contiguous
    norm_ptr,  # [in_features], with HAS_NORM
    w_ptr,  # [groups, w_rows, GROUP / 2] uint8; w_rows is out_features, or twice as many with GATE
    scale_ptr,  # [groups, w_rows]
    zero_ptr,  # [groups, w_rows], with HAS_ZERO; without it zeros are 8
    bias_ptr,  # [w_rows], with HAS_BIAS
    y_ptr,  # as few_rows_kernel
    in_features,
    out_features,
    eps,
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,  # zeros are integers
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,  # of a piece
    EARLY: tl.constexpr,
):
    """As few_rows_kernel, over values of four bits (`DeviceWeight`)."""
    HALF: tl.constexpr = GROUP // 2
    i_m = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_g = tl.arange(0, GROUPS)
    o_h = tl.arange(0, HALF)
    m_n = o_n < out_features
    groups = in_features // GROUP
    w_rows = out_features.to(tl.int64) * (2 if GATE != "" else 1)
    o_s = o_g[None, :] * w_rows + o_n[:, None]  # [BLOCK_N, GROUPS]
    o_w = o_s[:, :, None] * HALF + o_h[None, None, :]  # [BLOCK_N, GROUPS, HALF]
    # x and norm by the layout of the weight, as there
    o_same = tl.zeros([BLOCK_N], tl.int32)[:, None, None] + (o_g[:, None] * GROUP + o_h[None, :])[None, :, :]
    p_x = x_ptr + i_m * in_features + o_same
    m_s = m_n[:, None] & (o_g < groups)[None, :]
    b_q, b_scale, b_zero = _load_groups(w_ptr, scale_ptr, zero_ptr, o_w, o_s, m_s, HAS_ZERO)
    if GATE != "":
        w_up, scale_up, zero_up = w_ptr + w_rows // 2 * HALF, scale_ptr + w_rows // 2, zero_ptr + w_rows // 2
        b_q_up, b_scale_up, b_zero_up = _load_groups(w_up, scale_up, zero_up, o_w, o_s, m_s, HAS_ZERO)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros([BLOCK_N, GROUPS, HALF], tl.float32)
    b_acc_up = tl.zeros([BLOCK_N, GROUPS, HALF], tl.float32)
    squares = tl.zeros([BLOCK_N, GROUPS, HALF], tl.float32)
    for i_g in range(0, groups, GROUPS):
        k = i_g * GROUP
        m_x = o_same + k < in_features
        b_low = tl.load(p_x + k, mask=m_x, other=0.0).to(tl.float32)
        b_high = tl.load(p_x + k + HALF, mask=m_x, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += b_low * b_low + b_high * b_high
            p_norm = norm_ptr + o_same + k
            b_low *= tl.load(p_norm, mask=m_x, other=0.0).to(tl.float32) + OFFSET
            b_high *= tl.load(p_norm + HALF, mask=m_x, other=0.0).to(tl.float32) + OFFSET
        # int64: a matrix may hold more than 2**31 values
        ahead = (i_g + GROUPS) * w_rows
        m_s = m_n[:, None] & (o_g + i_g + GROUPS < groups)[None, :]
        b_acc += _groups_product(b_q, b_scale, b_zero, b_low, b_high, WHOLE_ZERO)
        b_q, b_scale, b_zero = _load_groups(
            w_ptr + ahead * HALF, scale_ptr + ahead, zero_ptr + ahead, o_w, o_s, m_s, HAS_ZERO
        )
        if GATE != "":
            b_acc_up += _groups_product(b_q_up, b_scale_up, b_zero_up, b_low, b_high, WHOLE_ZERO)
            b_q_up, b_scale_up, b_zero_up = _load_groups(
                w_up + ahead * HALF, scale_up + ahead, zero_up + ahead, o_w, o_s, m_s, HAS_ZERO
            )
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=2), axis=1) / in_features + eps)  # [BLOCK_N], all alike
    b_y = tl.sum(tl.sum(b_acc, axis=2), axis=1) * scale
    b_y_up = tl.sum(tl.sum(b_acc_up, axis=2), axis=1) * scale
    _store(b_y, b_y_up, bias_ptr, y_ptr, i_m, o_n, m_n, out_features, GATE, HAS_BIAS, ADD)
