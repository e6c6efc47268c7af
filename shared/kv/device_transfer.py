"""Pulling KV from another process on the same GPU: copied within its memory, and digested there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.contracts.errors import Unavailable
from shared.contracts.ids import Incarnation, WorkerId
from shared.kv.device_memory import DeviceMemory, map_peer
from shared.kv.device_pool import DevicePool, device_uuid, read_handle
from shared.kv.device_spans import pull_blocks
from shared.kv.handoff_sink import Pull
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.transfer import UNREADABLE, PullResult, open_plain, owner_lives


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's pool, mapped; it is only read."""

    name: str
    incarnation: Incarnation
    layout: PoolLayout
    memory: DeviceMemory


class DeviceTransport:
    """Workers of one GPU read each other's pools by CUDA IPC. See `shared.kv.transfer.Transport`."""

    path = "cuda_ipc"

    def __init__(self, folder: Path, groups: tuple[LayerGroup, ...], pool: DevicePool, device: torch.device) -> None:
        self._folder = folder
        self._groups = groups
        self._pool = pool
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._peers: dict[WorkerId, _Peer] = {}

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        """See `Transport.pull`. `source_blocks` is not needed: the pool's file says it."""
        try:
            peer = self._peer(pull)
        except Unavailable as exc:
            return PullResult(error=f"{UNREADABLE}: {exc.message}", path=self.path)
        layout = self._pool.layout
        with torch.cuda.stream(self._stream), torch.inference_mode():
            arrived = pull_blocks(peer.memory.tensor(), peer.layout, self._pool.bytes, layout, pull.items, tables)
            blocks = [
                (item.group, tables[item.group][item.position], item.block.generation, item.position)
                for item in arrived
            ]
            found = dict(zip(arrived, self._pool.digests(pull.attempt, blocks), strict=True))
        bad = tuple((item.group, item.position) for item in pull.items if found.get(item) != item.block.digest)
        return PullResult(bad, sum(layout.groups[item.group].span_bytes for item in arrived), path=self.path)

    def drop_dead(self) -> None:
        """See `Transport.drop_dead`."""
        for worker, peer in list(self._peers.items()):
            if not owner_lives(self._folder, peer.name):
                peer.memory.close()
                del self._peers[worker]

    def close(self) -> None:
        for peer in self._peers.values():
            peer.memory.close()
        self._peers.clear()

    def _peer(self, pull: Pull) -> _Peer:
        """The peer's pool, mapped once per incarnation."""
        known = self._peers.get(pull.source)
        if known is not None and known.incarnation == pull.source_incarnation:
            return known
        if known is not None:
            known.memory.close()
            del self._peers[pull.source]
        fd = open_plain(self._folder, pull.pool)
        try:
            handle = read_handle(fd, pull.pool)
        finally:
            os.close(fd)
        layout = PoolLayout(self._groups, handle.num_blocks)
        if len(handle.num_blocks) != len(self._groups) or layout.total_bytes != handle.total_bytes:
            raise Unavailable(f"the KV pool {pull.pool} does not hold blocks like ours")
        if handle.device_uuid != device_uuid(self._device):
            raise Unavailable(f"the KV pool {pull.pool} lies on another GPU")
        memory = map_peer(handle.ipc_handle, handle.total_bytes, self._device)
        peer = self._peers[pull.source] = _Peer(pull.pool, pull.source_incarnation, layout, memory)
        return peer
