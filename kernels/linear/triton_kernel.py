"""y = x W^T over every weight format, rows bitwise independent of how many there are (`triton_parts`).

Few rows are split over the chip along the input features; many are computed by a persistent grid, a tile at a time.
Both add up in the same order.
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
    check_device,
    check_dtype,
    check_range,
    check_rows,
    check_shape,
)
from kernels.chip import FP8_CAPABILITY, capability, multiprocessors, shared_bytes
from kernels.linear.triton_parts import BLOCK_N, finished, split_features, split_sum
from kernels.linear.triton_weights import DeviceWeight
from kernels.triton_rounding import rounded, row_scale

MAX_FEATURES = 131072
"""Products of int8 summed over so many fit 32 bits."""
_SPLIT_ROWS = 256
"""Up to so many rows a split grid is worth its second launch."""
_REDUCE_BLOCK = 1024
_TILE_GROUP = 8


@triton.jit
def split_linear_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr,  # as split_sum
    part_ptr,  # [splits, num_rows, out_features] float32 or int32, written
    num_rows,
    in_features,
    out_features,
    split,
    x_row: tl.int64,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,
    ACC: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One split of one tile. Grid: (out tiles, row tiles, splits)."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_s = tl.program_id(2)
    m_n, m_m = o_n < out_features, o_m < num_rows
    b_sum = split_sum(
        x_ptr, w_ptr, scale_ptr, zero_ptr, o_m * x_row, m_m, o_n, m_n, i_s * split,
        tl.minimum(i_s * split + split, in_features), in_features, out_features, GROUP, HAS_ZERO, WHOLE_ZERO, ACC,
        EVEN_K, BLOCK_K, BLOCK_N, BLOCK_M,
    )  # fmt: skip
    p_part = part_ptr + (i_s.to(tl.int64) * num_rows + o_m[:, None]) * out_features + o_n[None, :]
    tl.store(p_part, tl.trans(b_sum), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def add_splits_kernel(
    part_ptr,  # [splits, num_rows, out_features]
    row_scale_ptr,  # [num_rows] float32
    column_scale_ptr,  # [out_features]
    bias_ptr,  # [out_features]
    y_ptr,  # [num_rows, out_features], written
    num_rows,
    out_features,
    splits,
    ACC: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Splits added in order, scales and bias. Grid: (num_rows, out_features / BLOCK)."""
    o_m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < out_features
    o_y = o_m[:, None] * out_features + o_n[None, :]
    b_sum = tl.zeros([1, BLOCK], dtype=ACC)
    for i_s in range(splits):
        o_part = (i_s + tl.zeros([], tl.int64)) * num_rows * out_features
        b_sum += tl.load(part_ptr + o_part + o_y, mask=m_n[None, :], other=0)
    b_y = finished(
        b_sum, row_scale_ptr, column_scale_ptr, bias_ptr, o_m, o_m < num_rows, o_n, m_n, HAS_ROW_SCALE,
        HAS_COLUMN_SCALE, HAS_BIAS,
    )  # fmt: skip
    tl.store(y_ptr + o_y, b_y.to(y_ptr.dtype.element_ty), mask=m_n[None, :])


@triton.jit
def tile_linear_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr,  # as split_sum
    row_scale_ptr, column_scale_ptr, bias_ptr,  # as add_splits_kernel
    y_ptr,  # [num_rows, out_features], written
    num_rows,
    in_features,
    out_features,
    split,
    x_row: tl.int64,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,
    ACC: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_GROUP: tl.constexpr,
):  # fmt: skip
    """Whole tiles, one after another. Grid: (any,)."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        # tiles that run together share rows of the weight and of x
        in_group = TILE_GROUP * tiles_m
        first_n = tile // in_group * TILE_GROUP
        height = tl.minimum(tiles_n - first_n, TILE_GROUP)
        i_n = first_n + tile % in_group % height
        i_m = tile % in_group // height
        o_n = i_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_n, m_m = o_n < out_features, o_m < num_rows
        if ONE_SPLIT:
            b_sum = split_sum(
                x_ptr, w_ptr, scale_ptr, zero_ptr, o_m * x_row, m_m, o_n, m_n, 0, in_features, in_features,
                out_features, GROUP, HAS_ZERO, WHOLE_ZERO, ACC, EVEN_K, BLOCK_K, BLOCK_N, BLOCK_M,
            )  # fmt: skip
        else:
            b_sum = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC)
            for first in range(0, in_features, split):
                b_sum += split_sum(
                    x_ptr, w_ptr, scale_ptr, zero_ptr, o_m * x_row, m_m, o_n, m_n, first,
                    tl.minimum(first + split, in_features), in_features, out_features, GROUP, HAS_ZERO, WHOLE_ZERO,
                    ACC, EVEN_K, BLOCK_K, BLOCK_N, BLOCK_M,
                )  # fmt: skip
        b_y = finished(
            tl.trans(b_sum), row_scale_ptr, column_scale_ptr, bias_ptr, o_m, m_m, o_n, m_n, HAS_ROW_SCALE,
            HAS_COLUMN_SCALE, HAS_BIAS,
        )  # fmt: skip
        p_y = y_ptr + o_m[:, None] * out_features + o_n[None, :]
        tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [num_rows, width], rows contiguous
    q_ptr,  # [num_rows, width] int8 or float8, written
    scale_ptr,  # [num_rows] float32, written
    x_row: tl.int64,
    width,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= width
):
    """Grid: (num_rows,)."""
    i_r = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK)
    m_w = o_w < width
    b_x = tl.load(x_ptr + i_r * x_row + o_w, mask=m_w, other=0.0).to(tl.float32)  # [BLOCK]
    # one value that is not finite spoils its row, and only that
    scale = row_scale(tl.max(tl.abs(b_x), axis=0), tl.sum(b_x, axis=0), IS_INT8)
    tl.store(scale_ptr + i_r, scale)
    b_q = rounded(tl.div_rn(b_x, scale), IS_INT8)
    tl.store(q_ptr + i_r * width + o_w, b_q.to(q_ptr.dtype.element_ty), mask=m_w)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of a launch; none of them moves a bit of the result but `block_k`, which follows the weight."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def launch_shape(weight: DeviceWeight, num_rows: int, one_split: bool, x_bytes: int = 2) -> Shape:
    """Tiles for a weight and a row count, as an H200 likes them; fewer stages where a block has less memory.

    Args:
        x_bytes: of an element of x as it is multiplied.
    """
    eight = weight.kind in ("int8", "int4")
    block_k = 64 if weight.kind == "plain" else 128
    if weight.data.dtype == torch.float32:
        block_k = 32
    if num_rows <= 16:
        return Shape(BLOCK_N, 16, block_k, 4, 3 if eight else 4)
    if eight and x_bytes == 4:
        # summed by threads, not by tensor cores: what a larger tile adds to it does not fit the registers
        return Shape(BLOCK_N, 32, block_k, 4, 2)
    if num_rows <= 64:
        block_n = 128 if weight.kind == "int8" else BLOCK_N
        return Shape(block_n, triton.next_power_of_2(num_rows), block_k, 4, 3 if eight else 6)
    if not is_roomy(weight.data.device):
        # sums of float8 are held three times over
        return Shape(64 if weight.kind == "fp8" else 128, 128, block_k, 8, 2)
    if one_split and num_rows > 128 and weight.data.itemsize == 2:
        return Shape(128, 256, block_k, 8, 3)
    return Shape(128, 128, block_k, 8, 4 if weight.data.itemsize == 2 else 3)


def is_roomy(device: torch.device) -> bool:
    """Whether a block may have the shared memory that the largest tiles want."""
    return shared_bytes(device) >= 160 * 1024


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each row over its own scale, largest magnitude / 127 (int8) or / 448 (float8_e4m3fn).

    Args:
        x: [num_rows, width], floats, rows contiguous.

    Returns:
        [num_rows, width] of `dtype` and [num_rows] float32 scales. A row that holds NaN or infinity gets a scale that
        makes its products NaN.

    Raises:
        KernelArgumentError: an argument is not as above, or the card has no float8.
    """
    check_shape("x", x, None, None)
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    num_rows, width = x.shape
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise KernelArgumentError(f"dtype is {dtype}, expected torch.int8 or torch.float8_e4m3fn")
    if dtype == torch.float8_e4m3fn:
        _require_float8("dtype", x.device)
    q = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        quantize_rows_kernel[(num_rows,)](
            x_ptr=x,
            q_ptr=q,
            scale_ptr=scales,
            x_row=x.stride(0),
            width=width,
            IS_INT8=dtype == torch.int8,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return q, scales


def linear(x: Tensor, weight: DeviceWeight, programs: int = 0) -> Tensor:
    """x W^T, plus the weight's bias.

    Args:
        x: [num_rows, in_features] bfloat16, float16 or float32, rows contiguous; of a plain weight's dtype.
        programs: of the persistent grid; 0 = one for each multiprocessor.

    Returns:
        [num_rows, out_features] of x's dtype. Row i depends on row i of x alone, bit for bit.

    Raises:
        KernelArgumentError: a tensor does not fit.
    """
    _check(x, weight)
    num_rows, out_features = x.shape[0], weight.out_features
    y = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    row_scales: Tensor | None = None
    if weight.kind in ("w8a8", "fp8"):
        x, row_scales = quantize_rows(x, weight.data.dtype)
    split = split_features(weight.kind, weight.in_features, out_features)
    splits = triton.cdiv(weight.in_features, split)
    exact = weight.kind == "w8a8"
    column_scales = None if weight.kind == "int4" else weight.scales
    split_grid = splits > 1 and num_rows <= _SPLIT_ROWS
    shape = launch_shape(weight, num_rows, splits == 1, x.element_size())
    source = {
        "x_ptr": x,
        "w_ptr": weight.data,
        "scale_ptr": x if weight.scales is None else weight.scales,
        "zero_ptr": x if weight.zeros is None else weight.zeros,
        "num_rows": num_rows,
        "in_features": weight.in_features,
        "out_features": out_features,
        "split": split,
        "x_row": x.stride(0),
        "GROUP": weight.group,
        "HAS_ZERO": weight.zeros is not None,
        "WHOLE_ZERO": whole_zeros(weight),
        "EVEN_K": weight.in_features % shape.block_k == 0,
        "BLOCK_K": shape.block_k,
        "BLOCK_N": shape.block_n,
        "BLOCK_M": shape.block_m,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
    }
    finish = {
        "row_scale_ptr": y if row_scales is None else row_scales,
        "column_scale_ptr": y if column_scales is None else column_scales,
        "bias_ptr": y if weight.bias is None else weight.bias,
        "y_ptr": y,
        "ACC": tl.int32 if exact else tl.float32,
        "HAS_ROW_SCALE": row_scales is not None,
        "HAS_COLUMN_SCALE": column_scales is not None,
        "HAS_BIAS": weight.bias is not None,
    }
    tiles_n, tiles_m = triton.cdiv(out_features, shape.block_n), triton.cdiv(num_rows, shape.block_m)
    if not split_grid:
        # small tiles run side by side on a multiprocessor: a persistent grid would leave it waiting for memory
        together = programs or (tiles_n * tiles_m if num_rows <= 64 else multiprocessors(x.device) or 4)
        grid = (min(together, tiles_n * tiles_m),)
        tile_linear_kernel[grid](**source, **finish, ONE_SPLIT=splits == 1, TILE_GROUP=_TILE_GROUP)
        return y
    dtype = torch.int32 if exact else torch.float32
    parts = torch.empty((splits, num_rows, out_features), dtype=dtype, device=x.device)
    split_linear_kernel[(tiles_n, tiles_m, splits)](**source, part_ptr=parts, ACC=finish["ACC"])
    add_splits_kernel[(num_rows, triton.cdiv(out_features, _REDUCE_BLOCK))](
        **finish,
        part_ptr=parts,
        num_rows=num_rows,
        out_features=out_features,
        splits=splits,
        BLOCK=_REDUCE_BLOCK,
        num_warps=4,
    )
    return y


def check_alone(weight: DeviceWeight) -> None:
    """Raise `KernelArgumentError` for a weight of experts."""
    if weight.num_experts:
        raise KernelArgumentError(f"weight has shape {list(weight.data.shape)}, of experts; expected one matrix")


def check_float8(name: str, weight: DeviceWeight) -> None:
    """Raise `KernelArgumentError` where a card does not multiply this weight's float8."""
    if weight.kind == "fp8":
        _require_float8(name, weight.data.device)


def _require_float8(name: str, device: torch.device) -> None:
    if capability(device) < FP8_CAPABILITY:
        raise KernelArgumentError(f"{name} is float8_e4m3fn, whose products this card does not have; int8 ones it has")


def whole_zeros(weight: DeviceWeight) -> bool:
    """Whether every zero of a weight is an integer, which is cheaper to take off."""
    return weight.zeros is None or weight.zeros.dtype == torch.uint8


def _check(x: Tensor, weight: DeviceWeight) -> None:
    check_shape("x", x, None, weight.in_features)
    check_dtype("x", x, *((weight.data.dtype,) if weight.kind == "plain" else FLOATS))
    check_rows("x", x)
    check_alone(weight)
    check_device("weight", weight.data, x)
    check_float8("weight", weight)
    if weight.in_features > MAX_FEATURES:
        raise KernelArgumentError(f"x has shape {list(x.shape)}, expected at most [any, {MAX_FEATURES}]")
    if weight.kind == "int4":
        check_range("group of weight", weight.group, (32, 64, 128))
