"""A KV pool in a GPU's memory, announced by a small file like any other pool's.

The file `<worker_id>.kvpool` says how the pool's memory is mapped by another process on the machine; its owner holds a
lock on it for life, as with pools in files. The memory is one allocation outside torch's allocator, and goes with its
owner. Knows bytes and spans; knows nothing about which blocks are in use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from shared.contracts.attempt import Attempt
from shared.contracts.errors import Internal, SettingsError, Unavailable
from shared.contracts.ids import WorkerId, is_id
from shared.kv.device_memory import HANDLE_BYTES, DeviceMemory, allocate
from shared.kv.device_spans import KvView, device_views, digests_of, span_of
from shared.kv.layout import PoolLayout
from shared.kv.pool_file import SUFFIX, make_locked

MAX_FILE_BYTES = 4096


class PoolHandle(msgspec.Struct, frozen=True):
    """What a pool's file says: by what its memory is mapped, how large it is, and on which GPU it lies."""

    ipc_handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    total_bytes: int
    device_uuid: str
    num_blocks: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]  # per layer group


class DevicePool:
    """The owner's pool. Made by `create_device_pool`."""

    def __init__(self, path: Path, layout: PoolLayout, memory: DeviceMemory, fd: int) -> None:
        self.path = path
        self.layout = layout
        self._memory = memory
        self._fd = fd
        self.bytes = memory.tensor()  # [layout.total_bytes] uint8

    def tensor(self, group: int, block_id: int) -> Tensor:
        """One block's bytes on the device: [span_bytes] uint8. Raises IndexError outside the pool."""
        return span_of(self.bytes, self.layout, group, block_id)

    def span(self, group: int, block_id: int) -> memoryview:
        """A copy of one block's bytes on the host. Raises IndexError outside the pool."""
        return memoryview(self.tensor(group, block_id).cpu().numpy())  # type: ignore[arg-type]

    def digests(self, attempt: Attempt, blocks: Sequence[tuple[int, int, int, int]]) -> list[bytes]:
        """Digests of final blocks, for a commit: `blocks` holds (group, block id, generation, position)."""
        return digests_of(self.bytes, self.layout, attempt, blocks)

    def views(self) -> tuple[KvView, ...]:
        """Per group what kernels read."""
        return device_views(self.bytes, self.layout)

    def close(self) -> None:
        """Remove the file, free the memory, let go of the lock. Idempotent. No view may be used afterwards."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self._memory.close()
        os.close(self._fd)
        self._fd = -1


def create_device_pool(folder: Path, worker_id: WorkerId, layout: PoolLayout, device: torch.device) -> DevicePool:
    """Allocate a pool on the device and publish `<folder>/<worker_id>.kvpool`.

    Raises:
        SettingsError: the folder cannot be used.
        OutOfDeviceMemory: the device has no room for the pool.
    """
    if not is_id(worker_id):
        raise Internal(f"worker id {worker_id!r} cannot name a pool file")
    if any(n < 1 for n in layout.num_blocks):
        raise SettingsError("the KV pool needs at least one block in every layer group", param="kv_dir")
    memory = allocate(layout.total_bytes, device)
    try:
        fd, temporary = make_locked(folder)
    except BaseException:
        memory.close()
        raise
    try:
        handle = PoolHandle(memory.handle(), layout.total_bytes, device_uuid(device), layout.num_blocks)
        os.write(fd, msgspec.msgpack.encode(handle))
        pool = DevicePool(folder / f"{worker_id}{SUFFIX}", layout, memory, fd)
        temporary.rename(pool.path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        os.close(fd)
        memory.close()
        if isinstance(exc, OSError):
            raise SettingsError(f"cannot make a KV pool in {folder}: {exc.strerror}", param="kv_dir") from exc
        raise
    return pool


def read_handle(fd: int, name: str) -> PoolHandle:
    """What an open pool file says. Raises Unavailable when it is not a device pool's."""
    try:
        return msgspec.msgpack.decode(os.pread(fd, MAX_FILE_BYTES, 0), type=PoolHandle)
    except (msgspec.DecodeError, OSError) as exc:
        raise Unavailable(f"the KV pool {name} is not one in GPU memory") from exc


def device_uuid(device: torch.device) -> str:
    """The GPU's own name: processes may number GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)
