"""The batch service: the second ingress. Files and jobs over the bus, lines from tenants, and the items at work."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from services.batch.batch_metrics import BatchMetrics
from services.batch.executor import Executor
from services.batch.files import FileDesk
from services.batch.intake import Intake, announce
from services.batch.jobs import JobDesk
from services.batch.records import QUEUE_BATCH, ItemResult
from services.batch.runner import BatchRunner
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from services.batch.tenant_terms import RetentionNews, TokenLimits
from shared.bus.bus import Bus, Subscription
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem, BatchRequest, FileRequest
from shared.contracts.messages import PurgeOrder
from shared.ingress.config import IngressConfig
from shared.ingress.ingress import Ingress
from shared.ingress.served_models import ServedModels
from shared.security.purge_orders import PurgeOrders
from shared.telemetry.metrics import Metrics
from shared.telemetry.setup import Telemetry

SERVICE = "batch"


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """`queue_tenants`: file with the tenants that have a NATS user; None: there are none. `max_queued_lines`: most
    lines of one of them waiting."""

    ingress: IngressConfig
    runner: RunnerConfig
    max_running: int = 16
    max_queued_lines: int = 10_000
    queue_tenants: Path | None = None


class BatchService:
    """One of any number of batch processes on the same Redis and NATS; an async context manager."""

    def __init__(
        self,
        bus: Bus,
        store: BatchStore,
        models: ServedModels,
        config: BatchConfig,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._store = store
        self._config = config
        self._stack = AsyncExitStack()
        self._desks: list[Subscription] = []
        self._purges = PurgeOrders(bus, SERVICE, SERVICE, self._purge)
        self.ingress = Ingress(bus, config.ingress, telemetry, models, metrics=metrics)
        limits = TokenLimits(self.ingress, on_retention=store.queue.note_retention)
        self.runner = BatchRunner(
            store, bus, models, config.runner, config.ingress.ingress_id, hear=RetentionNews(limits, models).hear
        )
        self.executor = Executor(bus, store, self.ingress, max_running=config.max_running, on_result=self._on_result)
        self._intake = Intake(
            bus,
            store,
            models,
            limits.of,
            config.queue_tenants,
            max_lines=config.max_queued_lines,
        )
        self.metrics = BatchMetrics(store, metrics, lambda: self.executor.running)
        self._files = FileDesk(store, config.runner)
        self._jobs = JobDesk(store, self.runner, config.runner)

    async def __aenter__(self) -> BatchService:
        async with AsyncExitStack() as stack:
            for part in (self.ingress, self.runner, self.executor, self._intake, self.metrics):
                await stack.enter_async_context(part)
            self._desks = [
                await self._bus.serve(subjects.BATCH_FILES, FileRequest, self._files.answer, queue=SERVICE),
                await self._bus.serve(subjects.BATCH_JOBS, BatchRequest, self._jobs.answer, queue=SERVICE),
            ]
            await self._purges.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Answer nothing more, hand items back to the queue, let others drive the batches."""
        await self._purges.stop()
        for desk in self._desks:
            await desk.stop()
        await self._stack.aclose()

    async def _purge(self, order: PurgeOrder) -> Mapping[str, int]:
        """Jobs, files, lines and results go; what runs of them ends as the ingress is told the same."""
        return {} if order.cache_only else await self._store.purges.purge(order)

    async def _on_result(self, item: BatchItem, result: ItemResult, left: int) -> None:
        if item.batch_id == QUEUE_BATCH:
            await announce(self._bus, item.tenant, item.number, result)
        elif not left:
            self.runner.wake(item.tenant, item.batch_id)
