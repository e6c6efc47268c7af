"""Executors of batch items on the memory bus, with a real Redis and the stand-ins behind a gateway."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.batch.executor import Executor
from services.batch.records import ItemBody, ItemResult, Job, JobSpec
from services.batch.store import BatchStore
from shared.bus.memory_bus import MemoryBus
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.ids import IngressId, TenantId
from shared.ingress.config import IngressConfig
from shared.ingress.ingress import Ingress
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.telemetry.setup import Telemetry
from tests.pipeline.batch_support import ANN, batch_store, upload
from tests.pipeline.gateway_support import CONTEXT, MODEL, TOKENIZER, Backend
from tests.servers import RedisServer

BATCH = IngressId("batch-1")
CHAT = "/v1/chat/completions"


def chat_body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}


@dataclass
class ExecutorWorld:
    """A store, what is behind an ingress, and executors as the test wants them."""

    store: BatchStore
    backend: Backend
    models: ServedModels
    results: list[tuple[BatchItem, ItemResult, int]] = field(default_factory=list)

    async def job(self, bodies: Sequence[dict[str, Any]], tenant: TenantId = ANN) -> Job:
        """A batch of these bodies in progress, nothing of it on the queue."""
        store = self.store
        spec = JobSpec(endpoint=CHAT, created_s=1, expires_s=2, input_file_id=await upload(store, b"x", tenant))
        batch_id = await store.jobs.create(tenant, spec, "validating")
        items = [
            (number, ItemBody(f"c{number}", CHAT, json.dumps(body).encode(), 10))
            for number, body in enumerate(bodies, 1)
        ]
        await store.items.put_bodies(tenant, batch_id, "validating", items)
        job = await store.jobs.get(tenant, batch_id)
        changes = {"status": "in_progress", "total": len(bodies), "model": MODEL}
        assert await store.jobs.move(job, changes, tokens=10 * len(bodies)) == ""
        return await store.jobs.get(tenant, batch_id)

    async def enqueue(self, job: Job, numbers: Sequence[int] = (), again: str = "") -> None:
        """Put items on the queue, all of them by default."""
        bus = self.backend.bus
        for number in numbers or range(1, job.total + 1):
            item = BatchItem(tenant=job.tenant, batch_id=job.batch_id, number=number, custom_id=f"c{number}")
            name = f"{job.batch_id}-{number}{again}"
            await bus.publish_durable(subjects.batch_item(job.tenant), item, message_id=name)

    @asynccontextmanager
    async def executor(self, max_running: int = 4, drain_s: float = 0.0) -> AsyncIterator[Executor]:
        """A process that runs items."""
        bus = MemoryBus(self.backend.broker, "batch")
        config = IngressConfig(BATCH, "batch", tick_s=0.05, beat_s=0.05, drain_s=drain_s, hop_timeout_s=2.0)

        async def on_result(item: BatchItem, result: ItemResult, left: int) -> None:
            self.results.append((item, result, left))

        async with Telemetry("batch", bus) as telemetry, Ingress(bus, config, telemetry, self.models) as ingress:
            await asyncio.sleep(0.05)
            rng = random.Random(1)
            async with Executor(
                bus, self.store, ingress, max_running=max_running, on_result=on_result, rng=rng
            ) as executor:
                await executor.follow()
                yield executor
        await bus.close()

    async def finished(self, job: Job, timeout_s: float = 20.0) -> dict[int, ItemResult]:
        """The results by number, once every item has one and every settlement was published."""
        async with asyncio.timeout(timeout_s):
            while True:
                now = await self.store.jobs.get(job.tenant, job.batch_id)
                if now.finished == job.total:
                    break
                await asyncio.sleep(0.02)
        return await self.store.items.results(job.tenant, job.batch_id, range(1, job.total + 1))

    def billed(self) -> dict[str, tuple[int, int]]:
        """Prompt and completion tokens by request as the ledger would have them: the highest epoch counts."""
        booked: dict[str, tuple[int, int, int]] = {}
        for settle in self.backend.settles:
            name, epoch = settle.attempt.request_id, settle.attempt.epoch
            if epoch > booked.get(name, (0, 0, 0))[0]:
                booked[name] = (epoch, settle.prompt_tokens, settle.completion_tokens)
        return {name: (prompt, completion) for name, (_, prompt, completion) in booked.items()}


@asynccontextmanager
async def executor_world(server: RedisServer, backend: Backend) -> AsyncIterator[ExecutorWorld]:
    """A world on the run's Redis."""
    backend.ingress = BATCH
    models = ServedModels([ServedModel(MODEL, "default", CONTEXT, PromptCodec(TOKENIZER, CONTEXT))])
    async with batch_store(server) as (store, _, _), backend.run():
        await backend.bus.make_stream("batch-item", subjects.ANY_BATCH_ITEM)
        yield ExecutorWorld(store, backend, models)
    models.close()
