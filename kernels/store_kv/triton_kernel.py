"""Write new keys and values into the paged pool, quantized if it is of 8 bits. What does not rotate first comes here;
what does goes through `kernels.rotary.triton_kernel.rotary_store_kv`, which rounds alike."""

from __future__ import annotations

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
    check_rows,
    check_shape,
)
from kernels.triton_rounding import rounded, row_scale

QUANTIZED = (torch.int8, torch.float8_e4m3fn)


@triton.jit
def store_kv_kernel(
    kv_ptr,  # [num_tokens, 2, num_kv_heads, head_dim], strided, head_dim contiguous
    pool_ptr,  # [num_blocks, 2, num_kv_heads, block_size, head_dim], strided, head_dim contiguous
    scale_ptr,  # [num_blocks, 2, num_kv_heads, block_size] float32, strided, slots contiguous; with QUANTIZED
    slots_ptr,  # [num_tokens]; -1 = not stored
    kv_row: tl.int64,
    kv_side: tl.int64,
    kv_head: tl.int64,
    pool_block: tl.int64,
    pool_side: tl.int64,
    pool_head: tl.int64,
    pool_slot: tl.int64,
    scale_block: tl.int64,
    scale_side: tl.int64,
    scale_head: tl.int64,
    block_size,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= 2 * NUM_KV
    HEAD_PADDED: tl.constexpr,  # power of two >= HEAD_DIM
    QUANTIZED: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """Store one token's K and V. Grid: (num_tokens,)."""
    i_t = tl.program_id(0).to(tl.int64)
    # int64: slot // block_size * pool_block passes 2**31 on a large pool
    slot = tl.load(slots_ptr + i_t).to(tl.int64)
    if slot < 0:
        return
    o_r = tl.arange(0, ROWS)
    side, head = o_r // NUM_KV, o_r % NUM_KV
    o_d = tl.arange(0, HEAD_PADDED)
    m_r = o_r < 2 * NUM_KV
    mask = m_r[:, None] & (o_d < HEAD_DIM)[None, :]
    from_row = i_t * kv_row + side * kv_side + head * kv_head  # [ROWS]
    b_kv = tl.load(kv_ptr + from_row[:, None] + o_d[None, :], mask=mask, other=0.0)  # [ROWS, HEAD_PADDED]
    block, offset = slot // block_size, slot % block_size
    if QUANTIZED:
        b_x = b_kv.to(tl.float32)
        scale = row_scale(tl.max(tl.abs(b_x), axis=1), tl.sum(b_x, axis=1), IS_INT8)  # [ROWS]
        b_kv = rounded(tl.div_rn(b_x, scale[:, None]), IS_INT8)
        tl.store(scale_ptr + block * scale_block + side * scale_side + head * scale_head + offset, scale, mask=m_r)
    to_row = block * pool_block + offset * pool_slot + side * pool_side + head * pool_head  # [ROWS]
    tl.store(pool_ptr + to_row[:, None] + o_d[None, :], b_kv.to(pool_ptr.dtype.element_ty), mask=mask)


def store_kv(kv: Tensor, pool: Tensor, slots: Tensor, kv_scales: Tensor | None = None) -> None:
    """Scatter each token's K and V into its slot.

    Args:
        kv: [num_tokens, 2, num_kv_heads, head_dim], K first; may be a strided view.
        pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer's view of the pool; kv's dtype, int8, e4m3.
        slots: [num_tokens] int32 or int64 `block_id * block_size + offset`, or -1 for a token that is not stored. No
            slot occurs twice, and none lies outside the pool: they are on the device, where no one looks at them.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, written for a pool of 8 bits: what a row of it is
            multiplied by.

    Raises:
        KernelArgumentError: an argument does not fit the others.
    """
    check_dtype("kv", kv, *FLOATS)
    check_shape("kv", kv, None, 2, None, None)
    check_rows("kv", kv)
    num_tokens, _, num_kv_heads, head_dim = kv.shape
    check_shape("pool", pool, None, 2, num_kv_heads, None, head_dim)
    check_dtype("pool", pool, kv.dtype, *QUANTIZED)
    check_rows("pool", pool)
    check_device("pool", pool, kv)
    check_shape("slots", slots, num_tokens)
    check_dtype("slots", slots, torch.int32, torch.int64)
    check_contiguous("slots", slots)
    check_device("slots", slots, kv)
    quantized = pool.dtype in QUANTIZED
    if (kv_scales is not None) != quantized:
        raise KernelArgumentError(f"kv_scales go with a pool of int8 or e4m3 and no other; pool is {pool.dtype}")
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, *pool.shape[:4])
        check_dtype("kv_scales", kv_scales, torch.float32)
        check_rows("kv_scales", kv_scales)
        check_device("kv_scales", kv_scales, kv)
    if num_tokens == 0:
        return
    scales = kv_scales if kv_scales is not None else kv
    strides = kv_scales.stride()[:3] if kv_scales is not None else (0, 0, 0)
    rows = triton.next_power_of_2(2 * num_kv_heads)
    width = triton.next_power_of_2(head_dim)
    store_kv_kernel[(num_tokens,)](
        kv, pool, scales, slots, *kv.stride()[:3], *pool.stride()[:4], *strides, pool.shape[3],
        NUM_KV=num_kv_heads, HEAD_DIM=head_dim, ROWS=rows, HEAD_PADDED=width,
        QUANTIZED=quantized, IS_INT8=pool.dtype == torch.int8, num_warps=4 if rows * width >= 2048 else 1,
    )  # fmt: skip
