"""A linear layer for a handful of rows with what stands before and behind it: norm, gate, residual, in one launch.

With so few rows a layer's time is that of reading its weight, and of launches. Products are sums by threads, not by
tensor cores: no weight passes through shared memory, and rows stay floats whatever the weight is. A launch may begin
while the one before ends (programmatic dependent launch): it then already reads its first weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.activation.triton_kernel import GATES, Gate
from kernels.arguments import FLOATS, KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape
from kernels.chip import capability, interpreted
from kernels.linear.triton_few_rows_kernels import few_rows_int4_kernel, few_rows_kernel
from kernels.linear.triton_kernel import check_alone, check_float8, whole_zeros
from kernels.linear.triton_weights import DeviceWeight

MAX_ROWS = 2
"""Each row reads the weight by itself, at the same time as the other: with more, the cache would be too slow."""


def few_rows_linear(
    x: Tensor,
    weight: DeviceWeight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T, plus the weight's bias, for at most `MAX_ROWS` rows.

    Args:
        x: [num_rows, in_features] bfloat16, float16 or float32, contiguous.
        weight: of any kind, without a permutation; a plain one and any bias of x's dtype. With `gate` it has twice as
            many outputs as the result.
        norm: [in_features]; x is first normalized as by `kernels.norm.triton_kernel.rms_norm` with `eps` and `offset`.
        gate: the first half of the product, activated, times the second, as `kernels.activation.triton_kernel`.
        residual: [num_rows, out_features]; the result is added to it, and it is returned.

    Returns:
        [num_rows, out_features], x's dtype. A row does not depend on the others.

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    num_rows, out_features = _check(x, weight, norm, gate, residual)
    y = residual
    if y is None:
        y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return y
    early = capability(x.device) >= (9, 0) and not interpreted(x.device)
    shape = launch_shape(weight, out_features, gate is not None, interpreted(x.device))
    shared: dict[str, Any] = {
        "x_ptr": x,
        "norm_ptr": x if norm is None else norm,
        "w_ptr": weight.data,
        "scale_ptr": x if weight.scales is None else weight.scales,
        "bias_ptr": x if weight.bias is None else weight.bias,
        "y_ptr": y,
        "in_features": weight.in_features,
        "out_features": out_features,
        "eps": eps,
        "OFFSET": offset,
        "GATE": gate or "",
        "HAS_NORM": norm is not None,
        "HAS_BIAS": weight.bias is not None,
        "ADD": residual is not None,
        "BLOCK_N": shape.block_n,
        "EARLY": early,
        "num_warps": shape.num_warps,
        **({"launch_pdl": True} if early else {}),
    }
    grid = (num_rows, triton.cdiv(out_features, shape.block_n))
    if weight.kind == "int4":
        few_rows_int4_kernel[grid](
            **shared,
            zero_ptr=x if weight.zeros is None else weight.zeros,
            HAS_ZERO=weight.zeros is not None,
            WHOLE_ZERO=whole_zeros(weight),
            GROUP=weight.group,
            GROUPS=max(shape.block_k // weight.group, 1),
        )
    else:
        few_rows_kernel[grid](**shared, HAS_SCALE=weight.scales is not None, BLOCK_K=shape.block_k)
    return y


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a launch is cut."""

    block_n: int  # rows of the weight in a tile
    block_k: int  # and columns: decides the order of a sum, so it follows from the weight alone
    num_warps: int


def launch_shape(weight: DeviceWeight, out_features: int, gated: bool, one_by_one: bool = False) -> LaunchShape:
    """Tiles of 4096 weights, half of them in the second matrix with a gate; fewer where few rows would idle a chip.
    Groups of four bits lie by outputs: four of those make a piece that is worth reading. Unpacked, two matrices want
    the registers of twice as many threads.

    Args:
        one_by_one: programs run one after the other, so there had better be few of them.
    """
    four = weight.kind == "int4"
    few = 4 if four or not (gated or out_features <= 2048) else 2
    block_k = min(1024, triton.next_power_of_2(weight.in_features))
    return LaunchShape(64 if one_by_one else few, block_k, 8 if four and gated else 4)


def _check(
    x: Tensor, weight: DeviceWeight, norm: Tensor | None, gate: Gate | None, residual: Tensor | None
) -> tuple[int, int]:
    check_shape("x", x, None, weight.in_features)
    check_dtype("x", x, *FLOATS)
    num_rows = x.shape[0]
    if num_rows > MAX_ROWS:
        raise KernelArgumentError(f"x has shape {list(x.shape)}, expected at most {MAX_ROWS} rows")
    if weight.kind == "plain":
        check_dtype("weight", weight.data, x.dtype)
    check_alone(weight)
    check_float8("weight", weight)
    if weight.permutation is not None:
        raise KernelArgumentError("weight has a permutation, expected none")
    if gate is not None and (gate not in GATES or weight.out_features % 2):
        raise KernelArgumentError(f"gate is {gate!r} for a weight of {weight.out_features} outputs")
    out_features = weight.out_features // (2 if gate else 1)
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("bias", weight.bias, (weight.out_features,)),
        ("norm", norm, (weight.in_features,)),
        ("residual", residual, (num_rows, out_features)),
    ]
    given = [("x", x), ("weight", weight.data)]
    for name, tensor, shape in wanted:
        if tensor is not None:
            check_shape(name, tensor, *shape)
            check_dtype(name, tensor, x.dtype)
            given.append((name, tensor))
    for name, tensor in given:
        check_contiguous(name, tensor)
        check_device(name, tensor, x)
    return num_rows, out_features
