"""What an ingress needs to know, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.ids import IngressId


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Times in seconds, sizes in bytes.

    `service` is the name in `subjects.SERVICES`, which spans begin with.
    """

    ingress_id: IngressId
    service: str
    hop_timeout_s: float = 5.0
    submit_s: float = 8.0
    """A request no scheduler ever took is tried for so long: an election takes the lease and a little more."""
    worker_silence_s: float = 10.0
    """A worker of a running request not heard for so long is lost."""
    drain_s: float = 10.0
    """How long running requests may finish when the ingress stops."""
    max_unsent_bytes: int = 256 * 1024
    max_blocked_s: float = 30.0
    tick_s: float = 0.25
    beat_s: float = 1.0
    alive_s: float = 5.0
    """A service counts as alive for so long after it was heard."""
