"""A checkpoint's matrices as what a GPU multiplies by: the integers a CPU's native kernels hold too, or float8.

One setting stands for one set of weights wherever it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.linear.quantize import (
    Int4Weight,
    Int8Weight,
    Matrix,
    Quant,
    finite,
    floats_of,
    kept_as,
    to_int4,
    to_int8,
)
from kernels.linear.triton_weights import DeviceWeight, Kind, fp8_channels, from_int4, from_minimum, plain


def packed(parts: Sequence[Matrix], quant: Quant, bias: Tensor | None = None) -> DeviceWeight:
    """Matrices of the same inputs, one under the other, as `quant`, of 4 or 8 bits, keeps them.

    Args:
        parts: each [out_i, in] on the device: floats, or integers as a checkpoint has them, which stay those where
            the form is the same.
        bias: [out], of any float dtype.

    Raises:
        Unquantizable: a part is not finite, or has no such integers.
        KernelArgumentError: its inputs are no whole groups.
    """
    if quant.on_gpu == "fp8":
        return fp8_channels(torch.cat([finite(floats_of(part)) for part in parts]), bias)
    if quant.bits == 8:
        eights = [part if isinstance(part, Int8Weight) else to_int8(floats_of(part)) for part in parts]
        integers, scales = (torch.cat(each) for each in zip(*((e.integers, e.scales) for e in eights), strict=True))
        out_features, in_features = integers.shape
        kind: Kind = quant.on_gpu or "int8"
        return DeviceWeight(kind, integers, in_features, out_features, scales=scales, bias=bias)
    fours = [_in_fours(part, quant) for part in parts]
    integers, scales, minima = (
        torch.cat(each) for each in zip(*((f.integers, f.scales, f.minima) for f in fours), strict=True)
    )
    if quant.in_steps:
        zeros = minima.neg().to(torch.uint8)
        # those of a symmetric checkpoint need not be read
        unlike = None if bool((zeros == 8).all()) else zeros
        return from_int4(integers, scales, unlike, quant.group, fours[0].order, bias)
    return from_minimum(integers, scales, minima, quant.group, bias)


def kept(parts: Sequence[Matrix], dtype: torch.dtype, bias: Tensor | None = None) -> DeviceWeight:
    """The same as they are kept, floats in `dtype`.

    Raises:
        Unquantizable: they are kept in different ways.
        KernelArgumentError: inputs are no whole groups.
    """
    quant = kept_as(parts)
    if quant.bits:
        return packed(parts, quant, bias)
    return plain(torch.cat([floats_of(part).to(dtype) for part in parts]), bias)


def on_device(weight: Matrix, device: torch.device) -> Matrix:
    """A copy there: what was read is part of its file's mapping, and would keep all of it."""
    if isinstance(weight, Tensor):
        return weight.to(device, copy=True)
    integers, scales = (part.to(device, copy=True) for part in (weight.integers, weight.scales))
    if isinstance(weight, Int8Weight):
        return Int8Weight(integers, scales)
    order = None if weight.order is None else weight.order.to(device)
    return replace(weight, integers=integers, scales=scales, minima=weight.minima.to(device, copy=True), order=order)


def _in_fours(weight: Matrix, quant: Quant) -> Int4Weight:
    same = isinstance(weight, Int4Weight) and (weight.group, weight.in_steps) == (quant.group, quant.in_steps)
    return weight if isinstance(weight, Int4Weight) and same else to_int4(floats_of(weight), quant.group)
