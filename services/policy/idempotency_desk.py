"""Answers `policy.idempotency`: whose a record is, judged by who lives; and the news of ingresses that tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.policy.idempotency import IdempotencyRecords
from services.policy.ingress_watch import IngressWatch
from services.policy.records import Records
from services.policy.tenants import check_key
from shared.bus.bus import NO_RESPONDERS, Bus, Delivery, Subscription
from shared.contracts import idempotency_messages as i
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Unavailable, to_wire
from shared.contracts.ids import IngressId
from shared.contracts.messages import GatewayBeat, Refusal

QUEUE = "policy"
ASK_S = 1.0
MAX_AT_ONCE = 16
"""Questions asked of Redis at the same time; admission needs connections too."""


class IdempotencyDesk:
    """One of any number on the same Redis. `start`, then `stop`."""

    def __init__(
        self,
        bus: Bus,
        records: Records,
        kept: IdempotencyRecords,
        watch: IngressWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._records = records
        self._kept = kept
        self._watch = watch
        self._clock = clock
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Serve, and listen to beats."""
        asked = i.IdempotencyClaim | i.IdempotencyWrite
        self._subscriptions = [
            await self._bus.subscribe(subjects.ANY_GATEWAY_BEAT, GatewayBeat, self._on_beat),
            await self._bus.serve(subjects.POLICY_IDEMPOTENCY, asked, self.answer, queue=QUEUE),
        ]

    async def stop(self) -> None:
        """Take no more questions."""
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()

    async def answer(self, delivery: Delivery) -> Any:
        """Raises Unavailable when Redis does not answer."""
        ask: i.IdempotencyClaim | i.IdempotencyWrite = delivery.message
        try:
            if isinstance(ask, i.IdempotencyWrite):
                async with self._turns:
                    return await self._kept.write(ask)
            return await self._claim(ask, delivery)
        except Unavailable:
            raise
        except BatonError as error:
            return Refusal(error=to_wire(error))

    async def ask_quiet(self) -> None:
        """Ask every ingress that fell silent whether it is there."""
        await asyncio.gather(*(self._is_there(ingress) for ingress in self._watch.quiet(self._clock())))

    async def _claim(self, ask: i.IdempotencyClaim, delivery: Delivery) -> i.IdempotencyState:
        async with self._turns:
            if delivery.remaining_s() <= 0:  # its asker has claimed again, or given up
                raise Unavailable(f"{delivery.subject}: budget spent", param=delivery.subject)
            key = check_key(ask.key_hash, await self._records.key(ask.key_hash))
            found = await self._kept.claim(key.tenant, ask)
        if found.state.outcome != i.RUNNING or not await self._lost(found.owner):
            return found.state
        async with self._turns:
            return (await self._kept.claim(key.tenant, ask, found.owner)).state

    async def _lost(self, owner: IngressId) -> bool:
        self._watch.heard_of(owner, self._clock())
        if owner in self._watch.quiet(self._clock()):
            await self._is_there(owner)
        return self._watch.lost(owner, self._clock())

    async def _is_there(self, ingress: IngressId) -> None:
        try:
            await self._bus.request(subjects.gateway_ask(ingress), i.IngressAsked(), i.IngressHere, timeout_s=ASK_S)
        except Unavailable as exc:
            if exc.code == NO_RESPONDERS:
                self._watch.nobody_listens(ingress, self._clock())
        except BatonError:
            pass  # its beats tell
        else:
            self._watch.heard(ingress, self._clock())

    def _on_beat(self, delivery: Delivery) -> None:
        beat: GatewayBeat = delivery.message
        self._watch.beat(beat.ingress_id, beat.requests, self._clock())
