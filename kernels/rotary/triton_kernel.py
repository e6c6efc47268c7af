"""Rotary embedding, the head norm before it and the store of K and V behind it, in one pass over a token's heads.

Arithmetic is float32 and values are rounded once, where they are stored. A pool of 8-bit values gets a scale for each
row, a token's head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_dtype,
    check_range,
    check_rows,
    check_shape,
)
from kernels.chip import FP8_CAPABILITY, capability
from kernels.triton_rounding import rounded, row_scale

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_TILE = 2048
"""Values of heads that one program rotates."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before it is rotated (Qwen3; Gemma 3 with offset 1)."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float
    offset: float = 0.0


@triton.jit
def rotary_store_kernel(
    qkv_ptr,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], heads contiguous; q rotated in place
    table_ptr,  # [max_positions, 2, head_dim] float32: cos and signed sin
    positions_ptr,  # [num_tokens]
    q_weight_ptr,  # [head_dim], with HAS_NORM
    k_weight_ptr,  # [head_dim], with HAS_NORM
    pool_ptr,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], strided, head_dim contiguous; with HAS_POOL
    slots_ptr,  # [num_tokens]; -1 = not stored; with HAS_POOL
    scale_ptr,  # [num_blocks, 2, num_kv_heads, block_size] float32, strided, slots contiguous; with QUANTIZED
    qkv_row: tl.int64,
    pool_block: tl.int64,
    pool_side: tl.int64,
    pool_head: tl.int64,
    pool_slot: tl.int64,
    scale_block: tl.int64,
    scale_side: tl.int64,
    scale_head: tl.int64,
    block_size,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    BLOCK_HALF: tl.constexpr,  # power of two >= HALF
    BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_POOL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Norm, rotate and store BLOCK_HEADS heads of a token. Grid: (num_tokens, heads / BLOCK_HEADS); without a pool
    K is rotated in place too and V is left alone."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_d = tl.arange(0, BLOCK_HALF)
    is_q, is_v = o_h < NUM_Q, o_h >= NUM_Q + NUM_KV
    m_d = o_d < HALF
    m_hd = (o_h < NUM_Q + 2 * NUM_KV)[:, None] & m_d[None, :]
    p_low = qkv_ptr + i_t * qkv_row + o_h[:, None] * (2 * HALF) + o_d[None, :]
    b_low = tl.load(p_low, mask=m_hd, other=0.0).to(tl.float32)  # [BLOCK_HEADS, BLOCK_HALF]
    b_high = tl.load(p_low + HALF, mask=m_hd, other=0.0).to(tl.float32)  # [BLOCK_HEADS, BLOCK_HALF]
    turned = (o_h < NUM_Q + NUM_KV)[:, None]
    if HAS_NORM:
        squares = tl.sum(b_low * b_low, axis=1) + tl.sum(b_high * b_high, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        w_low = _head_weight(q_weight_ptr, k_weight_ptr, is_q, o_d, m_d, OFFSET)
        w_high = _head_weight(q_weight_ptr + HALF, k_weight_ptr + HALF, is_q, o_d, m_d, OFFSET)
        b_low = tl.where(turned, b_low * scale * w_low, b_low)
        b_high = tl.where(turned, b_high * scale * w_high, b_high)
    p_table = table_ptr + tl.load(positions_ptr + i_t).to(tl.int64) * (4 * HALF) + o_d
    c_low = tl.load(p_table, mask=m_d, other=0.0)[None, :]
    c_high = tl.load(p_table + HALF, mask=m_d, other=0.0)[None, :]
    s_low = tl.load(p_table + 2 * HALF, mask=m_d, other=0.0)[None, :]
    s_high = tl.load(p_table + 3 * HALF, mask=m_d, other=0.0)[None, :]
    r_low = tl.where(turned, b_low * c_low + b_high * s_low, b_low)
    r_high = tl.where(turned, b_high * c_high + b_low * s_high, b_high)
    in_place = is_q[:, None] if HAS_POOL else turned
    tl.store(p_low, r_low.to(qkv_ptr.dtype.element_ty), mask=m_hd & in_place)
    tl.store(p_low + HALF, r_high.to(qkv_ptr.dtype.element_ty), mask=m_hd & in_place)
    if HAS_POOL:
        slot = tl.load(slots_ptr + i_t).to(tl.int64)
        i_kv = tl.where(is_v, o_h - NUM_Q - NUM_KV, o_h - NUM_Q).to(tl.int64)
        i_b, i_s = slot // block_size, slot % block_size
        stored = (o_h >= NUM_Q) & (o_h < NUM_Q + 2 * NUM_KV) & (slot >= 0)
        if QUANTIZED:
            tops = tl.maximum(tl.max(tl.abs(r_low), axis=1), tl.max(tl.abs(r_high), axis=1))
            scales = row_scale(tops, tl.sum(r_low + r_high, axis=1), IS_INT8)  # [BLOCK_HEADS]
            r_low = rounded(tl.div_rn(r_low, scales[:, None]), IS_INT8)
            r_high = rounded(tl.div_rn(r_high, scales[:, None]), IS_INT8)
            o_scale = i_b * scale_block + is_v.to(tl.int64) * scale_side + i_kv * scale_head + i_s
            tl.store(scale_ptr + o_scale, scales, mask=stored)
        o_row = i_b * pool_block + i_s * pool_slot
        p_pool = pool_ptr + (o_row + is_v.to(tl.int64) * pool_side + i_kv * pool_head)[:, None] + o_d[None, :]
        m_pool = stored[:, None] & m_d[None, :]
        tl.store(p_pool, r_low.to(pool_ptr.dtype.element_ty), mask=m_pool)
        tl.store(p_pool + HALF, r_high.to(pool_ptr.dtype.element_ty), mask=m_pool)


@triton.jit
def _head_weight(q_ptr, k_ptr, is_q, o_d, m_d, OFFSET: tl.constexpr):
    """The norm's weight for each head of a tile: [BLOCK_HEADS, BLOCK_HALF]."""
    b_q = tl.load(q_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_k = tl.load(k_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_q[:, None], b_q, b_k) + OFFSET


def rotary(qkv: Tensor, table: Tensor, positions: Tensor, num_q_heads: int, norm: HeadNorm | None = None) -> None:
    """Rotate query and key heads in place; V stays. Arguments and errors as `rotary_store_kv`."""
    _check(qkv, table, positions, num_q_heads, norm)
    _launch(qkv, table, positions, None, None, num_q_heads, norm)


def rotary_store_kv(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    pool: Tensor,
    slots: Tensor,
    num_q_heads: int,
    norm: HeadNorm | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Rotate query heads in place; rotate key heads and store them and V in their slots. K and V in `qkv` stay.

    Args:
        qkv: [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], query heads first; tokens may be strided.
        table: [max_positions, 2, head_dim] float32 of `kernels.rotary.rotary_table`: any scaling is in it.
        positions: [num_tokens] int32 or int64, each below max_positions.
        pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer's view: float, int8 or float8_e4m3fn.
        slots: [num_tokens] int32 or int64, `block * block_size + offset`, each within the pool; -1 = do not store.
        norm: of the heads, before they are rotated.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, written where an 8-bit pool is: a row's largest
            magnitude over 127 or 448, what its values are multiplied by when they are read.

    Raises:
        KernelArgumentError: a tensor is not as above. Positions and slots lie on the device and are not looked at.
    """
    num_kv = _check(qkv, table, positions, num_q_heads, norm)
    num_tokens, _, head_dim = qkv.shape
    check_shape("pool", pool, None, 2, num_kv, None, head_dim)
    check_range("block size of pool", pool.shape[3], BLOCK_SIZES)
    check_dtype("pool", pool, *FLOATS, *_EIGHT_BITS)
    check_rows("pool", pool)
    check_device("pool", pool, qkv)
    if (kv_scales is not None) != (pool.dtype in _EIGHT_BITS):
        raise KernelArgumentError(f"kv_scales go with a pool of 8-bit values and no other; pool is {pool.dtype}")
    if pool.dtype == torch.float8_e4m3fn and capability(pool.device) < FP8_CAPABILITY:
        raise KernelArgumentError("pool is float8_e4m3fn, to which this card does not convert; int8 it does")
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, *pool.shape[:4])
        check_dtype("kv_scales", kv_scales, torch.float32)
        check_rows("kv_scales", kv_scales)
        check_device("kv_scales", kv_scales, qkv)
    _check_index("slots", slots, num_tokens, qkv)
    _launch(qkv, table, positions, pool, slots, num_q_heads, norm, kv_scales)


def _launch(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    pool: Tensor | None,
    slots: Tensor | None,
    num_q_heads: int,
    norm: HeadNorm | None,
    kv_scales: Tensor | None = None,
) -> None:
    num_tokens, num_heads, head_dim = qkv.shape
    if num_tokens == 0:
        return
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(max(_TILE // (2 * half), 1), triton.next_power_of_2(num_heads))
    strides = (0, 0, 0, 0) if pool is None else pool.stride()[:4]
    scale_strides = (0, 0, 0) if kv_scales is None else kv_scales.stride()[:3]
    rotary_store_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        qkv_ptr=qkv,
        table_ptr=table,
        positions_ptr=positions,
        q_weight_ptr=table if norm is None else norm.q_weight,
        k_weight_ptr=table if norm is None else norm.k_weight,
        pool_ptr=qkv if pool is None else pool,
        slots_ptr=positions if slots is None else slots,
        scale_ptr=table if kv_scales is None else kv_scales,
        qkv_row=qkv.stride(0),
        pool_block=strides[0],
        pool_side=strides[1],
        pool_head=strides[2],
        pool_slot=strides[3],
        scale_block=scale_strides[0],
        scale_side=scale_strides[1],
        scale_head=scale_strides[2],
        block_size=1 if pool is None else pool.shape[3],
        eps=0.0 if norm is None else norm.eps,
        NUM_Q=num_q_heads,
        NUM_KV=(num_heads - num_q_heads) // 2,
        HALF=head_dim // 2,
        BLOCK_HALF=half,
        BLOCK_HEADS=heads,
        HAS_NORM=norm is not None,
        OFFSET=0.0 if norm is None else norm.offset,
        HAS_POOL=pool is not None,
        QUANTIZED=kv_scales is not None,
        IS_INT8=pool is not None and pool.dtype == torch.int8,
        num_warps=4,
    )


def _check(qkv: Tensor, table: Tensor, positions: Tensor, num_q_heads: int, norm: HeadNorm | None) -> int:
    """Raises KernelArgumentError; returns the number of key heads."""
    check_shape("qkv", qkv, None, None, None)
    check_dtype("qkv", qkv, *FLOATS)
    num_tokens, num_heads, head_dim = qkv.shape
    check_range("head_dim of qkv", head_dim, HEAD_DIMS)
    if num_tokens and (qkv.stride(2) != 1 or qkv.stride(1) != head_dim):
        raise KernelArgumentError(
            f"qkv of shape {list(qkv.shape)} has strides {list(qkv.stride())}, expected heads one behind another"
        )
    rest = num_heads - num_q_heads
    if num_q_heads < 1 or rest < 2 or rest % 2:
        raise KernelArgumentError(
            f"qkv has shape {list(qkv.shape)}: {num_q_heads} query heads leave {rest} for K and V, expected even"
        )
    check_shape("table", table, None, 2, head_dim)
    check_dtype("table", table, torch.float32)
    check_contiguous("table", table)
    check_device("table", table, qkv)
    _check_index("positions", positions, num_tokens, qkv)
    for name, weight in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)) if norm else ():
        check_shape(name, weight, head_dim)
        check_dtype(name, weight, *FLOATS)
        check_rows(name, weight)
        check_device(name, weight, qkv)
    return rest // 2


def _check_index(name: str, index: Tensor, count: int, like: Tensor) -> None:
    check_shape(name, index, count)
    check_dtype(name, index, torch.int32, torch.int64)
    check_contiguous(name, index)
    check_device(name, index, like)
