"""A checkpoint's matrices as the integers a GPU multiplies by: those a CPU's native kernels hold too.

One setting stands for one set of weights wherever it computes; rows that are multiplied with them stay floats here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.quantize import Int4Weight, Quant, to_int4, to_int8
from kernels.linear.triton_weights import DeviceWeight, from_minimum


def packed(weight: Tensor | Int4Weight, quant: Quant, bias: Tensor | None = None) -> DeviceWeight:
    """`weight`, [out, in] on the device, as `quant`, of 4 or 8 bits, keeps it.

    Args:
        weight: floats, or integers of four bits as a checkpoint has them, which stay those where the groups are alike.
        bias: [out], of any float dtype.

    Raises:
        Unquantizable: the weight has no such integers.
        KernelArgumentError: its inputs are no whole groups.
    """
    if quant.bits == 8:
        eight = to_int8(_floats(weight))
        out_features, in_features = eight.shape
        return DeviceWeight("int8", eight.integers, in_features, out_features, scales=eight.scales, bias=bias)
    if isinstance(weight, Tensor) or weight.group != quant.group:
        weight = to_int4(_floats(weight), quant.group)
    return from_minimum(weight.integers, weight.scales, weight.minima, quant.group, bias)


def joined(parts: Sequence[Tensor | Int4Weight]) -> Tensor | Int4Weight:
    """Matrices of the same inputs one under the other: [out, in]. Integers stay integers where all are."""
    if len(parts) == 1:
        return parts[0]
    fours = [part for part in parts if isinstance(part, Int4Weight)]
    if len(fours) == len(parts) and len({four.group for four in fours}) == 1:
        integers = torch.cat([four.integers for four in fours])
        scales, minima = (torch.cat(parts) for parts in zip(*((f.scales, f.minima) for f in fours), strict=True))
        return Int4Weight(integers, scales, minima, fours[0].group)
    return torch.cat([_floats(part) for part in parts])


def on_device(weight: Tensor | Int4Weight, device: torch.device) -> Tensor | Int4Weight:
    """A copy there: what was read is part of its file's mapping, and would keep all of it."""
    if isinstance(weight, Tensor):
        return weight.to(device, copy=True)
    integers, scales, minima = (part.to(device, copy=True) for part in (weight.integers, weight.scales, weight.minima))
    return Int4Weight(integers, scales, minima, weight.group)


def _floats(weight: Tensor | Int4Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.floats()
