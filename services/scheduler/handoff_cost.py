"""What moving KV between two workers costs, by the way it goes and by how fast it went of late. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.contracts.ids import WorkerId
from shared.contracts.parts import KvEnd, KvLink
from shared.kv.transfer_path import NO_PATH, TCP, transfer_path


@dataclass(frozen=True, slots=True)
class HandoffCost:
    """Rates until a worker has measured its own, both digests included; bytes a second."""

    bandwidth_bytes_s: float = 2e9  # mapped memory; one core measured: 1.8e9 on first touch, then 5.4e9
    tcp_bytes_s: float = 5e8
    hop_s: float = 0.01  # messages, and the decode worker's wake-up

    def seconds(self, num_bytes: float, bytes_s: float) -> float:
        """Until so many bytes are there, hops included."""
        return self.hop_s + num_bytes / bytes_s

    def bytes_s(self, source: WorkerId, source_end: KvEnd, sink_end: KvEnd, links: Iterable[KvLink]) -> float:
        """How fast the sink pulls from `source`: as it measured, else as it measured of others by the same way, else as
        set here. 0 where there is no way, or the last try did not reach the source. Where the source's pool could not
        be mapped although it lies where the sink's does, what came over TCP instead is what counts.

        Args:
            links: what the sink's beat tells of its pulls.
        """
        path = transfer_path(sink_end, source_end)
        if path == NO_PATH:
            return 0.0
        links = tuple(links)
        if path != TCP and any(link.worker == source and link.path == TCP for link in links):
            path = TCP
        alike = [link for link in links if (link.path == TCP) == (path == TCP)]
        own = next((link for link in alike if link.worker == source), None)
        if own is not None and own.failed:
            return 0.0
        if own is not None and own.bytes_s > 0:
            return own.bytes_s
        others = [link.bytes_s for link in alike if link.bytes_s > 0]
        if others:
            return sum(others) / len(others)
        return self.tcp_bytes_s if path == TCP else self.bandwidth_bytes_s
