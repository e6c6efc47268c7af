"""What tests of the batch service share: stores on the run's Redis, and a service that drives batches there."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from services.batch.jobs import JobDesk
from services.batch.records import Claim, FileMeta, ItemBody, ItemResult, Job, JobSpec
from services.batch.runner import BatchRunner
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from services.batch.store_limits import StoreLimits
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import stream_name
from shared.contracts import subjects
from shared.contracts.batch_messages import FILE_CHUNK_BYTES, BatchItem
from shared.contracts.ids import FileId, TenantId
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from tests.servers import RedisServer
from tests.tiny_tokenizer import tiny_tokenizer

ANN, BOB = TenantId("ann"), TenantId("bob")
MASTER_KEY = bytes(range(32))
ENDPOINT = "/v1/chat/completions"


@asynccontextmanager
async def batch_store(server: RedisServer, **options: int) -> AsyncIterator[tuple[BatchStore, RedisStore, str]]:
    """A store, its Redis and its prefix."""
    prefix = f"test-{secrets.token_hex(4)}"
    async with connect_redis(server.url) as redis:
        yield BatchStore(redis, Sealer(MASTER_KEY), prefix, StoreLimits(**options)), redis, prefix


async def upload(
    store: BatchStore, data: bytes, tenant: TenantId = ANN, *, name: str = "in.jsonl", expires_s: int = 0
) -> FileId:
    """A closed input file."""
    now_s = int(time.time())  # a sweep may run meanwhile
    file_id = await store.files.open(tenant, FileMeta(name, "batch", 1000, expires_s), now_s)
    for number, start in enumerate(range(0, len(data), FILE_CHUNK_BYTES)):
        await store.files.append(tenant, file_id, number, data[start : start + FILE_CHUNK_BYTES], now_s)
    await store.files.close(tenant, file_id)
    return file_id


async def job_in_progress(store: BatchStore, count: int = 3, tenant: TenantId = ANN, tokens: int = 10) -> Job:
    """A batch of `count` items with bodies stored, each of `tokens` prompt tokens."""
    file_id = await upload(store, b"x", tenant)
    spec = JobSpec(endpoint=ENDPOINT, created_s=1000, expires_s=2000, input_file_id=file_id, metadata={"a": "b"})
    batch_id = await store.jobs.create(tenant, spec, "validating")
    items = [(number, item(number, tokens)) for number in range(1, count + 1)]
    assert await store.items.put_bodies(tenant, batch_id, "validating", items)
    job = await store.jobs.get(tenant, batch_id)
    changes = {"status": "in_progress", "total": count, "model": "tiny", "in_progress_s": 1001}
    assert await store.jobs.move(job, changes, tokens=count * tokens) == ""
    return await store.jobs.get(tenant, batch_id)


def item(number: int, tokens: int = 10) -> ItemBody:
    return ItemBody(f"c{number}", ENDPOINT, b'{"model":"tiny","secret":"prompt text"}', tokens)


def answer(number: int, status: int = 200) -> ItemResult:
    body = b'{"text":"secret answer"}'
    return ItemResult(f"c{number}", status, f"req-{number}", body, prompt_tokens=10, completion_tokens=5)


async def everything(redis: RedisStore, prefix: str) -> bytes:
    """All keys and values under a prefix, joined."""
    seen: list[bytes] = []
    for key in await redis.execute("KEYS", f"{prefix}:*"):
        seen += [key, await redis.execute("DUMP", key)]
    return b"\n".join(seen)


# ---------------------------------------------------------------------------------------------- a service without HTTP

MODEL = "tiny"
CONTEXT = 512


def lines(count: int, *, model: str = MODEL, start: int = 1) -> bytes:
    """A good input file."""
    return b"".join(input_line(f"c{number}", model=model) + b"\n" for number in range(start, start + count))


def input_line(custom_id: Any, *, model: str = MODEL, prompt: str = "hi", **more: Any) -> bytes:
    """One good line, but for `more`."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 5}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body} | more).encode()


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10) -> None:
    """Returns once `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


@dataclass
class FakeExecutor:
    """Takes items off the queue and answers them, or lets them lie. Each claim is noted."""

    store: BatchStore
    runners: list[BatchRunner] = field(default_factory=list)
    respond: Callable[[BatchItem], ItemResult | None] = lambda item: answer(item.number)
    claims: list[tuple[int, Claim]] = field(default_factory=list)
    deliveries: list[BatchItem] = field(default_factory=list)
    deaf: bool = False
    """Acknowledges and forgets, as a queue that lost its messages looks."""

    async def handle(self, delivery: Delivery) -> None:
        item: BatchItem = delivery.message
        self.deliveries.append(item)
        if self.deaf:
            return
        claim = await self.store.items.claim(item.tenant, item.batch_id, item.number)
        if claim.body is None:
            return
        self.claims.append((item.number, claim))
        result = self.respond(item)
        if result is None:
            return
        result = msgspec.structs.replace(result, custom_id=claim.body.custom_id)
        _, left = await self.store.items.put_result(item.tenant, item.batch_id, item.number, result, epoch=claim.epoch)
        if not left:
            for runner in self.runners:
                runner.wake(item.tenant, item.batch_id)


@dataclass
class BatchWorld:
    """Stores, a bus with the item stream, a fake executor, and runners as the test wants them."""

    store: BatchStore
    redis: RedisStore
    prefix: str
    bus: MemoryBus
    models: ServedModels
    config: RunnerConfig
    executor: FakeExecutor

    @asynccontextmanager
    async def runner(self, owner: str = "p1", **changes: Any) -> AsyncIterator[tuple[BatchRunner, JobDesk]]:
        """A process that drives batches."""
        config = replace(self.config, **changes)
        async with BatchRunner(self.store, self.bus, self.models, config, owner) as runner:
            self.executor.runners.append(runner)
            yield runner, JobDesk(self.store, runner, config)
            self.executor.runners.remove(runner)

    async def create(self, data: bytes, tenant: TenantId = ANN, **more: Any) -> Job:
        """A batch over that input, begun by nobody yet."""
        now_s = int(time.time())
        spec = JobSpec(
            endpoint=ENDPOINT,
            created_s=now_s,
            expires_s=now_s + 3600,
            input_file_id=await upload(self.store, data, tenant),
            completion_window="24h",
        )
        batch_id = await self.store.jobs.create(tenant, msgspec.structs.replace(spec, **more), "validating")
        return await self.store.jobs.get(tenant, batch_id)

    async def until(self, job: Job, *statuses: str, timeout_s: float = 20) -> Job:
        """The batch once it has one of these statuses."""
        found = job

        async def reached() -> bool:
            nonlocal found
            found = await self.store.jobs.get(job.tenant, job.batch_id)
            return found.status in statuses

        await eventually(reached, timeout_s)
        return found

    async def content(self, job: Job, file_id: FileId) -> list[dict[str, Any]]:
        """The lines of an output file; none when there is no file."""
        if not file_id:
            return []
        data = b"".join([chunk async for chunk in self.store.files.chunks(job.tenant, file_id)])
        assert (await self.store.files.get(job.tenant, file_id)).num_bytes == len(data)
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]


@asynccontextmanager
async def batch_world(server: RedisServer) -> AsyncIterator[BatchWorld]:
    """A world on the run's Redis."""
    async with batch_store(server) as (store, redis, prefix):
        bus = MemoryBus(MemoryBroker(), "batch")
        executor = FakeExecutor(store)
        models = ServedModels([ServedModel(MODEL, "default", CONTEXT, PromptCodec(tiny_tokenizer(), CONTEXT))])
        config = RunnerConfig(lease_s=1.0, poll_s=0.05, scan_s=0.05, sweep_s=0.1, pause_s=0.05, window_items=50)
        await bus.consume(stream_name("batch.item"), subjects.ANY_BATCH_ITEM, BatchItem, executor.handle, durable="x")
        yield BatchWorld(store, redis, prefix, bus, models, config, executor)
        await bus.close()
        models.close()
