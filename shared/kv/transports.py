"""A worker's ways to its peers as one: mapped memory where both lie together, TCP elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from shared.contracts.parts import KvEnd
from shared.kv.handoff_sink import Pull
from shared.kv.transfer import UNREADABLE, PullResult, Transport
from shared.kv.transfer_path import NO_PATH, ONLY_SHARED_MEMORY, ONLY_TCP, TCP, transfer_path


class Transports:
    """Each pull goes by the way that `transfer_path` tells. See `shared.kv.transfer.Transport`."""

    def __init__(self, own: KvEnd, mapped: Transport, tcp: Transport) -> None:
        self.path = mapped.path
        self._own = own
        self._mapped = mapped
        self._tcp = tcp

    def pull(self, pull: Pull, tables: Sequence[Sequence[int]], source_blocks: tuple[int, ...]) -> PullResult:
        """See `Transport.pull`. A pool that lies where ours does and still cannot be mapped is read over TCP."""
        way = transfer_path(self._own, pull.kv)
        if way == TCP:
            return self._tcp.pull(pull, tables, source_blocks)
        if way == NO_PATH:
            return PullResult(error=f"{UNREADABLE}: {pull.source} lies elsewhere and serves us nothing over TCP")
        result = self._mapped.pull(pull, tables, source_blocks)
        if not result.error.startswith(UNREADABLE) or self._own.transfer == ONLY_SHARED_MEMORY:
            return result
        served = transfer_path(structs.replace(self._own, transfer=ONLY_TCP), pull.kv) == TCP
        return self._tcp.pull(pull, tables, source_blocks) if served else result

    def drop_dead(self) -> None:
        """See `Transport.drop_dead`."""
        self._mapped.drop_dead()
        self._tcp.drop_dead()

    def close(self) -> None:
        self._mapped.close()
        self._tcp.close()
