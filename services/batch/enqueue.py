"""Keeps items on the queue: a window of each batch in progress, and whatever the queue has lost."""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.batch.item_queue import PUBLISH, JobKey, LossWatch, publish_items
from services.batch.records import QUEUE_BATCH, Job
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from shared.bus.bus import Bus
from shared.contracts.ids import TenantId

log = logging.getLogger("baton.batch")


class Enqueuer:
    """Puts references to items on the queue, and again when the queue seems to have lost them.

    Args:
        clock: unix seconds.
    """

    def __init__(self, store: BatchStore, bus: Bus, config: RunnerConfig, clock: Callable[[], float]) -> None:
        self._store = store
        self._bus = bus
        self._config = config
        self._clock = clock
        self._watch = LossWatch(bus, config.look_s, config.stall_s)

    async def go_on(self, job: Job) -> bool:
        """Enqueue the next items if there is room; True when some were. Raises Unavailable."""
        key = (job.tenant, job.batch_id)
        if await self._watch.lost(key, (job.finished, job.claims, job.enqueued)):
            await self._again(key, range(1, job.enqueued + 1))
            return False
        room = self._config.window_items - (job.enqueued - job.finished)
        last = min(job.total, job.enqueued + min(room, PUBLISH))
        if last <= job.enqueued:
            return False
        await publish_items(self._bus, self._store, key, range(job.enqueued + 1, last + 1))
        await self._store.jobs.set_enqueued(job, last)
        return True

    async def look_after_queue(self, tenant: TenantId, owner: str) -> None:
        """Put waiting lines that came over NATS on the queue again if that has lost them. Raises Unavailable.

        Args:
            owner: this process; one at a time does it.
        """
        key = (tenant, QUEUE_BATCH)
        waiting, claims = await self._store.queue.open_items(tenant)
        held_s = 3 * self._config.sweep_s
        if not waiting or not await self._store.jobs.take_lease(tenant, QUEUE_BATCH, owner, held_s):
            self.forget(key)
        elif await self._watch.lost(key, (len(waiting), waiting[-1], claims)):
            await self._again(key, waiting)

    def forget(self, key: JobKey) -> None:
        """The batch is driven no more."""
        self._watch.forget(key)

    async def _again(self, key: JobKey, numbers: range | list[int]) -> None:
        log.warning("batch %s of %s does not move: its items are put on the queue again", key[1], key[0])
        await publish_items(self._bus, self._store, key, numbers, f"-{int(self._clock())}")
