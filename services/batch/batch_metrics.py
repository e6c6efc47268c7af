"""Gauges of batches and their items, as the store has them; read now and then, not when somebody scrapes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from services.batch.job_states import ENDED
from services.batch.records import Job
from services.batch.store import BatchStore
from shared.contracts.errors import NotFound
from shared.lifecycle.tasks import end_tasks, every
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.batch")

READ_S = 5.0


class BatchMetrics:
    """Keeps the gauges; an async context manager.

    Args:
        running: items at work in this process.
    """

    def __init__(self, store: BatchStore, metrics: Metrics, running: Callable[[], int]) -> None:
        self._store = store
        self._metrics = metrics
        self._running = running
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> BatchMetrics:
        self._loop = asyncio.create_task(every(READ_S, self.read, log))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop is not None:
            await end_tasks([self._loop])

    async def read(self) -> None:
        """Set the gauges. Raises Unavailable."""
        jobs: list[Job] = []
        async for tenant, batch_id in self._store.jobs.active():
            with suppress(NotFound):
                jobs.append(await self._store.jobs.get(tenant, batch_id))
        found = job_counts(jobs)
        for state in names.BATCH_JOBS.labels["state"]:
            self._metrics.set(names.BATCH_JOBS, found[state], state=state)
        for state, count in item_counts(jobs, self._running()).items():
            self._metrics.set(names.BATCH_ITEMS, count, state=state)


def job_counts(jobs: list[Job]) -> Counter[str]:
    """Batches that have not ended, by state."""
    return Counter(job.status for job in jobs if job.status not in ENDED)


def item_counts(jobs: list[Job], running: int) -> dict[str, int]:
    """Their items by state; `running` are those at work here, which may be of others' or of no batch."""
    total, completed, failed = (
        (sum(values) for values in zip(*((j.total, j.completed, j.failed) for j in jobs), strict=True))
        if jobs
        else (0, 0, 0)
    )
    waiting = max(0, total - completed - failed - running)
    return {"waiting": waiting, "running": running, "completed": completed, "failed": failed}
