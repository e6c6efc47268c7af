"""A KV pool as a file: one owner that writes, peers that map it read-only, and nobody's leavings.

The file is made under a temporary name, locked, allocated, and only then renamed to `<worker_id>.kvpool`. Its owner
holds a flock on it for life, so an unlocked pool file has no owner: whoever finds one overwrites it and removes it.
Knows bytes and spans; knows nothing about which blocks are in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shared.contracts.errors import Internal, SettingsError, Unavailable
from shared.contracts.ids import WorkerId, is_id
from shared.kv.layout import LayerGroup, PoolLayout

SUFFIX = ".kvpool"
_TEMP_PREFIX = ".tmp-"
_WIPE_BYTES = 1 << 20


class PoolMap:
    """A mapped pool file: spans of bytes. Use `create_pool` or `open_readonly`."""

    def __init__(self, path: Path, layout: PoolLayout, fd: int, access: int) -> None:
        self.path = path
        self.layout = layout
        self._fd = fd
        self._map = mmap.mmap(fd, layout.total_bytes, access=access)
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = memoryview(self._map)

    def span(self, group: int, block_id: int) -> memoryview:
        """One block's bytes. Raises IndexError outside the pool."""
        offset = self.layout.block_offset(group, block_id)
        return self._bytes[offset : offset + self.layout.groups[group].span_bytes]

    def close(self) -> None:
        """Unmap and let go of the lock. Idempotent. Views handed out earlier keep their memory alive, not the file."""
        if self._fd < 0:
            return
        self._bytes.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Pool(PoolMap):
    """The owner's pool: writable, locked, unlinked by `close`."""

    def views(self) -> tuple[Tensor, ...]:
        """Per group a contiguous tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return tuple(self._view(i, group) for i, group in enumerate(self.layout.groups))

    def zero_blocks(self, group: int, ids: Iterable[int]) -> None:
        """Overwrite blocks with zeros: what a purge does."""
        zeros = bytes(self.layout.groups[group].span_bytes)
        for block_id in ids:
            self.span(group, block_id)[:] = zeros

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        super().close()

    def _view(self, index: int, group: LayerGroup) -> Tensor:
        num_blocks = self.layout.num_blocks[index]
        shape = (num_blocks, len(group.layers), 2, group.num_kv_heads, group.block_size, group.head_dim)
        flat = torch.frombuffer(
            memoryview(self._map),  # kept by the tensor: the mapping cannot go before it
            dtype=getattr(torch, group.dtype),
            count=num_blocks * group.span_bytes // getattr(torch, group.dtype).itemsize,
            offset=self.layout.group_offset(index),
        )
        return flat.view(shape)


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
    temporary = folder / f"{_TEMP_PREFIX}{secrets.token_hex(8)}{SUFFIX}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise SettingsError(f"cannot make a KV pool in {folder}: {exc.strerror}", param="kv_dir") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _allocate(fd, folder, layout.total_bytes)
        pool = Pool(folder / f"{worker_id}{SUFFIX}", layout, fd, mmap.ACCESS_WRITE)
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


def open_readonly(path: Path, layout: PoolLayout) -> PoolMap:
    """Map a peer's pool for reading.

    Raises:
        Unavailable: the file is gone, or is not of this layout.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise Unavailable(f"the KV pool {path.name} cannot be opened: {exc.strerror}") from exc
    try:
        size = os.fstat(fd).st_size
        if size != layout.total_bytes:
            raise Unavailable(f"the KV pool {path.name} has {size} bytes, its layout says {layout.total_bytes}")
        return PoolMap(path, layout, fd, mmap.ACCESS_READ)
    except BaseException:
        os.close(fd)
        raise


def has_owner(path: Path) -> bool:
    """True while the process that made this pool file lives: its lock is held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # shared, so that two observers never take one another for an owner
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def sweep(folder: Path) -> list[Path]:
    """Overwrite and remove every pool file in `folder` that has no owner. Returns the paths removed."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _remove_unowned(path)]


def _remove_unowned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 0:
            return False
        _wipe(fd)
        path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def _wipe(fd: int) -> None:
    size = os.fstat(fd).st_size
    zeros = bytes(_WIPE_BYTES)
    for offset in range(0, size, _WIPE_BYTES):
        os.pwrite(fd, zeros[: size - offset], offset)


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
