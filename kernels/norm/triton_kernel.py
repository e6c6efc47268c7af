"""RMSNorm as one row a program: the sum over a row never depends on how many rows there are.

The sum of squares and all else are float32; a value is rounded once, where it is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)

MAX_WIDTH = 32768
"""A row is held in registers whole."""


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [num_rows, row_heads, width], strided
    residual_ptr,  # [num_rows, width], strided; read and written, with HAS_RESIDUAL
    weight_ptr,  # [width]
    y_ptr,  # [num_rows, row_heads, width], strided; may be x
    x_row: tl.int64,
    x_head: tl.int64,
    residual_row: tl.int64,
    y_row: tl.int64,
    y_head: tl.int64,
    row_heads,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= WIDTH
    HAS_RESIDUAL: tl.constexpr,
    OFFSET: tl.constexpr,  # added to the weight: 1 in Gemma's form
):
    """Normalize one row of WIDTH values. Grid: (num_rows * row_heads,)."""
    i_p = tl.program_id(0).to(tl.int64)
    i_r, i_h = i_p // row_heads, i_p % row_heads
    o_w = tl.arange(0, BLOCK)
    m_w = o_w < WIDTH
    b_x = tl.load(x_ptr + i_r * x_row + i_h * x_head + o_w, mask=m_w, other=0.0).to(tl.float32)  # [BLOCK]
    if HAS_RESIDUAL:
        p_residual = residual_ptr + i_r * residual_row + o_w
        b_sum = (b_x + tl.load(p_residual, mask=m_w, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(p_residual, b_sum, mask=m_w)
        # what is normalized is what later layers will read
        b_x = b_sum.to(tl.float32)
    b_weight = tl.load(weight_ptr + o_w, mask=m_w, other=0.0).to(tl.float32) + OFFSET
    scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / WIDTH + eps)
    b_y = b_x * scale * b_weight
    tl.store(y_ptr + i_r * y_row + i_h * y_head + o_w, b_y.to(y_ptr.dtype.element_ty), mask=m_w)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), per row.

    Args:
        x: [num_tokens, hidden] bfloat16, float16 or float32, rows contiguous.
        weight: [hidden], any of those dtypes.
        eps: added to the mean square.
        offset: 1 for Gemma's checkpoints, which hold the weight less one.

    Returns:
        [num_tokens, hidden], a new tensor of x's dtype.

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    _check(x, weight)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x[:, None], None, weight, y[:, None], eps, offset)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Add `x` to `residual` in place, then normalize the sum as it was rounded.

    Args:
        residual: [num_tokens, hidden], changed; may be of a wider dtype than x.

    Others, result and errors as `rms_norm`.
    """
    _check(x, weight)
    check_shape("residual", residual, *x.shape)
    check_dtype("residual", residual, *FLOATS)
    check_rows("residual", residual)
    check_device("residual", residual, x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x[:, None], residual, weight, y[:, None], eps, offset)
    return y


def rms_norm_heads(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> None:
    """Normalize every head of every token over head_dim, in place (Qwen3's QK-norm).

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view.
        weight: [head_dim].

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    check_shape("x", x, None, None, None)
    _check(x[:, 0] if x.shape[1] else x.flatten(1), weight)
    _launch(x, None, weight, x, eps, offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, eps: float, offset: float) -> None:
    num_rows, row_heads, width = x.shape
    if num_rows * row_heads == 0:
        return
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows * row_heads,)](
        x_ptr=x,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        y_ptr=y,
        x_row=x.stride(0),
        x_head=x.stride(1),
        residual_row=0 if residual is None else residual.stride(0),
        y_row=y.stride(0),
        y_head=y.stride(1),
        row_heads=row_heads,
        eps=eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        OFFSET=offset,
        num_warps=num_warps(block),
    )


def num_warps(block: int) -> int:
    """Warps of a program that holds `block` values: 16 to 32 a thread. It sets the order of the sum, so it follows
    the width alone."""
    return min(max(block // 512, 1), 16)


def _check(x: Tensor, weight: Tensor) -> None:
    check_shape("x", x, None, None)
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    check_shape("weight", weight, x.shape[1])
    check_dtype("weight", weight, *FLOATS)
    check_rows("weight", weight)
    check_device("weight", weight, x)
    if x.shape[1] > MAX_WIDTH:
        raise KernelArgumentError(f"x has shape {list(x.shape)}, expected at most [any, {MAX_WIDTH}]")
