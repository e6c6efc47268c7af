"""A linear layer for a handful of rows with what stands before and behind it: norm, gate, residual, in one launch.

With so few rows a layer's time is that of reading its weight, and of launches. The weight is read once, by tiles of
its rows; the rows of x are read and normalized by every program, which costs next to nothing. A launch may begin while
the one before ends (programmatic dependent launch): it then already reads its first weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_kernel import GATES, Gate, gated
from kernels.arguments import FLOATS, KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape

MAX_ROWS = 4
"""With more, reading the rows of x in every program begins to count."""
_ROWS = 16
"""Of x in a tile: the least a tensor core takes."""
_PROGRAMS = 256
"""Tiles are kept small enough for about so many programs, two for each multiprocessor of a large chip."""


@triton.jit
def _partial(x_ptr, norm_ptr, b_w, o_x, m_m, o_k, m_k, scale, OFFSET: tl.constexpr, HAS_NORM: tl.constexpr):
    """A tile of the weight times the same columns of x: [BLOCK_N, ROWS]."""
    b_x = tl.load(x_ptr + o_x[None, :] + o_k[:, None], mask=m_m[None, :] & m_k[:, None], other=0.0)  # [BLOCK_K, ROWS]
    if HAS_NORM:
        b_norm = tl.load(norm_ptr + o_k, mask=m_k, other=0.0).to(tl.float32) + OFFSET
        # rounded as the norm by itself would be
        b_x = (b_x.to(tl.float32) * scale[None, :] * b_norm[:, None]).to(b_w.dtype)
    return tl.dot(b_w, b_x, input_precision="ieee")


@triton.jit
def few_rows_kernel(
    x_ptr,  # [num_rows, in_features], contiguous
    norm_ptr,  # [in_features], with HAS_NORM
    w_ptr,  # [out_features, in_features], or twice as many rows with GATE
    bias_ptr,  # as many as the weight has rows, with HAS_BIAS
    y_ptr,  # [num_rows, out_features], contiguous; the residual, read and written, with ADD
    num_rows,
    in_features,
    out_features,
    eps,
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,  # "" or one of GATES
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM_ROWS: tl.constexpr,  # at least num_rows
    BLOCK_NORM: tl.constexpr,  # power of two >= in_features
    EARLY: tl.constexpr,  # the launch before may still run
):  # fmt: skip
    """BLOCK_N features of every row. Grid: (out_features / BLOCK_N,)."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, ROWS)
    o_k = tl.arange(0, BLOCK_K)
    m_n, m_m, m_k = o_n < out_features, o_m < num_rows, o_k < in_features
    o_x = o_m * in_features
    p_w = w_ptr + o_n[:, None] * in_features + o_k[None, :]
    o_up = out_features.to(tl.int64) * in_features
    b_w = tl.load(p_w, mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BLOCK_N, BLOCK_K]
    if GATE != "":
        b_up = tl.load(p_w + o_up, mask=m_n[:, None] & m_k[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = tl.zeros([ROWS], tl.float32)
    if HAS_NORM:
        o_w = tl.arange(0, BLOCK_NORM)
        for i in tl.static_range(NORM_ROWS):  # whole rows at once: a loop would wait for each piece
            m_w = (o_w < in_features) & (i < num_rows)
            b_row = tl.load(x_ptr + i * in_features + o_w, mask=m_w, other=0.0).to(tl.float32)  # [BLOCK_NORM]
            mean = tl.sum(b_row * b_row, axis=0) / in_features
            scale = tl.where(o_m == i, 1.0 / tl.sqrt(mean + eps), scale)
    b_acc = _partial(x_ptr, norm_ptr, b_w, o_x, m_m, o_k, m_k, scale, OFFSET, HAS_NORM)  # [BLOCK_N, ROWS]
    if GATE != "":
        b_acc_up = _partial(x_ptr, norm_ptr, b_up, o_x, m_m, o_k, m_k, scale, OFFSET, HAS_NORM)
    for k in range(BLOCK_K, in_features, BLOCK_K):
        m_k = o_k + k < in_features
        b_w = tl.load(p_w + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_acc += _partial(x_ptr, norm_ptr, b_w, o_x, m_m, o_k + k, m_k, scale, OFFSET, HAS_NORM)
        if GATE != "":
            b_up = tl.load(p_w + o_up + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
            b_acc_up += _partial(x_ptr, norm_ptr, b_up, o_x, m_m, o_k + k, m_k, scale, OFFSET, HAS_NORM)
    if HAS_BIAS:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if GATE != "":
        if HAS_BIAS:
            b_acc_up += tl.load(bias_ptr + out_features + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        # rounded as the product by itself would be
        b_acc = b_acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        b_acc = gated(b_acc, GATE) * b_acc_up.to(y_ptr.dtype.element_ty).to(tl.float32)
    p_y = y_ptr + o_m[None, :] * out_features + o_n[:, None]
    m_y = m_m[None, :] & m_n[:, None]
    if ADD:
        b_acc += tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
    tl.store(p_y, b_acc.to(y_ptr.dtype.element_ty), mask=m_y)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T + bias for at most `MAX_ROWS` rows.

    Args:
        x: [num_rows, in_features] bfloat16, float16 or float32, contiguous.
        weight: [out_features, in_features], contiguous, x's dtype; with `gate`, [2 * out_features, in_features].
        bias: as many as the weight has rows.
        norm: [in_features]; x is first normalized as by `kernels.norm.triton_kernel.rms_norm` with `eps` and `offset`.
        gate: the first half of the product, activated, times the second, as `kernels.activation.triton_kernel`.
        residual: [num_rows, out_features]; the result is added to it, and it is returned.

    Returns:
        [num_rows, out_features], x's dtype. A row does not depend on the others.

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    num_rows, in_features, out_features = _check(x, weight, bias, norm, gate, residual)
    y = residual
    if y is None:
        y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    shape = launch_shape(out_features, in_features, gate is not None)
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    few_rows_kernel[(triton.cdiv(out_features, shape.block_n),)](
        x_ptr=x,
        norm_ptr=x if norm is None else norm,
        w_ptr=weight,
        bias_ptr=x if bias is None else bias,
        y_ptr=y,
        num_rows=num_rows,
        in_features=in_features,
        out_features=out_features,
        eps=eps,
        OFFSET=offset,
        GATE=gate or "",
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        ROWS=_ROWS,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        NORM_ROWS=triton.next_power_of_2(num_rows),
        BLOCK_NORM=triton.next_power_of_2(in_features) if norm is not None else 16,
        EARLY=early,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **({"launch_pdl": True} if early else {}),
    )
    return y


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a launch is cut. It decides the order of a row's sum, so it follows from the weight alone."""

    block_n: int  # rows of the weight in a tile
    block_k: int  # and columns
    num_warps: int = 4
    num_stages: int = 4  # tiles in flight


def launch_shape(out_features: int, in_features: int, gated: bool) -> LaunchShape:
    """Tiles small enough for `_PROGRAMS` of them where the weight has so many rows, and as wide as then pays."""
    block_n = 16
    while block_n < (32 if gated else 64) and out_features // (2 * block_n) >= _PROGRAMS:
        block_n *= 2
    block_k = 256 if block_n == 16 and not gated else 128
    return LaunchShape(block_n, min(block_k, max(16, triton.next_power_of_2(in_features))))


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, gate: Gate | None, residual: Tensor | None
) -> tuple[int, int, int]:
    check_shape("x", x, None, None)
    check_dtype("x", x, *FLOATS)
    num_rows, in_features = x.shape
    if num_rows > MAX_ROWS:
        raise KernelArgumentError(f"x has shape {list(x.shape)}, expected at most {MAX_ROWS} rows")
    check_shape("weight", weight, None, in_features)
    if gate is not None and (gate not in GATES or weight.shape[0] % 2):
        raise KernelArgumentError(f"gate is {gate!r} for a weight of shape {list(weight.shape)}")
    out_features = weight.shape[0] // (2 if gate else 1)
    given = [("x", x), ("weight", weight)]
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])
        given.append(("bias", bias))
    if norm is not None:
        check_shape("norm", norm, in_features)
        given.append(("norm", norm))
    if residual is not None:
        check_shape("residual", residual, num_rows, out_features)
        given.append(("residual", residual))
    for name, tensor in given:
        check_dtype(name, tensor, x.dtype)
        check_contiguous(name, tensor)
        check_device(name, tensor, x)
    return num_rows, in_features, out_features
