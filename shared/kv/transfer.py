"""Pulling KV from a peer: where the bytes come from, where they go, and whether they arrived whole.

A pull is read-only at the source and checked at the destination, so a source that has moved on is a digest mismatch,
never a torn block. `SharedMemoryTransport` is the implementation for workers on one machine, `tcp_transport` the one
for others. Calls block: they belong in threads of their own, never on an event loop.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.tile_layouts import tokens_of_bytes
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unavailable
from shared.contracts.ids import Incarnation, WorkerId
from shared.kv.digest import span_digest
from shared.kv.handoff_sink import Pull
from shared.kv.layout import ITEM_BYTES, LayerGroup, PoolLayout
from shared.kv.transfer_path import SHARED_MEMORY

POOL_NAME = re.compile(r"[a-z0-9-]{1,40}\.kvpool")

UNREADABLE = "pool_unreadable"
"""The head of an error: the peer's pool cannot be mapped from here."""
OwnSpan = Callable[[int, int], memoryview]
"""(group, block id) → the writable bytes of one of our own blocks."""


@dataclass(frozen=True, slots=True)
class PullResult:
    """What came of a pull. `bad` names (group, position) whose digest differs; `error` is set when nothing was read."""

    bad: tuple[tuple[int, int], ...] = ()
    num_bytes: int = 0
    error: str = ""
    path: str = ""  # by which way, for traces


class Transport(Protocol):
    """A way to read a peer's blocks. Pulls from one peer are called one after the other."""

    path: str  # for traces: "shared_memory", ...

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        """Copy `pull.items` into our blocks `tables[group][position]`, zero the rest of a tail, digest what lies there.

        Args:
            pull: what to copy, and for which attempt it was digested.
            tables: our block ids per group, in position order.
            source_blocks: blocks per group of the source's pool; () when it is not known.
        """

    def drop_dead(self) -> None:
        """Let go of peers whose process is gone."""

    def close(self) -> None:
        """Let go of every peer."""


class PeerPool:
    """A peer's pool file, mapped for reading only."""

    def __init__(self, folder: Path, name: str, layout: PoolLayout) -> None:
        """Map `folder/name`, a pool of `layout`'s groups.

        Raises:
            Unavailable: no plain pool file of that name lies in the folder, or its size is not the layout's.
        """
        self.name = name
        self.layout = layout
        fd = open_plain(folder, name)
        try:
            size = os.fstat(fd).st_size
            if size != layout.total_bytes:
                raise Unavailable(f"the KV pool {name} has {size} bytes, its layout says {layout.total_bytes}")
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._bytes = memoryview(self._map)

    def span(self, group: int, block_id: int) -> memoryview:
        """One block's bytes. Raises IndexError outside the pool."""
        offset = self.layout.block_offset(group, block_id)
        return self._bytes[offset : offset + self.layout.groups[group].span_bytes]

    def close(self) -> None:
        self._bytes.release()
        self._map.close()


class SharedMemoryTransport:
    """Workers of one machine read each other's pool files in a folder they share."""

    path = SHARED_MEMORY

    def __init__(self, folder: Path, groups: tuple[LayerGroup, ...], own_span: OwnSpan) -> None:
        self._folder = folder
        self._groups = groups
        self._own_span = own_span
        self._peers: dict[WorkerId, tuple[Incarnation, PeerPool]] = {}

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        """See `Transport.pull`."""
        try:
            peer = self._peer(pull, source_blocks)
        except Unavailable as exc:
            return PullResult(error=f"{UNREADABLE}: {exc.message}", path=self.path)
        bad: list[tuple[int, int]] = []
        num_bytes = 0
        for item in pull.items:
            own = self._own_span(item.group, tables[item.group][item.position])
            try:
                own[:] = peer.span(item.group, item.block.block_id)
            except IndexError:
                bad.append((item.group, item.position))
                continue
            num_bytes += len(own)
            zero_rest(own, self._groups[item.group], item.valid_tokens)
            digest = span_digest(own, pull.attempt, item.group, item.block.generation, item.position)
            if digest != item.block.digest:
                bad.append((item.group, item.position))
        return PullResult(tuple(bad), num_bytes, path=self.path)

    def drop_dead(self) -> None:
        """See `Transport.drop_dead`: a mapping keeps a pool's memory although its file is gone, so the owner's
        successor might find no room."""
        for worker, (_, peer) in list(self._peers.items()):
            if not owner_lives(self._folder, peer.name):
                peer.close()
                del self._peers[worker]

    def close(self) -> None:
        for _, peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _peer(self, pull: Pull, source_blocks: tuple[int, ...]) -> PeerPool:
        """The peer's pool, mapped once per incarnation."""
        known = self._peers.get(pull.source)
        if known is not None and known[0] == pull.source_incarnation:
            return known[1]
        if known is not None:
            known[1].close()
            del self._peers[pull.source]
        num_blocks = source_blocks or _blocks_of_file(self._folder, pull.pool, self._groups)
        peer = PeerPool(self._folder, pull.pool, PoolLayout(self._groups, num_blocks))
        self._peers[pull.source] = (pull.source_incarnation, peer)
        return peer


def digest_blocks(own_span: OwnSpan, attempt: Attempt, blocks: Sequence[tuple[int, int, int, int]]) -> list[bytes]:
    """Digests of our own final blocks, for a commit: `blocks` holds (group, block id, generation, position)."""
    return [
        span_digest(own_span(group, block_id), attempt, group, generation, position)
        for group, block_id, generation, position in blocks
    ]


def zero_rest(span: memoryview, group: LayerGroup, valid_tokens: int) -> None:
    """Zero what a block holds behind its first `valid_tokens`: it is nobody's.

    Raises:
        ValueError: the tile layout is unknown.
    """
    if valid_tokens >= group.block_size:
        return
    tokens = _tokens_of_tiles(group)
    whole = np.frombuffer(span, dtype=np.uint8)
    tiles = whole[: group.tiles_bytes].reshape(-1, 2, group.num_kv_heads, tokens.shape[1])
    for kind in range(2):
        tiles[:, kind, :, tokens[kind] >= valid_tokens] = 0
    if group.scales_bytes:
        whole[group.tiles_bytes :].view(np.float32).reshape(-1, group.block_size)[:, valid_tokens:] = 0


def owner_lives(folder: Path, name: str) -> bool:
    """True while the process that made this pool file lives: it holds a lock on it, which its death releases."""
    try:
        fd = open_plain(folder, name)
    except Unavailable:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


@cache
def _tokens_of_tiles(group: LayerGroup) -> NDArray[np.int64]:
    """[2, bytes of a tile]: the token that each byte of keys, and of values, belongs to."""
    size = ITEM_BYTES[group.dtype]
    return np.array(tokens_of_bytes(group.tile_layout, group.block_size, group.head_dim, size, group.dtype))


def open_plain(folder: Path, name: str) -> int:
    """A file descriptor of a regular file directly in `folder`. The name came over the bus: no path, no link.

    Raises:
        Unavailable: there is no such file.
    """
    if POOL_NAME.fullmatch(name) is None:
        raise Unavailable(f"{name!r} is not the name of a KV pool")
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        raise Unavailable(f"the KV pool {name} cannot be opened: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Unavailable(f"the KV pool {name} is not a file")
    return fd


def _blocks_of_file(folder: Path, name: str, groups: tuple[LayerGroup, ...]) -> tuple[int, ...]:
    """Blocks of a pool whose owner has not told them yet: with one group the size says it."""
    if len(groups) != 1:
        raise Unavailable(f"the size of the KV pool {name} is not known yet")
    fd = open_plain(folder, name)
    try:
        return (os.fstat(fd).st_size // groups[0].span_bytes,)
    finally:
        os.close(fd)
