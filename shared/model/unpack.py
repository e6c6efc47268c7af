"""A matrix of integers as a checkpoint packs it, in the form that kernels take: the same integers, exact values.

Knows the formats of `shared.model.packing`; opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.linear.quantize import Int4Weight, Int8Weight, Unquantizable
from shared.model.packing import GROUPS, Packing

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column i of eight is nibble `_AWQ_NIBBLES[i]` of AWQ's word."""
_LARGEST_GROUP = max(GROUPS)


def unpacked(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Int4Weight | Int8Weight:
    """The matrix [out, in].

    Args:
        parts: by what their names end in, of the shapes and types of `packing.parts(shape)`.

    Raises:
        Unquantizable: its integers, zeros, scales or order are none that can be held; the message begins with the
            part's end.
    """
    integers, scales, zeros = _READERS[packing.method](packing, parts, shape)
    if not bool(scales.isfinite().all()):
        raise Unquantizable(f"{_scales_end(packing)}: a scale is not finite")
    if packing.bits == 8:
        if zeros is not None and not bool((zeros == 128).all()):
            raise Unquantizable(f"{_zeros_end(packing)}: zeros other than 128 are not supported with 8 bits")
        _order(packing, parts, shape[1])
        # 0 to 255 less 128
        return Int8Weight(integers.bitwise_xor(128).view(torch.int8), scales[:, 0].float())
    group, halves = packing.group or row_group(shape[1]), scales.half()
    if not torch.equal(halves.float(), scales.float()):
        raise Unquantizable(f"{_scales_end(packing)}: a scale is no float16")
    steps = torch.full_like(halves, -8.0) if zeros is None else -zeros.half()
    if not packing.group:
        count = -(-shape[1] // group)
        halves, steps = halves.expand(-1, count).contiguous(), steps.expand(-1, count).contiguous()
    order = _order(packing, parts, shape[1])
    if order is not None:
        integers = integers[:, order]
    return Int4Weight(integers.contiguous(), halves, steps, group, in_steps=True, order=order)


def outline(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Int4Weight | Int8Weight:
    """The same without values, of tensors of the meta device; `parts` need only hold the order of inputs, if any."""
    out, inputs = shape

    def nothing(*size: int) -> Tensor:
        return torch.empty(size, device="meta")

    if packing.bits == 8:
        return Int8Weight(nothing(out, inputs), nothing(out))
    group = packing.group or row_group(inputs)
    groups = -(-inputs // group)
    order = _order(packing, parts, inputs)
    return Int4Weight(
        nothing(out, inputs), nothing(out, groups), nothing(out, groups), group, in_steps=True, order=order
    )


def row_group(in_features: int) -> int:
    """The groups that a row with one scale is cut into: the largest that divide it, as GPUs want."""
    return next((size for size in reversed(GROUPS) if in_features % size == 0), _LARGEST_GROUP)


def _gptq(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    words = parts[".qzeros"]
    if packing.less_one:
        # a whole word at a time, as the writers take it off: a zero of 0 borrows from its neighbour
        words = words + (0x11111111 if packing.bits == 4 else 0x01010101)
    integers = _fields(parts[".qweight"], packing.bits).permute(1, 0, 2).reshape(shape)
    return integers, parts[".scales"].T.contiguous(), _fields(words, packing.bits).flatten(1).T.contiguous()


def _awq(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    integers, zeros = (
        _fields(parts[end], 4)[:, :, _AWQ_NIBBLES].flatten(1).T.contiguous() for end in (".qweight", ".qzeros")
    )
    return integers, parts[".scales"].T.contiguous(), zeros


def _compressed(
    packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    if tuple(parts[".weight_shape"].tolist()) != shape:
        raise Unquantizable(f".weight_shape: {parts['.weight_shape'].tolist()} should be {list(shape)}")
    integers = _fields(parts[".weight_packed"], packing.bits).flatten(1)[:, : shape[1]]
    zeros = None
    if ".weight_zero_point" in parts:
        # packed along the outputs
        zeros = _fields(parts[".weight_zero_point"], packing.bits).permute(0, 2, 1).flatten(0, 1)[: shape[0]]
        if packing.symmetric and not bool((zeros == 1 << (packing.bits - 1)).all()):
            raise Unquantizable(".weight_zero_point: not the middle, where `symmetric` says so")
    return integers.contiguous(), parts[".weight_scale"], zeros


_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}


def _fields(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 → [rows, n, 32 / bits] uint8, lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=3).flatten(2)


def _order(packing: Packing, parts: Mapping[str, Tensor], in_features: int) -> Tensor | None:
    """[in] int64: which input the integers of a column are of, groups one after the other; None for as they come."""
    end = next((end for end in (".g_idx", ".weight_g_idx") if end in parts), "")
    if not end:
        return None
    group_of = parts[end].long()
    if end == ".weight_g_idx" and bool((group_of == -1).all()):  # there, and of no meaning
        return None
    order = torch.argsort(group_of, stable=True)
    size = packing.group or in_features
    if not torch.equal(group_of[order], torch.arange(in_features) // size):
        raise Unquantizable(f"{end}: its groups are not of {size} inputs each")
    return None if torch.equal(order, torch.arange(in_features)) else order


def _scales_end(packing: Packing) -> str:
    return ".weight_scale" if packing.method == "compressed-tensors" else ".scales"


def _zeros_end(packing: Packing) -> str:
    return ".weight_zero_point" if packing.method == "compressed-tensors" else ".qzeros"
