"""One block of memory that all packed weights of a model lie in: zero at first, in huge pages where there are some."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_ALIGNED = 4096


class Arena:
    """`size` bytes, given out piece by piece. Tensors keep it alive."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] zeros."""
        tensor = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self.used)
        self.used += aligned(count * dtype.itemsize)
        return tensor


def aligned(size: int) -> int:
    """The bytes of an arena that a piece of `size` bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED
