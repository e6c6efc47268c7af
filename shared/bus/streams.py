"""The JetStream streams of the subjects table, and how long each keeps what."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts import subjects
from shared.contracts.ids import TenantId

LEASE_BUCKET = "baton-leases"
"""NATS KV bucket of the leader leases; its stream is `KV_baton-leases`."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream. With `work_queue` a message goes when its one consumer has acknowledged it.

    `max_bytes` and `max_age_s` bound what piles up while nobody consumes; the oldest goes first, or with
    `refuse_when_full` the newest is refused to its sender. The server sets `max_bytes` aside when it makes the stream,
    so the sum must fit its `max_file`.
    """

    name: str
    subject: str
    work_queue: bool
    max_age_s: float = 7 * 86400.0
    max_bytes: int = 64 * 1024 * 1024
    duplicate_window_s: float = 120.0
    refuse_when_full: bool = False
    max_message_bytes: int = -1


def stream_name(hop: str) -> str:
    """The stream of a hop of kind `stream`: its name with hyphens, such as `policy-settle`."""
    return hop.replace(".", "-")


SETTLE_STREAM = stream_name("policy.settle")
PURGE_ACK_STREAM = stream_name("purge.ack")
AUDIT_STREAM = stream_name("audit")

SUBMIT_HOP, ITEM_HOP = "batch.submit", "batch.item"
MAX_LINE_BYTES = 1024 * 1024
"""Largest batch line a tenant may publish, headers included."""
MAX_SUBMIT_BYTES = 16 * 1024 * 1024

STREAMS: dict[str, StreamSpec] = {
    stream_name(hop.name): StreamSpec(
        stream_name(hop.name),
        hop.pattern,
        work_queue=True,
        refuse_when_full=hop.name == ITEM_HOP,
    )
    for hop in subjects.HOPS
    if hop.kind == "stream" and hop.name != SUBMIT_HOP
}


def submit_stream(tenant: TenantId) -> str:
    """The stream of one tenant's batch lines.

    One each: NATS takes message ids for the same over a whole stream, and drops from a full one whatever is oldest, so
    in a shared stream one tenant could make another's lines vanish.
    """
    return f"{stream_name(SUBMIT_HOP)}-{tenant}"


def spec_of(stream: str, subject: str) -> StreamSpec:
    """The spec of a stream; one outside the table keeps its messages for every consumer."""
    if stream.startswith(submit_stream(TenantId(""))):
        return StreamSpec(
            stream,
            subject,
            work_queue=True,
            max_bytes=MAX_SUBMIT_BYTES,
            refuse_when_full=True,
            max_message_bytes=MAX_LINE_BYTES,
        )
    return STREAMS.get(stream) or StreamSpec(stream, subject, work_queue=False)
