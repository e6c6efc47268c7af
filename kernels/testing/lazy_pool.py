"""A pool larger than this machine's memory, of which only the touched pages exist."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # of Linux; the mmap module names it since Python 3.13


def lazy_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of `shape`. On the CPU they take memory page by page, when touched; on a GPU at once."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = 1
    for size in shape:
        count *= size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype).view(*shape)
