"""How long and how much a transfer of KV over TCP may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Seconds, bytes and counts. Both ends keep them, each against the other."""

    connect_s: float = 2.0  # a connection, its TLS handshake included
    first_s: float = 5.0  # a connection's first request, at the source
    idle_s: float = 60.0  # between requests; then the source closes, and a sink opens anew
    stall_s: float = 5.0  # with no byte moved
    least_bytes_s: float = 4e6  # slower than this on the whole is a time-out
    max_connections: int = 64  # at one source
    max_frame_bytes: int = 64 * 1024  # a request or a reply, without the spans behind it
    max_blocks: int = 1024  # in one request

    def whole_s(self, num_bytes: int) -> float:
        """How long so many bytes may take."""
        return self.stall_s + num_bytes / self.least_bytes_s


LIMITS = TransferLimits()
