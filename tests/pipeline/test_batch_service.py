"""The whole batch service on the memory bus: a file in, a batch over it, files out, and the ledger in step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.batch import executor as executor_module
from services.batch.runner_config import RunnerConfig
from services.batch.service import BatchConfig, BatchService
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.ids import BatchId, FileId
from shared.ingress.config import IngressConfig
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics
from shared.telemetry.setup import Telemetry
from tests.pipeline.batch_support import ANN, ENDPOINT, input_line
from tests.pipeline.executor_support import BATCH, ExecutorWorld, executor_world
from tests.pipeline.gateway_support import Backend
from tests.servers import RedisServer


@asynccontextmanager
async def batch_service(world: ExecutorWorld, max_running: int = 4) -> AsyncIterator[BatchService]:
    bus = MemoryBus(world.backend.broker, "batch")
    config = BatchConfig(
        ingress=IngressConfig(BATCH, "batch", tick_s=0.05, beat_s=0.05, drain_s=0.0, hop_timeout_s=2.0),
        runner=RunnerConfig(lease_s=1.0, poll_s=0.05, scan_s=0.05),
        max_running=max_running,
    )
    async with (
        Telemetry("batch", bus) as telemetry,
        BatchService(bus, world.store, world.models, config, telemetry, Metrics("batch")) as service,
    ):
        yield service
    await bus.close()


class Client:
    """What the gateway's routes ask the service."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._bus = MemoryBus(broker, "gateway")

    async def upload(self, data: bytes) -> FileId:
        opened = await self._files(b.FileOpen(tenant=ANN, filename="in.jsonl", purpose="batch"))
        await self._files(b.FileAppend(tenant=ANN, file_id=opened.file_id, number=0, data=data))
        await self._files(b.FileClose(tenant=ANN, file_id=opened.file_id))
        return FileId(opened.file_id)

    async def create(self, file_id: FileId) -> BatchId:
        ask = b.BatchCreate(tenant=ANN, input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        found: b.BatchInfo = await self._jobs(ask)
        assert found.status == "validating"
        return found.batch_id

    async def get(self, batch_id: BatchId) -> b.BatchInfo:
        found: b.BatchInfo = await self._jobs(b.BatchGet(tenant=ANN, batch_id=batch_id))
        return found

    async def cancel(self, batch_id: BatchId) -> None:
        await self._jobs(b.BatchCancel(tenant=ANN, batch_id=batch_id))

    async def until(self, batch_id: BatchId, status: str, finished: int = 0) -> b.BatchInfo:
        async with asyncio.timeout(20):
            while True:
                found = await self.get(batch_id)
                if found.status == status and found.completed + found.failed >= finished:
                    return found
                await asyncio.sleep(0.02)

    async def lines(self, file_id: FileId) -> list[dict[str, Any]]:
        if not file_id:
            return []
        got: b.FileBytes = await self._files(b.FileRead(tenant=ANN, file_id=file_id))
        assert len(got.data) == got.num_bytes
        return [json.loads(line) for line in got.data.splitlines()]

    async def _files(self, ask: Any) -> Any:
        return await self._bus.request(subjects.BATCH_FILES, ask, b.FileReply, timeout_s=5)

    async def _jobs(self, ask: Any) -> Any:
        return await self._bus.request(subjects.BATCH_JOBS, ask, b.BatchReply, timeout_s=5)


def lines_of(count: int) -> bytes:
    return b"".join(input_line(f"line-{number}") + b"\n" for number in range(count))


def shown(lines: list[dict[str, Any]]) -> tuple[int, int]:
    usages = [line["response"]["body"]["usage"] for line in lines]
    return sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def billed(world: ExecutorWorld, requests: int) -> tuple[int, int]:
    await until(lambda: len(world.billed()) >= requests)
    found = list(world.billed().values())
    return sum(prompt for prompt, _ in found), sum(completion for _, completion in found)


async def test_a_batch_from_file_to_files(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, Backend(MemoryBroker())) as world, batch_service(world) as service:
        client = Client(world.backend.broker)
        batch_id = await client.create(await client.upload(lines_of(20)))
        done = await client.until(batch_id, "completed")
        assert (done.total, done.completed, done.failed, done.error_file_id) == (20, 20, 0, "")
        lines = await client.lines(done.output_file_id)
        assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(20))
        assert shown(lines) == await billed(world, 20) == (done.prompt_tokens, done.completion_tokens)
        assert service.executor.running == 0


async def test_a_batch_cancelled_in_the_middle_keeps_what_is_done(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "WATCH_S", 0.1)
    hold = asyncio.Event()
    hold.set()
    backend = Backend(MemoryBroker(), hold=hold, step_s=0.02)
    async with executor_world(redis_server, backend) as world, batch_service(world, 3):
        client = Client(backend.broker)
        batch_id = await client.create(await client.upload(lines_of(25)))
        await client.until(batch_id, "in_progress", finished=5)
        hold.clear()
        await asyncio.sleep(0.2)
        await client.cancel(batch_id)
        assert (await client.get(batch_id)).status in ("cancelling", "cancelled")
        done = await client.until(batch_id, "cancelled")
        finished, ended = await client.lines(done.output_file_id), await client.lines(done.error_file_id)
        assert sorted(line["custom_id"] for line in finished + ended) == sorted(f"line-{n}" for n in range(25))
        assert len(finished) == done.completed >= 5
        assert {line["error"]["code"] for line in ended} == {"batch_cancelled"}
        assert len(ended) == done.failed > 0
        await until(lambda: len(backend.settles) == len(backend.submits))
        assert shown(finished) == await billed(world, len(backend.submits))


async def test_a_process_that_stops_leaves_its_batch_to_the_next(redis_server: RedisServer) -> None:
    backend = Backend(MemoryBroker(), step_s=0.02)
    async with executor_world(redis_server, backend) as world:
        client = Client(backend.broker)
        async with batch_service(world):
            batch_id = await client.create(await client.upload(lines_of(40)))
            await client.until(batch_id, "in_progress", finished=10)
        async with batch_service(world):
            done = await client.until(batch_id, "completed")
            lines = await client.lines(done.output_file_id)
            assert sorted(line["custom_id"] for line in lines) == sorted(f"line-{number}" for number in range(40))
            assert shown(lines) == await billed(world, 40)


async def test_the_gauges_follow_the_batches(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with executor_world(redis_server, backend) as world, batch_service(world, 2) as service:
        client = Client(backend.broker)
        batch_id = await client.create(await client.upload(lines_of(5)))
        await until(lambda: service.executor.running == 2)
        await service.metrics.read()
        registry = service.ingress.metrics.registry

        def gauge(metric: Any, state: str) -> float | None:
            return registry.get_sample_value(metric.name, {"state": state})

        assert gauge(names.BATCH_JOBS, "in_progress") == 1
        assert [gauge(names.BATCH_ITEMS, state) for state in ("waiting", "running", "completed", "failed")] == [
            3,
            2,
            0,
            0,
        ]
        await client.cancel(batch_id)
        await client.until(batch_id, "cancelled")
        await service.metrics.read()
        assert gauge(names.BATCH_JOBS, "in_progress") == gauge(names.BATCH_ITEMS, "waiting") == 0
