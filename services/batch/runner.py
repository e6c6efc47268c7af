"""Drives batches from `validating` to their end, one step after another.

All state is in Redis. A batch is driven by the process that holds its lease, and every change is a compare-and-set, so
that a process may die or freeze at any point: another one takes the lease and goes on with what it finds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

from services.batch import job_states as states
from services.batch.enqueue import Enqueuer
from services.batch.item_queue import JobKey
from services.batch.job_states import Step
from services.batch.job_writer import end_items, write_files
from services.batch.queue_store import TRIM
from services.batch.records import Job
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from services.batch.validating import validate
from shared.bus.bus import Bus
from shared.contracts.batch_messages import BatchError
from shared.contracts.errors import BatonError, NotFound, Unavailable
from shared.contracts.ids import BatchId, TenantId
from shared.ingress.served_models import ServedModels
from shared.lifecycle.tasks import end_tasks, every
from shared.security.keeping import kept_s

log = logging.getLogger("baton.batch")

MAX_PAUSE_S = 30.0
VALIDATION_TRIES = 3
VALIDATE_AT_ONCE = 2
"""Batches of one tenant validated side by side."""


class BatchRunner:
    """Finds batches nobody drives, and drives them; an async context manager.

    Args:
        owner: of leases; this process's id.
        clock: unix seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        bus: Bus,
        models: ServedModels,
        config: RunnerConfig,
        owner: str,
        clock: Callable[[], float] = time.time,
        hear: Callable[[TenantId], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._models = models
        self._config = config
        self._owner = owner
        self._clock = clock
        self._hear = hear
        self._enqueuer = Enqueuer(store, bus, config, clock)
        self._driven: dict[JobKey, asyncio.Task[None]] = {}
        self._news: dict[JobKey, asyncio.Event] = {}
        self._unvalidated: dict[JobKey, None] = {}
        self._validating: Counter[TenantId] = Counter()
        self._loops: list[asyncio.Task[None]] = []
        self._scanning = asyncio.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="validate")

    async def __aenter__(self) -> BatchRunner:
        config = self._config
        work: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._scan, config.scan_s),
            (self._renew, config.lease_s / 3),
            (self._sweep, config.sweep_s),
        ]
        self._loops = [asyncio.create_task(every(period_s, what, log)) for what, period_s in work]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await end_tasks(self._loops)
        await end_tasks(self._driven.values())
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def driving(self) -> int:
        """Batches this process drives."""
        return len(self._driven)

    def wake(self, tenant: TenantId, batch_id: BatchId) -> None:
        """Something happened to a batch, such as its last result: look at it now, if it is driven here."""
        if (news := self._news.get((tenant, batch_id))) is not None:
            news.set()

    async def take(self, tenant: TenantId, batch_id: BatchId) -> None:
        """Drive a batch from now on, unless another process does."""
        self.wake(tenant, batch_id)
        key = (tenant, batch_id)
        async with self._scanning:
            if key in self._driven:
                return
            if await self._store.jobs.take_lease(tenant, batch_id, self._owner, self._config.lease_s):
                self._news[key] = asyncio.Event()
                self._driven[key] = asyncio.create_task(self._drive(key))

    # ------------------------------------------------------------------------------------------ loops

    async def _scan(self) -> None:
        async for tenant, batch_id in self._store.jobs.active():
            await self.take(tenant, batch_id)

    async def _renew(self) -> None:
        for (tenant, batch_id), task in list(self._driven.items()):
            held = await self._store.jobs.take_lease(tenant, batch_id, self._owner, self._config.lease_s)
            if not held:
                log.warning("batch %s is driven by another process now", batch_id)
                task.cancel()

    async def _sweep(self) -> None:
        store, now_s = self._store, int(self._clock())
        tenants = await store.jobs.tenants()
        for tenant in await store.files.due(tenants, now_s):
            await store.files.sweep(tenant, now_s)
        for tenant in await store.queue.used_by(tenants):
            if self._hear is not None:
                await self._hear(tenant)
            keep_s = kept_s(self._config.queue_keep_s, await store.queue.retention_s(tenant))
            while await store.queue.trim(tenant, now_s - keep_s) == TRIM:
                pass
            await self._enqueuer.look_after_queue(tenant, self._owner)

    # ------------------------------------------------------------------------------------------ one batch

    async def _drive(self, key: JobKey) -> None:
        failures = faults = 0
        try:
            while True:
                try:
                    if not await self._step(key, faults):
                        return
                    failures = faults = 0
                except NotFound:
                    return
                except Exception as exc:
                    quiet = isinstance(exc, Unavailable)  # which is no fault of the batch
                    failures, faults = failures + 1, faults + (not quiet)
                    log.warning("batch %s: %s", key[1], exc) if quiet else log.exception("batch %s failed", key[1])
                    await asyncio.sleep(min(MAX_PAUSE_S, self._config.pause_s * 2 ** min(failures - 1, 8)))
        finally:
            self._driven.pop(key, None)
            self._news.pop(key, None)
            self._unvalidated.pop(key, None)
            self._enqueuer.forget(key)
            with suppress(BatonError):
                await self._store.jobs.give_lease(*key, self._owner)

    async def _step(self, key: JobKey, faults: int) -> bool:
        """Take the next step of a batch, that failed `faults` times in a row; False when there is none."""
        news = self._news[key]
        news.clear()
        store = self._store
        job = await store.jobs.get(*key)
        now_s = int(self._clock())
        step = states.next_step(job, self._clock())
        if step is Step.NOTHING:
            return False
        if step is Step.VALIDATE:
            if not await self._validated_in_turn(job, faults):
                await self._wait(news, job)
        elif step is Step.EXPIRE_EARLY:
            await store.jobs.move(job, states.change(job.status, states.EXPIRED, now_s), ends=True)
        elif step is Step.RUN:
            if not await self._enqueuer.go_on(job):
                await self._wait(news, job)
        elif step is Step.FINALIZE:
            await store.jobs.move(job, states.finalizing(job, now_s))
        elif step is Step.END_ITEMS:
            await end_items(store, job)
        else:
            await write_files(store, job, self._clock)
            log.info("batch %s has ended: %d completed, %d failed", job.batch_id, job.completed, job.failed)
        return True

    async def _validated_in_turn(self, job: Job, faults: int) -> bool:
        """Validate a batch; False while the tenant has enough in hand, so that many batches of one do not keep others'
        waiting."""
        tenant, key = job.tenant, (job.tenant, job.batch_id)
        if self._validating[tenant] >= VALIDATE_AT_ONCE:
            self._unvalidated[key] = None
            return False
        self._unvalidated.pop(key, None)
        self._validating[tenant] += 1
        try:
            await self._validate(job, faults)
        finally:
            self._validating[tenant] -= 1
            if not self._validating[tenant]:
                del self._validating[tenant]
            if (following := next((other for other in self._unvalidated if other[0] == tenant), None)) is not None:
                self.wake(*following)
        return True

    async def _validate(self, job: Job, faults: int) -> None:
        if faults >= VALIDATION_TRIES:
            error = BatchError("internal_error", "the batch could not be validated")
            await self._store.jobs.move(
                job, states.change(job.status, states.FAILED, int(self._clock())) | {"errors": [error]}, ends=True
            )
            return
        await validate(self._store, job, self._models, self._config, self._threads, self._clock)

    async def _wait(self, news: asyncio.Event, job: Job) -> None:
        left_s = max(0.0, job.spec.expires_s - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._config.poll_s, left_s)):
                await news.wait()
