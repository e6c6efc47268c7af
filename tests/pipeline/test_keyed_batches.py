"""Uploads and batches under an Idempotency-Key, against the batch service's own desks and store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.batch.files import FileDesk
from services.batch.jobs import JobDesk
from services.batch.records import FileMeta
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from shared.bus.memory_bus import MemoryBus
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.ids import BatchId, TenantId
from tests.pipeline.batch_support import batch_store, lines
from tests.pipeline.keyed_support import Gateway, World, keyed_world
from tests.servers import RedisServer

TENANT = TenantId("tenant-a")


@dataclass
class Runner:
    """Is told of batches, and drives none."""

    taken: list[BatchId] = field(default_factory=list)

    async def take(self, tenant: TenantId, batch_id: BatchId) -> None:
        self.taken.append(batch_id)


@asynccontextmanager
async def batches(server: RedisServer, **options: Any) -> AsyncIterator[tuple[World, BatchStore]]:
    """`options`: of the world."""
    async with batch_store(server) as (store, redis, _), keyed_world(redis, **options) as world:
        bus, config = MemoryBus(world.backend.broker, "batch"), RunnerConfig()
        files, jobs = FileDesk(store, config), JobDesk(store, Runner(), config)  # type: ignore[arg-type]
        await bus.serve(subjects.BATCH_FILES, b.FileRequest, files.answer)
        await bus.serve(subjects.BATCH_JOBS, b.BatchRequest, jobs.answer)
        yield world, store
        await bus.close()


async def upload(gateway: Gateway, data: bytes, key: str = "") -> httpx.Response:
    headers = {"authorization": "Bearer key-a"} | ({"idempotency-key": key} if key else {})
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
    return await gateway.client.post("/v1/files", headers=headers, **form)


async def stored(store: BatchStore) -> int:
    files, _ = await store.files.page(TENANT, purpose="", after="", limit=100, ascending=True)
    return len(files)


async def test_an_upload_is_one_file_however_often_it_is_sent(redis_server: RedisServer) -> None:
    async with batches(redis_server) as (world, store):
        asked = [upload(gateway, lines(3), "k") for gateway in world.gateways * 3]
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert await stored(store) == 1
        assert (await upload(world.gateways[0], lines(4), "k")).status_code == 422
        assert (await upload(world.gateways[0], lines(3))).json()["id"] != answers[0].json()["id"]
        assert await stored(store) == 2


async def test_an_upload_whose_gateway_died_before_it_could_say_so_is_still_one_file(redis_server: RedisServer) -> None:
    async with batches(redis_server) as (_, store):
        meta_of = [await _opened(store, once) for once in ("req-1", "req-1", "req-2")]
        assert meta_of[0] == meta_of[1] != meta_of[2]
        assert await stored(store) == 2
        await store.files.delete(TENANT, meta_of[0])
        assert await _opened(store, "req-1") != meta_of[0]


async def _opened(store: BatchStore, once: str) -> Any:
    file_id = await store.files.open(TENANT, FileMeta("f", "batch", 1, 0), 1)
    await store.files.append(TENANT, file_id, 0, b"x", 1)
    return (await store.files.close(TENANT, file_id, once=once)).file_id


async def test_a_batch_is_created_once_by_any_gateway(redis_server: RedisServer) -> None:
    async with batches(redis_server) as (world, store):
        first, second = world.gateways
        file_id = (await upload(first, lines(2))).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        asked = [gateway.post("batches", body, "k") for gateway in (first, second) * 3]
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1
        jobs, _ = await store.jobs.page(TENANT)
        assert [job.batch_id for job in jobs] == [answers[0].json()["id"]]
        # its gateway died before it could say so: the batch it made is found again
        redis = world.records._redis
        (record,) = await redis.execute("KEYS", f"{world.records._prefix}:*:once:*")
        await redis.execute("HSET", record, "state", "open")
        assert (await second.post("batches", body, "k")).json()["id"] == answers[0].json()["id"]
        assert (await first.post("batches", {**body, "metadata": {"a": "b"}}, "k")).status_code == 422
        assert (await first.post("batches", body, "l")).json()["id"] != answers[0].json()["id"]
        assert len((await store.jobs.page(TENANT))[0]) == 2


async def test_a_refused_batch_leaves_its_key_free(redis_server: RedisServer) -> None:
    async with batches(redis_server) as (world, _):
        body = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
        for gateway in world.gateways:
            refused = await gateway.post("batches", body, "k")
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input_file_id")
