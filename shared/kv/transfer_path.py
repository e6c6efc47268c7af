"""Which way KV goes from one worker to another: through memory both map, over TCP, or not at all. Pure.

Workers tell in beats and commits where their pools lie (`KvEnd`); the decode worker that pulls and the scheduler that
places decide by the same function, so that nothing is placed that could not be pulled.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.contracts.parts import KvEnd

SHARED_MEMORY, TCP = "shared_memory", "tcp"
NO_PATH = ""
AUTO, ONLY_SHARED_MEMORY, ONLY_TCP = "auto", "shared-memory", "tcp"
"""Values of the setting `kv.transfer`."""
SCHEMES = ("tcp", "tls")


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where a worker's spans are read over TCP."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def parse_address(text: str) -> KvAddress | None:
    """The address that `str(KvAddress)` wrote; None for anything else."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in SCHEMES or not host or not port or parts.path or parts.query or parts.username:
        return None
    return KvAddress(host, port, parts.scheme == "tls")


def is_loopback(host: str) -> bool:
    """True for an address, or the name, of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def transfer_path(sink: KvEnd, source: KvEnd) -> str:
    """SHARED_MEMORY, TCP or NO_PATH: how `sink` may read the blocks of `source`.

    Two ends that do not say where they lie count as lying together.
    """
    together = sink.place == source.place
    if together and sink.transfer != ONLY_TCP:
        return SHARED_MEMORY
    if sink.transfer == ONLY_SHARED_MEMORY:
        return NO_PATH
    address = parse_address(source.address)
    if address is None or (is_loopback(address.host) and sink.network != source.network):
        return NO_PATH
    return TCP
