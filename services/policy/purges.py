"""Purges of tenants: what policy keeps of their texts goes, and the order is acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from services.policy.idempotency import IdempotencyRecords
from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.streams import PURGE_ORDER_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.store.redis_store import RedisStore

log = logging.getLogger("baton.policy")

OWNER = "policy"
REMEMBERED_S = 30 * 86400


class Purges:
    """One of any number on the same Redis. `start`, then `stop`.

    Args:
        kept: what is purged; a count of each goes into the acknowledgement, in this order.

    An order that comes again, as its acknowledgement was lost, takes nothing that was made since.
    """

    def __init__(
        self, bus: Bus, redis: RedisStore, kept: Sequence[IdempotencyRecords], prefix: str = "baton:policy"
    ) -> None:
        self._bus = bus
        self._redis = redis
        self._kept = kept
        self._prefix = prefix
        self._consumed: Subscription | None = None

    async def start(self) -> None:
        """Take orders."""
        self._consumed = await self._bus.consume(
            PURGE_ORDER_STREAM, subjects.PURGE_ORDER, m.PurgeOrder, self.on_order, durable=OWNER
        )

    async def stop(self) -> None:
        """Take no new order; one in hand is finished."""
        if self._consumed is not None:
            await self._consumed.stop()

    async def on_order(self, delivery: Delivery) -> None:
        """Carry out one order. Raises Unavailable: then it is delivered again."""
        order: m.PurgeOrder = delivery.message
        done = f"{self._prefix}:purged:{order.purge_id}"
        found: bytes | None = await self._redis.execute("GET", done)
        if found is None:
            counts = [await kept.purge(order.tenant) for kept in self._kept]
            log.warning("purge %s of tenant %s: %s", order.purge_id, order.tenant, counts)
            found = msgspec.json.encode(counts)
            await self._redis.execute("SET", done, found, "EX", REMEMBERED_S)
        ack = m.PurgeAck(purge_id=order.purge_id, owner=OWNER, counts=msgspec.json.decode(found, type=tuple[int, ...]))
        await self._bus.publish_durable(subjects.PURGE_ACK, ack, message_id=f"{OWNER}-{order.purge_id}")
