"""A linear layer for a handful of rows with what stands before and behind it: norm, gate, residual, in one launch.

With so few rows a layer's time is that of reading its weight, and of launches. Products are sums by threads, not by
tensor cores: no weight passes through shared memory. A launch may begin while the one before ends (programmatic
dependent launch): it then already reads its first weights. All is float32 until a result is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_kernel import GATES, Gate, gated
from kernels.arguments import FLOATS, KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape
from kernels.chip import capability, interpreted

MAX_ROWS = 2
"""Each row reads the weight by itself, at the same time as the other: with more, the cache would be too slow."""


@triton.jit
def few_rows_kernel(
    x_ptr,  # [num_rows, in_features], contiguous
    norm_ptr,  # [in_features], with HAS_NORM
    w_ptr,  # [out_features, in_features], or twice as many rows with GATE
    scale_ptr,  # as many float32 as the weight, of int8 then, has rows, with HAS_SCALE
    bias_ptr,  # as many as the weight has rows, with HAS_BIAS
    y_ptr,  # [num_rows, out_features], contiguous; the residual, read and written, with ADD
    in_features,
    out_features,
    eps,
    OFFSET: tl.constexpr,
    GATE: tl.constexpr,  # "" or one of GATES
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
    b_y = tl.sum(b_acc, axis=1) * scale
    if HAS_SCALE:
        b_y *= tl.load(scale_ptr + o_n, mask=m_n, other=0.0)
    if HAS_BIAS:
        b_y += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)
    if GATE != "":
        b_y_up = tl.sum(b_acc_up, axis=1) * scale
        if HAS_SCALE:
            b_y_up *= tl.load(scale_ptr + out_features + o_n, mask=m_n, other=0.0)
        if HAS_BIAS:
            b_y_up += tl.load(bias_ptr + out_features + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_y = gated(b_y, GATE) * b_y_up
    p_y = y_ptr + i_m * out_features + o_n
    if ADD:
        b_y += tl.load(p_y, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_n)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T + bias for at most `MAX_ROWS` rows.

    Args:
        x: [num_rows, in_features] bfloat16, float16 or float32, contiguous.
        weight: [out_features, in_features], or with `gate` [2 * out_features, in_features]; contiguous, of x's dtype
            or int8.
        bias: as many as the weight has rows.
        scales: of an int8 weight, as many float32: what its rows are multiplied by.
        norm: [in_features]; x is first normalized as by `kernels.norm.triton_kernel.rms_norm` with `eps` and `offset`.
        gate: the first half of the product, activated, times the second, as `kernels.activation.triton_kernel`.
        residual: [num_rows, out_features]; the result is added to it, and it is returned.

    Returns:
        [num_rows, out_features], x's dtype. A row does not depend on the others.

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    num_rows, in_features, out_features = _check(x, weight, bias, scales, norm, gate, residual)
    y = residual
    if y is None:
        y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    shape = launch_shape(out_features, in_features, gate is not None, interpreted(x.device))
    early = capability(x.device) >= (9, 0) and not interpreted(x.device)
    few_rows_kernel[(num_rows, triton.cdiv(out_features, shape.block_n))](
        x_ptr=x,
        norm_ptr=x if norm is None else norm,
        w_ptr=weight,
        scale_ptr=x if scales is None else scales,
        bias_ptr=x if bias is None else bias,
        y_ptr=y,
        in_features=in_features,
        out_features=out_features,
        eps=eps,
        OFFSET=offset,
        GATE=gate or "",
        HAS_NORM=norm is not None,
        HAS_SCALE=scales is not None,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        EARLY=early,
        num_warps=shape.num_warps,
        **({"launch_pdl": True} if early else {}),
    )
    return y


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a launch is cut."""

    block_n: int  # rows of the weight in a tile
    block_k: int  # and columns: decides the order of a sum, so it follows from the weight alone
    num_warps: int = 4


def launch_shape(out_features: int, in_features: int, gated: bool, one_by_one: bool = False) -> LaunchShape:
    """Tiles of 4096 weights, half of them in the second matrix with a gate; fewer where few rows would idle a chip.

    Args:
        one_by_one: programs run one after the other, so there had better be few of them.
    """
    block_n = 64 if one_by_one else 2 if gated or out_features <= 2048 else 4
    return LaunchShape(block_n, min(1024, triton.next_power_of_2(in_features)))


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    norm: Tensor | None,
    gate: Gate | None,
    residual: Tensor | None,
) -> tuple[int, int, int]:
    check_shape("x", x, None, None)
    check_dtype("x", x, *FLOATS)
    num_rows, in_features = x.shape
    if num_rows > MAX_ROWS:
        raise KernelArgumentError(f"x has shape {list(x.shape)}, expected at most {MAX_ROWS} rows")
    check_shape("weight", weight, None, in_features)
    check_dtype("weight", weight, x.dtype if scales is None else torch.int8)
    if gate is not None and (gate not in GATES or weight.shape[0] % 2):
        raise KernelArgumentError(f"gate is {gate!r} for a weight of shape {list(weight.shape)}")
    out_features = weight.shape[0] // (2 if gate else 1)
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("scales", scales, (weight.shape[0],)),
        ("bias", bias, (weight.shape[0],)),
        ("norm", norm, (in_features,)),
        ("residual", residual, (num_rows, out_features)),
    ]
    given = [("x", x), ("weight", weight)]
    for name, tensor, shape in wanted:
        if tensor is not None:
            check_shape(name, tensor, *shape)
            check_dtype(name, tensor, torch.float32 if name == "scales" else x.dtype)
            given.append((name, tensor))
    for name, tensor in given:
        check_contiguous(name, tensor)
        check_device(name, tensor, x)
    return num_rows, in_features, out_features
