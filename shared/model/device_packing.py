"""A checkpoint's matrices as what a GPU multiplies by: the integers a CPU's native kernels hold too, or float8.

One setting stands for one set of weights wherever it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.quantize import Int4Weight, Quant, finite, to_int4, to_int8
from kernels.linear.triton_weights import DeviceWeight, Kind, fp8_channels, from_minimum


def packed(parts: Sequence[Tensor | Int4Weight], quant: Quant, bias: Tensor | None = None) -> DeviceWeight:
    """Matrices of the same inputs, one under the other, as `quant`, of 4 or 8 bits, keeps them.

    Args:
        parts: each [out_i, in] on the device: floats, or integers of four bits as a checkpoint has them, which stay
            those where the groups are alike.
        bias: [out], of any float dtype.

    Raises:
        Unquantizable: a part is not finite, or has no such integers.
        KernelArgumentError: its inputs are no whole groups.
    """
    if quant.on_gpu == "fp8":
        return fp8_channels(torch.cat([finite(_floats(part)) for part in parts]), bias)
    if quant.bits == 8:
        eights = [to_int8(_floats(part)) for part in parts]
        integers, scales = (torch.cat(each) for each in zip(*((e.integers, e.scales) for e in eights), strict=True))
        out_features, in_features = integers.shape
        kind: Kind = quant.on_gpu or "int8"
        return DeviceWeight(kind, integers, in_features, out_features, scales=scales, bias=bias)
    fours = [_in_fours(part, quant.group) for part in parts]
    integers, scales, minima = (
        torch.cat(each) for each in zip(*((f.integers, f.scales, f.minima) for f in fours), strict=True)
    )
    return from_minimum(integers, scales, minima, quant.group, bias)


def on_device(weight: Tensor | Int4Weight, device: torch.device) -> Tensor | Int4Weight:
    """A copy there: what was read is part of its file's mapping, and would keep all of it."""
    if isinstance(weight, Tensor):
        return weight.to(device, copy=True)
    integers, scales, minima = (part.to(device, copy=True) for part in (weight.integers, weight.scales, weight.minima))
    return Int4Weight(integers, scales, minima, weight.group)


def _in_fours(weight: Tensor | Int4Weight, group: int) -> Int4Weight:
    if isinstance(weight, Int4Weight) and weight.group == group:
        return weight
    return to_int4(_floats(weight), group)


def _floats(weight: Tensor | Int4Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.floats()
