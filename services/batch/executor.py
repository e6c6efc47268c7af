"""Runs items: takes them from the queue, every tenant's in its turn, and keeps an eye on their batches.

Each tenant with something here has a durable consumer of its own. All of them share the slots of this process, which
go to who waits longest; so a tenant with a million items gets as many turns as one with ten.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import suppress
from types import TracebackType

from services.batch.item_gate import RunGate
from services.batch.item_queue import ITEM_STREAM, durable_of
from services.batch.item_run import ItemRun, OnResult, RunTools
from services.batch.job_states import IN_PROGRESS
from services.batch.store import BatchStore
from shared.bus.bus import Bus, Delivery, Redeliver, Subscription
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import BatonError
from shared.contracts.ids import BatchId, TenantId, is_id
from shared.ingress.ingress import Ingress
from shared.lifecycle.tasks import end_tasks, every

log = logging.getLogger("baton.batch")

FOLLOW_S = 1.0
"""How often new tenants are looked for."""
WATCH_S = 1.0
"""How often the state of batches with items at work is looked at: a cancel reaches workers within so long."""
TWICE_PAUSE_S = 5.0

ItemKey = tuple[TenantId, BatchId, int]


class Executor:
    """The items at work in this process; an async context manager. Leave it before the ingress.

    Args:
        max_running: most items at work at once.
    """

    def __init__(
        self,
        bus: Bus,
        store: BatchStore,
        ingress: Ingress,
        *,
        max_running: int,
        on_result: OnResult,
        rng: random.Random | None = None,
    ) -> None:
        self._bus = bus
        self._store = store
        self._ingress = ingress
        self._slots = asyncio.Semaphore(max_running)
        self._tools = RunTools(bus, store, ingress, RunGate(), rng or random.Random(), on_result)
        self._runs: dict[ItemKey, ItemRun] = {}
        self._consumers: dict[TenantId, Subscription] = {}
        self._following = asyncio.Lock()
        self._draining = False
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Executor:
        with suppress(BatonError):  # else made with the first consumer
            await self._bus.make_stream(ITEM_STREAM, subjects.ANY_BATCH_ITEM)
        loops = [(self.follow, FOLLOW_S), (self._watch, WATCH_S)]
        self._loops = [asyncio.create_task(every(period_s, work, log)) for work, period_s in loops]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.drain()

    @property
    def running(self) -> int:
        """Items at work."""
        return len(self._runs)

    async def drain(self) -> None:
        """Take nothing new; what is at work ends without a result and goes back to the queue at once."""
        self._draining = True
        await end_tasks(self._loops)
        async with self._following:
            stops = [asyncio.create_task(consumer.stop()) for consumer in self._consumers.values()]
            self._consumers.clear()
        for run in list(self._runs.values()):
            run.hand_back()
        await asyncio.gather(*stops)

    async def follow(self) -> None:
        """Consume the items of every tenant that has ever had some. Raises Unavailable."""
        async with self._following:
            for tenant in await self._store.jobs.tenants():
                if tenant in self._consumers or not is_id(tenant) or self._draining:
                    continue
                self._consumers[tenant] = await self._bus.consume(
                    ITEM_STREAM,
                    subjects.batch_item(tenant),
                    BatchItem,
                    self._on_item,
                    durable=durable_of(tenant),
                    slots=self._slots,
                )

    async def _on_item(self, delivery: Delivery) -> None:
        item: BatchItem = delivery.message
        if delivery.subject != subjects.batch_item(item.tenant):
            log.error("an item of tenant %s on %s dropped", item.tenant, delivery.subject)
            return
        key = (item.tenant, item.batch_id, item.number)
        if self._draining:
            raise Redeliver
        if key in self._runs:  # the queue thinks we lost it
            raise Redeliver(TWICE_PAUSE_S)
        run = self._runs[key] = ItemRun(item, delivery.context, self._tools)
        try:
            await run.work()
        finally:
            del self._runs[key]

    async def _watch(self) -> None:
        """End the runs of batches that are no longer in progress."""
        for tenant, batch_id in {(tenant, batch_id) for tenant, batch_id, _ in self._runs}:
            if await self._store.jobs.status(tenant, batch_id) == IN_PROGRESS:
                continue
            for key, run in list(self._runs.items()):
                if key[:2] == (tenant, batch_id):
                    run.look_again()
