"""One block of memory that all packed weights of a model lie in, in huge pages where there are some.

Who lays weights out takes piece after piece, the same ones in the same order each time, and writes them unless the
arena is `filled`. So one function serves for the sizes (`Arena.plan`), for packing (`Arena`), and for finding what was
packed before (`Arena.over`).
"""

from __future__ import annotations

import contextlib
import mmap
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 4096
_MOST = 0.8
_POPULATE_READ, _COLLAPSE = 22, 25
"""MADV_POPULATE_READ and MADV_COLLAPSE, which Python 3.11 has no names for."""


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

    def copied(self, size: int) -> Arena:
        """The first `size` bytes in memory of this process's own, filled."""
        copy = Arena(size)
        copy._bytes(size).copy_(self._bytes(size))
        return copy.again()

    def is_huge(self, size: int) -> bool:
        """Whether the first `size` bytes lie in huge pages, those brought in first that are not in memory."""
        start = self._bytes(size).data_ptr()
        with contextlib.suppress(OSError):
            self._advise(_POPULATE_READ, size)
        if _huge_share(start) < _MOST:
            with contextlib.suppress(OSError):
                self._advise(_COLLAPSE, size)
        return _huge_share(start) >= _MOST

    def _advise(self, advice: int, size: int) -> None:
        assert self._map is not None, "a plan has no contents"
        self._map.madvise(advice, 0, self._begin + size)

    def _bytes(self, size: int) -> Tensor:
        assert self._map is not None, "a plan has no contents"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that memory mapped to be read cannot be written
            return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=self._begin)

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


def _huge_share(address: int) -> float:
    """Of the memory that is there of the mapping around an address; 1 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 1.0
    inside, sizes = False, {"Rss": 0, "AnonHugePages": 0, "FilePmdMapped": 0, "ShmemPmdMapped": 0}
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and name[:-1] in sizes:
            sizes[name[:-1]] += int(rest.split()[0])
    resident = sizes.pop("Rss")
    return sum(sizes.values()) / resident if resident else 0.0


def aligned(size: int) -> int:
    """The bytes of an arena that a piece of `size` bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED
