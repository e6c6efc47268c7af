"""A purge as policy keeps it: who is to acknowledge it, who has, and the receipt that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shared.contracts.admin_messages import OwnerReceipt, PurgeReceipt
from shared.contracts.ids import ScopeGeneration, TenantId
from shared.contracts.messages import PurgeOrder

POLICY, INDEX, BATCH, STORE = "policy", "prefix-cache-index", "batch", "redis"
"""Owners of what outlives processes; `STORE` is the append-only file, which is rewritten when the others, who all keep
something in Redis, have deleted it."""


class PurgeRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One purge. `generation` is the first that lives; `expected`: owners that held something when it was ordered."""

    purge_id: str
    tenant: TenantId
    generation: ScopeGeneration
    ordered_s: float
    expected: tuple[str, ...]
    reason: str = ""
    cache_only: bool = False
    removed: bool = False


class OwnerAck(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an owner took, and when it said so, in unix seconds."""

    at_s: float
    counts: dict[str, int] = msgspec.field(default_factory=dict)


def order_of(record: PurgeRecord) -> PurgeOrder:
    """What owners are told."""
    return PurgeOrder(
        purge_id=record.purge_id,
        tenant=record.tenant,
        generation=record.generation,
        reason=record.reason,
        ordered_s=record.ordered_s,
        cache_only=record.cache_only,
    )


def pending(record: PurgeRecord, acked: Iterable[str]) -> tuple[str, ...]:
    """Owners that have not said yet that nothing is left with them."""
    done = frozenset(acked)
    return tuple(owner for owner in record.expected if owner not in done)


def store_is_due(record: PurgeRecord, acked: Iterable[str]) -> bool:
    """True when everything is deleted that the append-only file may still show, and that is all it waits for."""
    left = pending(record, acked)
    return STORE in left and not any(owner in (POLICY, INDEX, BATCH) for owner in left)


def receipt_of(record: PurgeRecord, acks: Mapping[str, OwnerAck], now_s: float) -> PurgeReceipt:
    """The purge as it stands."""
    left = pending(record, acks)
    owners = sorted(acks.items(), key=lambda entry: (entry[1].at_s, entry[0]))
    return PurgeReceipt(
        purge_id=record.purge_id,
        tenant=record.tenant,
        generation=record.generation,
        reason=record.reason,
        cache_only=record.cache_only,
        removed=record.removed,
        ordered_s=record.ordered_s,
        issued_s=now_s,
        complete=not left,
        owners=tuple(OwnerReceipt(owner, ack.at_s, ack.counts) for owner, ack in owners),
        pending=left,
    )
