"""Linear layers in the library's packed form. The plain matrices are not kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear.quantize import (
    INT8,
    NONE,
    Int4Weight,
    Int8Weight,
    Matrix,
    Quant,
    floats_of,
    kept_as,
    order_of,
    to_int4,
    to_int8,
)
from kernels.native.abi import (
    BLOCK,
    FORMAT_ELEMENTS,
    FORMAT_INT4,
    FORMAT_INT4_STEPS,
    FORMAT_INT8,
    PACK,
    LinearStruct,
)
from kernels.native.arena import Arena
from kernels.native.library import NAMES, Team

HALF = BLOCK // 2
MOST_NORM = 1e15
"""Of an output: a larger one's sums could pass float32."""
_ROWS_AT_ONCE = 4096
"""Rows quantized together: bounds the memory it takes."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [blocks, words of in_features, 32, elements of a word], or integers, with what belongs to it."""

    struct: LinearStruct
    dtype: torch.dtype  # of the rows it is multiplied with
    weight: Tensor
    bias: Tensor | None  # [blocks * 32] float32
    scales: Tensor | None  # int8: [blocks * 32] float32; int4: [blocks, groups, scale and minimum, 32] float16
    order: Tensor | None = None  # of integers: [in_features] int32, see `Int4Weight`


@dataclass(frozen=True, slots=True)
class QuickHead:
    """A head's weights as 8-bit integers, and what bounds their error.

    `norms` is [blocks of 32, 2, 32] float32: of every output the norm of its integers' values, and of how they differ
    from its weights.
    """

    linear: PackedLinear
    norms: Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rows of a part go: row i becomes packed output `begin` + i // run * step + i % run."""

    begin: int
    run: int
    step: int

    def outputs(self, first: int, count: int) -> Tensor:
        row = torch.arange(first, first + count)
        return self.begin + row // self.run * self.step + row % self.run


def packed_bytes(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool = False,
    biased: bool = False,
    quant: Quant = NONE,
) -> int:
    """The bytes of an arena that `pack_linear` takes; with `gated`, `out_features` counts gates and ups both."""
    arena = Arena.plan()
    _take(arena, out_features, in_features, dtype, gated, biased, quant)
    return arena.used


def pack_linear(
    team: Team,
    arena: Arena,
    parts: Sequence[Matrix],
    biases: Sequence[Tensor],
    dtype: torch.dtype,
    gated: bool = False,
    quant: Quant = NONE,
) -> PackedLinear:
    """Pack matrices one under the other, read one by one.

    Args:
        parts: each [out_i, in_features], any float dtype; integers of a form that `quant` is, are taken as they are.
            With `gated` two of one shape, gates and ups, which are laid in turns of 16, so that a block of 32 holds
            both halves of 16 results.
        biases: each [out_i], or none.
        dtype: of the rows that will be multiplied, and without `quant` of the weight.

    All the memory is the arena's; where that is filled already, only shapes are looked at.

    Raises:
        Unquantizable: a weight has no such integers.
    """
    in_features = parts[0].shape[1]
    out_features = sum(part.shape[0] for part in parts)
    order = order_of(parts[0]) if quant.as_kept else None
    quant = kept_as(parts) if quant.as_kept else quant
    packed = _take(arena, out_features, in_features, dtype, gated, bool(biases), quant, ordered=order is not None)
    if packed.order is not None and order is not None and not arena.filled:
        packed.order.copy_(order)
    first = 0
    for i, part in enumerate(parts):
        assert len(part.shape) == 2 and part.shape[1] == in_features, (part.shape, in_features)  # noqa: PT018
        rows = part.shape[0]
        assert not gated or (len(parts) == 2 and rows * 2 == out_features), "gates and ups differ in size"
        place = _Place(i * HALF, HALF, BLOCK) if gated else _Place(first, rows, rows)
        if not arena.filled:
            _fill(team, packed, part, place, quant)
            if packed.bias is not None:
                packed.bias[place.outputs(0, rows)] = biases[i].float()
        first += rows
    return packed


def pack_quick_head(team: Team, arena: Arena, head: Tensor, dtype: torch.dtype) -> QuickHead:
    """A head as 8-bit integers beside its own elements, and the norms by block that bound their error.

    Args:
        head: [vocab, hidden], any float dtype.

    An output that is not finite, or larger than MOST_NORM, has norms without bound: it is never left out.
    """
    vocab = head.shape[0]
    real = head
    if not arena.filled and not bool(head.isfinite().all()):
        head = torch.where(head.isfinite(), head, 0.0)
    packed = pack_linear(team, arena, [head], [], dtype, quant=INT8)
    norms = arena.take(_blocks(vocab, gated=False) * 2 * BLOCK, torch.float32).view(-1, 2, BLOCK)
    if not arena.filled:
        for first in range(0, vocab, _ROWS_AT_ONCE):
            span = slice(first, first + _ROWS_AT_ONCE)
            values, weights = to_int8(head[span]).floats().double(), real[span].to(dtype).double()
            each = torch.stack((values.norm(dim=1), (weights - values).norm(dim=1)), dim=1)
            each.masked_fill_(~(each < MOST_NORM), float("inf"))
            each = F.pad(each, (0, 0, 0, -len(each) % BLOCK)).view(-1, BLOCK, 2).transpose(1, 2)
            norms[first // BLOCK : first // BLOCK + len(each)] = each * 1.0001
    return QuickHead(packed, norms)


def _take(
    arena: Arena,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    gated: bool,
    biased: bool,
    quant: Quant,
    ordered: bool = False,
) -> PackedLinear:
    blocks = _blocks(out_features, gated)
    if quant.bits:
        groups = -(-in_features // quant.group)
        weight = arena.take(blocks * BLOCK * groups * quant.group * quant.bits // 8, torch.uint8)
        kind, count = (torch.float32, 1) if quant.bits == 8 else (torch.float16, 2 * groups)
        scales = arena.take(blocks * BLOCK * count, kind)
    else:
        pack = PACK[NAMES[dtype]]
        weight, scales = arena.take(blocks * BLOCK * -(-in_features // pack) * pack, dtype), None
    bias = arena.take(blocks * BLOCK, torch.float32) if biased else None
    order = arena.take(in_features, torch.int32) if ordered else None
    at = [None if tensor is None else tensor.data_ptr() for tensor in (weight, bias, scales, order)]
    struct = LinearStruct(*at[:2], in_features, out_features, at[2], _format(quant), quant.group, at[3])
    return PackedLinear(struct, dtype, weight, bias, scales, order)


def _format(quant: Quant) -> int:
    if quant.bits == 4:
        return FORMAT_INT4_STEPS if quant.in_steps else FORMAT_INT4
    return FORMAT_INT8 if quant.bits else FORMAT_ELEMENTS


def _fill(team: Team, packed: PackedLinear, part: Matrix, place: _Place, quant: Quant) -> None:
    rows, in_features = part.shape
    to = packed.weight.data_ptr()
    if not quant.bits:
        source = floats_of(part).to(packed.dtype).contiguous()
        places = place.begin, place.run, place.step
        team.call("baton_pack", packed.dtype, source.data_ptr(), to, rows, in_features, *places)
        return
    for first in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - first)
        whole = _quantized(part[first : first + count], quant, packed.order is not None)
        outputs = place.outputs(first, count)
        integers = whole.integers.to(torch.int16).add_(128 if quant.bits == 8 else 0).to(torch.uint8).contiguous()
        places = int(outputs[0]), min(place.run, count), place.step
        form = _format(quant), quant.group
        team.call("baton_pack_integers", packed.dtype, integers.data_ptr(), to, count, in_features, *places, *form)
        assert packed.scales is not None
        if isinstance(whole, Int8Weight):
            packed.scales[outputs] = whole.scales
        else:
            pairs = packed.scales.view(-1, whole.scales.shape[1], 2, BLOCK)
            pairs[outputs // BLOCK, :, 0, outputs % BLOCK] = whole.scales
            pairs[outputs // BLOCK, :, 1, outputs % BLOCK] = whole.minima


def _quantized(part: Matrix, quant: Quant, ordered: bool) -> Int8Weight | Int4Weight:
    if not isinstance(part, Tensor):
        form = kept_as([part])
        same = (form.bits, form.group, form.in_steps) == (quant.bits, quant.group, quant.in_steps)
        if same and ordered == (order_of(part) is not None):
            return part
        part = part.floats()
    return to_int8(part) if quant.bits == 8 else to_int4(part, quant.group)


def linear(team: Team, x: Tensor, packed: PackedLinear, kind: int, y: Tensor) -> None:
    """One product into `y`, as `kind` of `kernels.native.abi` says: for tests and checks.

    Args:
        x: [rows, in_features], contiguous, of the packed dtype.
        y: [rows, out_features], or half as wide for gates; its dtype is the kind's.
    """
    assert x.is_contiguous(), x.shape
    assert x.shape[1] == packed.struct.in_features, (x.shape, packed.struct.in_features)
    assert x.dtype == packed.dtype, (x.dtype, packed.dtype)
    assert y.is_contiguous() and len(y) == len(x), (x.shape, y.shape)  # noqa: PT018
    reference = ctypes.byref(packed.struct)
    team.call("baton_linear", x.dtype, reference, x.data_ptr(), y.data_ptr(), len(x), x.shape[1], y.shape[1], kind)


def _blocks(out_features: int, gated: bool) -> int:
    return -(-(out_features // 2) // HALF) if gated else -(-out_features // BLOCK)
