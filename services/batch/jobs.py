"""Answers `batch.jobs`: batches are created, looked up, listed and cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from services.batch import job_states as states
from services.batch.file_store import no_such_file
from services.batch.job_store import no_such_batch
from services.batch.open_requests import OpenRequests
from services.batch.records import PURPOSE_INPUT, QUEUE_BATCH, Job, JobSpec
from services.batch.runner import BatchRunner
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from services.batch.validation import ENDPOINTS
from shared.bus.bus import Delivery
from shared.contracts.batch_messages import (
    BatchCancel,
    BatchCreate,
    BatchGet,
    BatchInfo,
    BatchList,
    BatchPage,
    BatchReply,
    BatchRequest,
)
from shared.contracts.errors import Conflict, InvalidInput, NotFound, Unavailable
from shared.contracts.ids import BatchId, TenantId

COMPLETION_WINDOW = "24h"
AT_WORK, MAX_OPEN = 8, 256
"""Requests of one tenant answered at the same time, and those that may be open."""
MAX_PAGE = 100
MAX_PAGE_BYTES = 4 * 1024 * 1024
"""A page ends early rather than be too long for a message."""
CANCEL_TRIES = 10


class JobDesk:
    """Batches over the bus. The gateway has checked whose key asked."""

    def __init__(
        self, store: BatchStore, runner: BatchRunner, config: RunnerConfig, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._runner = runner
        self._config = config
        self._clock = clock
        self._open_requests = OpenRequests(AT_WORK, MAX_OPEN)

    async def answer(self, delivery: Delivery) -> BatchReply:
        """Raises NotFound, InvalidInput, Conflict, Forbidden, QuotaExceeded, Overloaded, Unavailable."""
        request: BatchRequest = delivery.message
        async with self._open_requests.one(request.tenant):
            return await self._answer(request)

    async def _answer(self, request: BatchRequest) -> BatchReply:
        if isinstance(request, BatchCreate):
            return await self._create(request)
        if isinstance(request, BatchCancel):
            return await self._cancel(request)
        if isinstance(request, BatchList):
            return await self._list(request)
        assert isinstance(request, BatchGet)
        return (await self._store.jobs.get(request.tenant, request.batch_id)).info()

    async def _create(self, request: BatchCreate) -> BatchInfo:
        if request.endpoint not in ENDPOINTS:
            raise InvalidInput(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        if request.completion_window != COMPLETION_WINDOW:
            raise InvalidInput(f"completion_window must be {COMPLETION_WINDOW!r}", param="completion_window")
        try:
            file = await self._store.files.get(request.tenant, request.input_file_id)
        except NotFound:
            raise no_such_file(request.input_file_id, "input_file_id") from None
        if file.meta.purpose != PURPOSE_INPUT:
            raise InvalidInput("the input file must have the purpose 'batch'", param="input_file_id")
        now = self._clock()
        spec = JobSpec(
            endpoint=request.endpoint,
            created_s=int(now),
            # whole seconds, of which a short window must leave at least one
            expires_s=int(now + max(1.0, self._config.window_s)),
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            metadata=request.metadata,
            output_expires_after_s=request.output_expires_after_s,
            enqueued_tokens_limit=request.enqueued_tokens_limit,
            models=request.models,
        )
        batch_id = await self._store.jobs.create(request.tenant, spec, states.VALIDATING, request.batch_id)
        return await self._begun(request.tenant, batch_id)

    async def _cancel(self, request: BatchCancel) -> BatchInfo:
        if request.batch_id == QUEUE_BATCH:
            raise no_such_batch(request.batch_id)
        for _ in range(CANCEL_TRIES):
            job = await self._store.jobs.get(request.tenant, request.batch_id)
            changes = states.cancelling(job, int(self._clock()))
            if not changes:
                return job.info()
            if not await self._store.jobs.move(job, changes):
                return await self._begun(request.tenant, request.batch_id)
        raise Conflict("the batch changes too fast; try again", param="batch_id")

    async def _begun(self, tenant: TenantId, batch_id: BatchId) -> BatchInfo:
        job: Job = await self._store.jobs.get(tenant, batch_id)
        with suppress(Unavailable):  # then a runner finds it by itself
            await self._runner.take(tenant, batch_id)
        return job.info()

    async def _list(self, request: BatchList) -> BatchPage:
        if not 1 <= request.limit <= MAX_PAGE:
            raise InvalidInput(f"limit must be 1 to {MAX_PAGE}", param="limit")
        jobs, more = await self._store.jobs.page(request.tenant, after=request.after, limit=request.limit)
        infos, size = [job.info() for job in jobs], 0
        for at, info in enumerate(infos):
            size += len(msgspec.msgpack.encode(info))
            if at and size > MAX_PAGE_BYTES:
                return BatchPage(batches=tuple(infos[:at]), has_more=True)
        return BatchPage(batches=tuple(infos), has_more=more)
