"""Linear layers in the library's packed form. The plain matrices are not kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.native.abi import BLOCK, PACK, LinearStruct
from kernels.native.arena import Arena, aligned
from kernels.native.library import NAMES, Team

HALF = BLOCK // 2


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [blocks, words of in_features, 32, elements of a word] and its bias, if it has one."""

    struct: LinearStruct
    weight: Tensor
    bias: Tensor | None  # [blocks * 32] float32


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype, gated: bool = False) -> int:
    """The bytes of an arena that `pack_linear` takes; with `gated`, `out_features` counts gates and ups both."""
    return aligned(_packed_count(out_features, in_features, dtype, gated) * dtype.itemsize)


def pack_linear(
    team: Team, arena: Arena, parts: Sequence[Tensor], biases: Sequence[Tensor], dtype: torch.dtype, gated: bool = False
) -> PackedLinear:
    """Pack matrices one under the other, read one by one.

    Args:
        parts: each [out_i, in_features], any float dtype. With `gated` two of one shape, gates and ups, which are
            laid in turns of 16, so that a block of 32 holds both halves of 16 results.
        biases: each [out_i], or none.
    """
    in_features = parts[0].shape[1]
    out_features = sum(part.shape[0] for part in parts)
    weight = arena.take(_packed_count(out_features, in_features, dtype, gated), dtype)
    blocks = _blocks(out_features, gated)
    bias = torch.zeros(blocks * BLOCK) if biases else None
    first = 0
    for i, part in enumerate(parts):
        assert part.ndim == 2 and part.shape[1] == in_features, (part.shape, in_features)  # noqa: PT018
        rows = part.shape[0]
        assert not gated or (len(parts) == 2 and rows * 2 == out_features), "gates and ups differ in size"
        begin, run, step = (i * HALF, HALF, BLOCK) if gated else (first, rows, rows)
        source = part.to(dtype).contiguous()
        team.call("baton_pack", dtype, source.data_ptr(), weight.data_ptr(), rows, in_features, begin, run, step)
        if bias is not None:
            row = torch.arange(rows)
            bias[begin + row // run * step + row % run] = biases[i].float()
        first += rows
    address = None if bias is None else bias.data_ptr()
    return PackedLinear(LinearStruct(weight.data_ptr(), address, in_features, out_features), weight, bias)


def linear(team: Team, x: Tensor, packed: PackedLinear, kind: int, y: Tensor) -> None:
    """One product into `y`, as `kind` of `kernels.native.abi` says: for tests and checks.

    Args:
        x: [rows, in_features], contiguous, of the packed dtype.
        y: [rows, out_features], or half as wide for gates; its dtype is the kind's.
    """
    assert x.is_contiguous(), x.shape
    assert x.shape[1] == packed.struct.in_features, (x.shape, packed.struct.in_features)
    assert NAMES[x.dtype] == NAMES[packed.weight.dtype]
    assert y.is_contiguous() and len(y) == len(x), (x.shape, y.shape)  # noqa: PT018
    reference = ctypes.byref(packed.struct)
    team.call("baton_linear", x.dtype, reference, x.data_ptr(), y.data_ptr(), len(x), x.shape[1], y.shape[1], kind)


def _blocks(out_features: int, gated: bool) -> int:
    return -(-(out_features // 2) // HALF) if gated else -(-out_features // BLOCK)


def _packed_count(out_features: int, in_features: int, dtype: torch.dtype, gated: bool) -> int:
    pack = PACK[NAMES[dtype]]
    return _blocks(out_features, gated) * BLOCK * -(-in_features // pack) * pack
