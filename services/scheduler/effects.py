"""What the request table asks its shell to do. Plain data; each names the hop and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.outbox import Event
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.ids import IngressId, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class AskMatch:
    """Ask the index; answer with `RequestTable.matched`."""

    attempt: Attempt
    message: m.Match
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AskReserve:
    """Ask a decode worker; answer with `RequestTable.reserve_replied`."""

    worker: WorkerId
    message: m.Reserve
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AskPrefill:
    """Ask a prefill worker; answer with `RequestTable.prefill_replied`."""

    worker: WorkerId
    message: m.PrefillRun
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Send an event to an ingress; answer with `RequestTable.events_seen`."""

    ingress: IngressId
    event: Event


@dataclass(frozen=True, slots=True)
class CancelAt:
    """End an attempt at one worker. Nothing is done with the answer: beats show what is still held."""

    worker: WorkerId
    role: str  # prefill | decode
    message: m.Cancel


@dataclass(frozen=True, slots=True)
class PlacingEnded:
    """One try at placing is over: for traces and metrics."""

    request_id: RequestId
    outcome: str  # placed | requeued | refused | dropped
    attributes: dict[str, str | int | float] = field(default_factory=dict)


Effect = AskMatch | AskReserve | AskPrefill | Tell | CancelAt | PlacingEnded
