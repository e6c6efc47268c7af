"""A KV pool as a file: one owner that writes, peers that map it read-only, and nobody's leavings.

The file is made under a temporary name, locked, allocated, and only then renamed to `<worker_id>.kvpool`. Its owner
holds a flock on it for life, so an unlocked pool file has no owner: whoever finds one overwrites it and removes it.
Knows bytes and spans; knows nothing about which blocks are in use.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shared.contracts.errors import Internal, SettingsError
from shared.contracts.ids import WorkerId, is_id
from shared.kv.huge_pages import HugeMapping
from shared.kv.layout import PoolLayout
from shared.kv.pool_file import SUFFIX, make_locked


class Pool:
    """The owner's pool: mapped, writable, locked, unlinked by `close`. Made by `create_pool`."""

    def __init__(self, path: Path, layout: PoolLayout, fd: int) -> None:
        self.path = path
        self.layout = layout
        self._fd = fd
        self._map = HugeMapping(fd, layout.total_bytes)
        self.huge_bytes = self._map.collapse()  # of the pool, in huge pages: a kernel that has none gives 0
        self._bytes = self._map.view()

    def span(self, group: int, block_id: int) -> memoryview:
        """One block's bytes. Raises IndexError outside the pool."""
        offset = self.layout.block_offset(group, block_id)
        return self._bytes[offset : offset + self.layout.groups[group].span_bytes]

    def views(self) -> tuple[Tensor, ...]:
        """Per group a tensor [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: contiguous, but that a
        block of 8-bit integers has its scales behind it."""
        data = torch.frombuffer(self._map.view(), dtype=torch.uint8)  # kept by the tensors: the mapping goes last
        return pool_views(data, self.layout)

    def zero_blocks(self, group: int, ids: Iterable[int]) -> None:
        """Overwrite blocks with zeros: what a purge does."""
        zeros = bytes(self.layout.groups[group].span_bytes)
        for block_id in ids:
            self.span(group, block_id)[:] = zeros

    def close(self) -> None:
        """Unlink, unmap and let go of the lock. Idempotent. Views handed out earlier keep their memory alive, not the
        file."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._bytes.release()
        self._map.close()
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def pool_views(data: Tensor, layout: PoolLayout) -> tuple[Tensor, ...]:
    """Per group the blocks of a pool's bytes, as `Pool.views`. `data`: [layout.total_bytes] uint8."""
    views = []
    for i, (group, num_blocks) in enumerate(zip(layout.groups, layout.num_blocks, strict=True)):
        first = layout.group_offset(i)
        spans = data[first : first + num_blocks * group.span_bytes].view(num_blocks, group.span_bytes)
        shape = (num_blocks, len(group.layers), 2, group.num_kv_heads, group.block_size, group.head_dim)
        views.append(spans[:, : group.tiles_bytes].view(getattr(torch, group.dtype)).view(shape))
    return tuple(views)


def create_pool(folder: Path, worker_id: WorkerId, layout: PoolLayout) -> Pool:
    """Make, lock, allocate, map and publish `<folder>/<worker_id>.kvpool`.

    The folder is made with mode 0700 if it is missing. All bytes are allocated before this returns.

    Raises:
        SettingsError: the folder cannot be used, or has no room for the pool.
    """
    if not is_id(worker_id):
        raise Internal(f"worker id {worker_id!r} cannot name a pool file")
    if any(n < 1 for n in layout.num_blocks):
        raise SettingsError("the KV pool needs at least one block in every layer group", param="kv_dir")
    fd, temporary = make_locked(folder)
    try:
        _allocate(fd, folder, layout.total_bytes)
        pool = Pool(folder / f"{worker_id}{SUFFIX}", layout, fd)
        temporary.rename(pool.path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        with contextlib.suppress(OSError):
            os.close(fd)
        if isinstance(exc, OSError):
            raise SettingsError(f"cannot make a KV pool in {folder}: {exc.strerror}", param="kv_dir") from exc
        raise
    return pool


def _allocate(fd: int, folder: Path, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        stat = os.statvfs(folder)
        free = stat.f_bavail * stat.f_frsize
        raise SettingsError(
            f"the KV pool needs {size} bytes but {folder} has {free} free: enlarge it or lower the pool size",
            param="kv_dir",
        ) from exc
