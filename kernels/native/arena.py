"""One block of memory that all packed weights of a model lie in, in huge pages where there are some.

Who lays weights out takes piece after piece, the same ones in the same order each time, and writes them unless the
arena is `filled`. So one function serves for the sizes (`Arena.plan`), for packing (`Arena`), and for finding what was
packed before (`Arena.over`).
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 4096


class Piece(NamedTuple):
    """Where a piece lies."""

    offset: int  # bytes from the arena's begin
    elements: int
    dtype: str


class Arena:
    """`size` bytes, zero at first, given out piece by piece. Tensors keep it alive.

    `filled`: what the pieces hold is there, or will never be: it is not to be written.
    """

    def __init__(self, size: int) -> None:
        self._map: mmap.mmap | None = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = 0
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.filled = False
        self.pieces: list[Piece] = []
        self.used = 0

    @classmethod
    def plan(cls) -> Arena:
        """No memory, only sizes: pieces are tensors of the meta device."""
        arena = cls(0)
        arena._map, arena.filled = None, True
        return arena

    @classmethod
    def over(cls, memory: mmap.mmap, begin: int) -> Arena:
        """Memory that was filled before, from byte `begin` of it on. Not to be written."""
        arena = cls(0)
        arena._map, arena._begin, arena.filled = memory, begin, True
        return arena

    def again(self) -> Arena:
        """The same memory, filled, from its first piece."""
        assert self._map is not None, "a plan has no contents"
        return Arena.over(self._map, self._begin)

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] zeros, or what was there before."""
        self.pieces.append(Piece(self.used, count, str(dtype).removeprefix("torch.")))
        offset = self._begin + self.used
        self.used += aligned(count * dtype.itemsize)
        if self._map is None:
            return torch.empty(count, dtype=dtype, device="meta")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that memory mapped to be read cannot be written
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def contents(self) -> memoryview:
        """The bytes of all pieces, those between them too."""
        assert self._map is not None, "a plan has no contents"
        return memoryview(self._map)[self._begin : self._begin + self.used]


def aligned(size: int) -> int:
    """The bytes of an arena that a piece of `size` bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED
