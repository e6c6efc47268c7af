"""Shapes the attention kernels are compiled in. None of them enters a result: see README.md.

Chosen on an H200; `python -m kernels.bench attention --tune` measures the alternatives.
"""

from __future__ import annotations

import functools

import torch

from kernels.attention.triton_plan import NARROW, WIDE

HEAD_DIMS = (64, 80, 96, 128, 256)
_INTERPRETED_PROGRAMS = 8
_SHARED_BYTES = {8: 163 * 1024, 9: 227 * 1024}  # of a block, by the major number of the compute capability


def padded(head_dim: int) -> int:
    """The power of two a row of `head_dim` is held in."""
    return 1 << (head_dim - 1).bit_length()


def wide_rows(head_dim: int) -> int:
    """Query rows of an item of prefill: two accumulators of that many rows must fit the registers."""
    return WIDE if padded(head_dim) <= 128 else NARROW


def warps(head_dim: int, rows: int) -> int:
    """Warps of a program. For one head_dim a warp always has 16 whole rows, or always half of them: sums over keys
    then run in one order in every kernel."""
    return 8 if rows == WIDE or padded(head_dim) > 128 else 4


def stages(head_dim: int, rows: int, item_bytes: int, device: torch.device) -> int:
    """Key tiles in flight, as many as help and fit beside the query rows."""
    return stages_of(head_dim, rows, item_bytes, _capability(device)[0])


def stages_of(head_dim: int, rows: int, item_bytes: int, major: int) -> int:
    """As `stages`, for a compute capability's major number."""
    room = _SHARED_BYTES.get(major, _SHARED_BYTES[8]) - rows * padded(head_dim) * item_bytes
    return max(1, min(3, room // (2 * 64 * padded(head_dim) * item_bytes)))


def join_shape(num_q_heads: int, device: torch.device) -> tuple[int, int]:
    """Query heads of a program that joins splits, and the splits it reads at a time."""
    return (1, 8) if device.type == "cuda" else (padded(num_q_heads), 1)


def programs(device: torch.device) -> int:
    """Items computed at a time."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return 2 * _multiprocessors(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
