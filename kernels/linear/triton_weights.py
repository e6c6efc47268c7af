"""Weight matrices in the forms the Triton linear kernels read, and how checkpoints' forms become them.

Knows layouts; launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_dtype,
    check_range,
    check_shape,
)
from kernels.triton_rounding import FP8_MAX, INT8_MAX

Kind = Literal["plain", "int8", "int4", "w8a8", "fp8"]
GROUPS = (32, 64, 128)
_DATA: dict[Kind, tuple[torch.dtype, ...]] = {
    "plain": FLOATS,
    "int8": (torch.int8,),
    "int4": (torch.uint8,),
    "w8a8": (torch.int8,),
    "fp8": (torch.float8_e4m3fn,),
}


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A matrix [out_features, in_features] on the device.

    - plain: `data` [out, in], the dtype of x.
    - int8: `data` [out, in] int8, `scales` [out]; x stays as it is.
    - int4: `data` [groups, out, group / 2] uint8; byte j of a row holds feature j of its group in the low nibble and
      feature j + group / 2 in the high one. A value is (q - zero) * scale; `scales`, `zeros` [groups, out]; zeros are
      uint8 or floats, none means 8.
    - w8a8, fp8: `data` [out, in] int8 or float8_e4m3fn, `scales` [out]; rows of x are quantized on the way in.
    """

    kind: Kind
    data: Tensor
    in_features: int
    out_features: int
    group: int = 0  # of int4
    scales: Tensor | None = None
    zeros: Tensor | None = None
    permutation: Tensor | None = None  # [in] int64: feature i of `data` is feature permutation[i] of x
    bias: Tensor | None = None  # [out]

    @property
    def num_experts(self) -> int:
        """Of a weight made by `kernels.moe.triton_kernel.stacked`; 0: a matrix alone."""
        return self.data.shape[0] if self.data.ndim > (3 if self.kind == "int4" else 2) else 0

    def __post_init__(self) -> None:
        """Raise `KernelArgumentError` unless the parts fit one another. Of experts the first dimension is theirs."""
        out, rows = self.out_features, (self.out_features, self.in_features)
        four = self.kind == "int4"
        if four:
            _check_group(self.group, self.in_features)
        groups = self.in_features // self.group if four else 0
        stack = (self.num_experts,) if self.num_experts else ()
        shape = (*stack, groups, out, self.group // 2) if four else (*stack, *rows)
        beside = (*stack, groups, out) if four else (*stack, out)
        parts = {
            "data": (self.data, shape, _DATA[self.kind]),
            "scales": (self.scales, beside, FLOATS),
            "zeros": (self.zeros, beside, (torch.uint8, *FLOATS)),
            "permutation": (self.permutation, (self.in_features,), (torch.int64,)),
            "bias": (self.bias, (out,), FLOATS),
        }
        if (self.scales is None) != (self.kind == "plain") or (self.zeros is not None and not four):
            raise KernelArgumentError(f"weight is {self.kind}: scales are for all but plain ones, zeros for int4")
        for name, (tensor, wanted, dtypes) in parts.items():
            if tensor is not None:
                check_shape(f"{name} of weight", tensor, *wanted)
                check_dtype(f"{name} of weight", tensor, *dtypes)
                check_contiguous(f"{name} of weight", tensor)
                check_device(f"{name} of weight", tensor, self.data)


def plain(weight: Tensor, bias: Tensor | None = None) -> DeviceWeight:
    """`weight`, [out, in] bfloat16, float16 or float32, as it is.

    Raises:
        KernelArgumentError: another shape or dtype; so for all functions here.
    """
    check_shape("weight", weight, None, None)
    check_dtype("weight", weight, *FLOATS)
    weight = weight.contiguous()
    return DeviceWeight("plain", weight, weight.shape[1], weight.shape[0], bias=_checked_bias(bias, weight))


def int8_channels(weight: Tensor, kind: Literal["int8", "w8a8"] = "int8", bias: Tensor | None = None) -> DeviceWeight:
    """Round each row of `weight` to int8 with its own scale, largest magnitude / 127."""
    check_shape("weight", weight, None, None)
    scales = _row_scales(weight, INT8_MAX)
    data = (weight.float() / scales[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    out_features, in_features = weight.shape
    return DeviceWeight(
        kind, data.contiguous(), in_features, out_features, scales=scales, bias=_checked_bias(bias, weight)
    )


def fp8_channels(weight: Tensor, bias: Tensor | None = None) -> DeviceWeight:
    """Round each row of `weight` to float8 e4m3 with its own scale, largest magnitude / 448."""
    check_shape("weight", weight, None, None)
    scales = _row_scales(weight, FP8_MAX)
    data = (weight.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    out_features, in_features = weight.shape
    return DeviceWeight(
        "fp8", data.contiguous(), in_features, out_features, scales=scales, bias=_checked_bias(bias, weight)
    )


def int4_groups(weight: Tensor, group: int, bias: Tensor | None = None) -> DeviceWeight:
    """Round groups of `weight`'s input features to 16 steps between their smallest and largest value."""
    check_shape("weight", weight, None, None)
    out_features, in_features = weight.shape
    _check_group(group, in_features)
    values = weight.float().view(out_features, -1, group)
    low, high = values.amin(-1), values.amax(-1)
    # zero stays representable
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round().clamp(0, 15).to(torch.uint8)
    q = (values / scales[..., None] + zeros[..., None].float()).round().clamp(0, 15).to(torch.uint8)
    return from_int4(q.view(out_features, in_features), scales, zeros, group, bias=bias)


def from_int4(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    permutation: Tensor | None = None,
    bias: Tensor | None = None,
) -> DeviceWeight:
    """Pack values already quantized: (q - zero) * scale.

    Args:
        q: [out, in] uint8, 0 to 15.
        scales, zeros: [out, in / group] floats; zeros uint8 where they are whole, 0 to 16; no zeros means 8 everywhere.
        permutation: [in] int64, where q's features are permuted.
    """
    check_shape("q", q, None, None)
    check_dtype("q", q, torch.uint8)
    out_features, in_features = q.shape
    _check_group(group, in_features)
    check_shape("scales", scales, out_features, in_features // group)
    check_dtype("scales", scales, *FLOATS)
    if zeros is not None:
        check_shape("zeros", zeros, *scales.shape)
        check_dtype("zeros", zeros, torch.uint8, *FLOATS)
    if permutation is not None:
        check_shape("permutation", permutation, in_features)
        check_dtype("permutation", permutation, torch.int64)
    low, high = q.view(out_features, -1, 2, group // 2).unbind(2)
    packed = (low | (high << 4)).transpose(0, 1).contiguous()  # [groups, out, group / 2]
    return DeviceWeight(
        "int4",
        packed,
        in_features,
        out_features,
        group,
        scales.T.contiguous(),
        None if zeros is None else zeros.T.contiguous(),
        permutation,
        _checked_bias(bias, q),
    )


def from_minimum(q: Tensor, scales: Tensor, minimums: Tensor, group: int, bias: Tensor | None = None) -> DeviceWeight:
    """Pack values q * scale + minimum (GGUF's Q4_1). A scale of 0 stands for a group that is its minimum everywhere."""
    check_shape("q", q, None, None)
    _check_group(group, q.shape[1])
    check_shape("scales", scales, q.shape[0], q.shape[1] // group)
    check_shape("minimums", minimums, *scales.shape)
    flat = scales == 0
    steps = torch.where(flat, torch.ones_like(scales), scales)
    groups = torch.where(flat, 0, 1).to(torch.uint8).repeat_interleave(group, dim=1)
    return from_int4(q * groups, steps, -minimums.float() / steps.float(), group, bias=bias)


def dequantized(weight: DeviceWeight) -> Tensor:
    """The matrix a weight stands for: [out, in] float64, in x's order of features."""
    if weight.kind != "int4":
        values = weight.data.double()
        return values if weight.scales is None else values * weight.scales.double()[:, None]
    assert weight.scales is not None
    q = torch.cat((weight.data & 15, weight.data >> 4), dim=-1).double()  # [groups, out, group]
    zeros = 8.0 if weight.zeros is None else weight.zeros.double()[..., None]
    values = ((q - zeros) * weight.scales.double()[..., None]).transpose(0, 1).reshape(weight.out_features, -1)
    if weight.permutation is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, weight.permutation] = values
    return ordered


def _row_scales(weight: Tensor, largest: float) -> Tensor:
    top = weight.float().abs().amax(1) / largest
    return torch.where(top > 0, top, 1.0)


def _check_group(group: int, in_features: int) -> None:
    check_range("group", group, GROUPS)
    if in_features % group:
        raise KernelArgumentError(f"weight has {in_features} input features, expected a multiple of the group {group}")


def _checked_bias(bias: Tensor | None, weight: Tensor) -> Tensor | None:
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])
        check_dtype("bias", bias, *FLOATS)
        check_contiguous("bias", bias)
    return bias
