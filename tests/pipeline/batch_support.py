"""What tests of the batch service share: stores on the run's Redis, under a prefix of their own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.batch.records import FileMeta, ItemBody, ItemResult, Job, JobSpec
from services.batch.store import BatchStore
from shared.contracts.batch_messages import FILE_CHUNK_BYTES
from shared.contracts.ids import BatchId, FileId, TenantId
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from tests.servers import RedisServer

ANN, BOB = TenantId("ann"), TenantId("bob")
MASTER_KEY = bytes(range(32))
ENDPOINT = "/v1/chat/completions"


@asynccontextmanager
async def batch_store(server: RedisServer, **options: int) -> AsyncIterator[tuple[BatchStore, RedisStore, str]]:
    """A store, its Redis and its prefix."""
    prefix = f"test-{secrets.token_hex(4)}"
    async with connect_redis(server.url) as redis:
        yield BatchStore(redis, Sealer(MASTER_KEY), prefix, **options), redis, prefix


async def upload(
    store: BatchStore, data: bytes, tenant: TenantId = ANN, *, name: str = "in.jsonl", expires_s: int = 0
) -> FileId:
    """A closed input file."""
    file_id = await store.files.open(tenant, FileMeta(name, "batch", 1000, expires_s), 1000)
    for number, start in enumerate(range(0, len(data), FILE_CHUNK_BYTES)):
        await store.files.append(tenant, file_id, number, data[start : start + FILE_CHUNK_BYTES], 1000)
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


def batch(text: str) -> BatchId:
    return BatchId(text)
