"""Shapes the attention kernels are compiled in. None of them enters a result: see README.md.

Chosen on an H200 and by what the compiled kernels take (`python -m kernels.aot`): no kernel may spill registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.triton_plan import NARROW, WIDE
from kernels.chip import capability, interpreted, multiprocessors, shared_bytes

HEAD_DIMS = (64, 80, 96, 128, 256)
_MOST_STAGES = 3
_INTERPRETED_PROGRAMS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """How a head_dim is computed. A warp has 16 whole rows of scores in both kernels, or half of 16 in both: sums over
    keys then run in one order."""

    split_warps: int
    wide_rows: int  # query rows of an item of prefill; 0: prefill too goes by splits
    wide_warps: int


def padded(head_dim: int) -> int:
    """The power of two a row of `head_dim` is held in."""
    return 1 << (head_dim - 1).bit_length()


def shape(head_dim: int, quantized: bool, device: torch.device) -> Shape:
    """Two accumulators of a wide item must fit the registers beside all else."""
    width = padded(head_dim)
    if width > 128:
        return Shape(8, 0, 0)
    if width > 64 and quantized:
        return Shape(4, 0, 0)
    if width > 64 and capability(device)[0] < 9:
        return Shape(8, NARROW, 8)
    return Shape(4, WIDE, 8)


def stages(head_dim: int, rows: int, item_bytes: int, device: torch.device) -> int:
    """Key tiles in flight, as many as help and fit beside the query rows."""
    room = shared_bytes(device) - rows * padded(head_dim) * item_bytes
    return max(1, min(_MOST_STAGES, room // (2 * 64 * padded(head_dim) * item_bytes)))


def join_shape(num_q_heads: int, most_splits: int, device: torch.device) -> tuple[int, int, int]:
    """Query heads of a program that joins splits, the splits it reads at a time, and its warps."""
    if interpreted(device):
        return padded(num_q_heads), 1, 1
    return (1, 8, 1) if most_splits > 4 else (1, 4, 1)


def programs(device: torch.device) -> int:
    """Items computed at a time."""
    return 2 * multiprocessors(device) if device.type == "cuda" else _INTERPRETED_PROGRAMS
