"""The step `in_progress`: a window of a batch's items is kept on the queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.batch.records import Job
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.ids import BatchId, TenantId

log = logging.getLogger("baton.batch")

PUBLISH = 100
"""Items published at once."""

JobKey = tuple[TenantId, BatchId]


@dataclass(slots=True)
class _Progress:
    """When a batch last moved, and how it stood then."""

    at: float
    counts: tuple[int, int, int]
    repeats: int = 0


class Enqueuer:
    """Puts references to items on the queue, and again when the queue seems to have lost them."""

    def __init__(self, store: BatchStore, bus: Bus, config: RunnerConfig, clock: Callable[[], float]) -> None:
        self._store = store
        self._bus = bus
        self._config = config
        self._clock = clock
        self._progress: dict[JobKey, _Progress] = {}

    async def go_on(self, job: Job) -> bool:
        """Enqueue the next items if there is room; True when some were. Raises Unavailable."""
        if self._stalled(job):
            await self._again(job)
            return False
        room = self._config.window_items - (job.enqueued - job.finished)
        last = min(job.total, job.enqueued + min(room, PUBLISH))
        if last <= job.enqueued:
            return False
        await self._publish(job, range(job.enqueued + 1, last + 1), "")
        await self._store.jobs.set_enqueued(job, last)
        return True

    def forget(self, key: JobKey) -> None:
        """The batch is driven no more."""
        self._progress.pop(key, None)

    async def _again(self, job: Job) -> None:
        log.warning("batch %s does not move: its items are put on the queue again", job.batch_id)
        # another name each time, or the stream would take them for the same
        mark = f"-{int(self._clock())}"
        for first in range(1, job.enqueued + 1, PUBLISH):
            await self._publish(job, range(first, min(job.enqueued, first + PUBLISH - 1) + 1), mark)

    async def _publish(self, job: Job, numbers: Sequence[int], mark: str) -> None:
        bodies = await self._store.items.bodies(job.tenant, job.batch_id, numbers)
        await asyncio.gather(
            *(
                self._bus.publish_durable(
                    subjects.batch_item(job.tenant),
                    BatchItem(tenant=job.tenant, batch_id=job.batch_id, number=number, custom_id=body.custom_id),
                    message_id=f"{job.batch_id}-{number}{mark}",
                )
                for number, body in bodies.items()
            )
        )

    def _stalled(self, job: Job) -> bool:
        now, counts = self._clock(), (job.finished, job.claims, job.enqueued)
        seen = self._progress.setdefault((job.tenant, job.batch_id), _Progress(now, counts))
        if seen.counts != counts:
            self._progress[(job.tenant, job.batch_id)] = _Progress(now, counts)
            return False
        if now - seen.at < self._config.stall_s * 2**seen.repeats:
            return False
        seen.at, seen.repeats = now, min(seen.repeats + 1, 10)
        return True
