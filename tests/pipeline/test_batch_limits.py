"""What one tenant may keep and begin: bounds without which it could fill the store or keep others waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from opentelemetry.context import Context

from services.batch import jobs as jobs_module
from services.batch import runner as runner_module
from services.batch.jobs import JobDesk
from services.batch.open_requests import OpenRequests
from services.batch.records import QUEUE_BATCH, FileMeta, ItemResult, JobSpec
from services.batch.store import BatchStore
from shared.bus.bus import Delivery
from shared.contracts.batch_messages import BatchList, BatchPage
from shared.contracts.errors import Forbidden, NotFound, Overloaded, QuotaExceeded, Unavailable
from shared.contracts.ids import BatchId, FileId, TenantId
from tests.pipeline.batch_support import (
    ANN,
    BOB,
    ENDPOINT,
    answer,
    batch_store,
    batch_world,
    eventually,
    everything,
    item,
    lines,
    upload,
)
from tests.servers import RedisServer


async def until(condition: Callable[[], bool]) -> None:
    async def met() -> bool:
        return condition()

    await eventually(met)


async def begin(store: BatchStore, file_id: FileId) -> BatchId:
    spec = JobSpec(endpoint=ENDPOINT, created_s=1, expires_s=2, input_file_id=file_id)
    return await store.jobs.create(ANN, spec, "validating")


async def end(store: BatchStore, batch_id: BatchId) -> None:
    job = await store.jobs.get(ANN, batch_id)
    assert await store.jobs.move(job, {"status": "failed"}, ends=True) == ""


async def test_files_are_counted_and_not_only_their_bytes(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_files=3) as (store, _, _):
        first = await upload(store, b"")
        await upload(store, b"")
        under_way = await store.files.open(ANN, FileMeta("f", "batch", 1), 1)
        with pytest.raises(Forbidden, match="3 files") as refused:
            await upload(store, b"")
        assert refused.value.code == "storage_limit_exceeded"
        await upload(store, b"", BOB)
        await store.files.open(ANN, FileMeta("out", "batch_output", 1), 1, FileId("file-output"))
        await store.files.abort(ANN, under_way)
        await store.files.delete(ANN, first)
        await upload(store, b"")


async def test_the_lines_of_a_batch_count_until_it_ends(redis_server: RedisServer) -> None:
    """Batches over one file each keep its lines: without a bound a tenant's room is its file times its batches."""
    async with batch_store(redis_server, max_stored_bytes=250) as (store, _, _):
        file_id = await upload(store, b"x" * 100)
        first = await begin(store, file_id)
        assert await store.files.stored_bytes(ANN) == 200
        with pytest.raises(Forbidden, match="250 bytes") as refused:
            await begin(store, file_id)
        assert refused.value.code == "storage_limit_exceeded"
        await end(store, first)
        assert await store.files.stored_bytes(ANN) == 100
        await end(store, await begin(store, file_id))
        await store.files.delete(ANN, file_id)
        assert await store.files.stored_bytes(ANN) == 0


async def test_batches_that_have_not_ended_are_bounded(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_unfinished=2) as (store, _, _):
        file_id = await upload(store, b"x")
        first, _ = await begin(store, file_id), await begin(store, file_id)
        with pytest.raises(QuotaExceeded, match="2 batches") as refused:
            await begin(store, file_id)
        assert refused.value.retry_after_s
        await end(store, first)
        await begin(store, file_id)


async def test_the_oldest_ended_batches_go_and_leave_nothing(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_jobs=3) as (store, redis, prefix):
        file_id = await upload(store, b"x")
        running = await begin(store, file_id)
        ended = [await begin(store, file_id) for _ in range(2)]
        for batch_id in ended:
            await store.items.add_dead_letter(ANN, batch_id, 1, "c", "poison", "reason")
            await end(store, batch_id)
        newest = await begin(store, file_id)
        listed, _ = await store.jobs.page(ANN)
        assert [job.batch_id for job in listed] == [newest, ended[1], running]
        with pytest.raises(NotFound):
            await store.jobs.get(ANN, ended[0])
        assert ended[0].encode() not in await everything(redis, prefix)


# ---------------------------------------------------------------------------------------------- the queue


async def queued(store: BatchStore, number: int, result: ItemResult) -> None:
    await store.queue.slot(ANN, f"seq-{number}", f"c{number}", 5)
    await store.items.put_result(ANN, QUEUE_BATCH, number, result, epoch=0)


async def test_queued_lines_and_their_results_count_as_stored(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_stored_bytes=400) as (store, _, _):
        for number in (1, 2):
            await store.queue.slot(ANN, f"seq-{number}", f"c{number}", 5)
        assert await store.queue.put_body(ANN, 1, item(1)) == ""
        held = await store.files.stored_bytes(ANN)
        assert held > 0
        assert await store.queue.put_body(ANN, 1, item(1)) == ""
        assert await store.files.stored_bytes(ANN) == held
        result = ItemResult("c1", 200, "req-1", b"x" * 300)
        claim = await store.items.claim(ANN, QUEUE_BATCH, 1)
        await store.items.put_result(ANN, QUEUE_BATCH, 1, result, epoch=claim.epoch)
        assert 300 < await store.files.stored_bytes(ANN) < 400
        assert await store.queue.put_body(ANN, 2, item(2)) == "over_storage"
        with pytest.raises(Forbidden):
            await upload(store, b"x" * 100)
        assert await store.queue.trim(ANN, int(time.time()) + 60) == 1
        assert await store.files.stored_bytes(ANN) == 0
        assert await store.queue.put_body(ANN, 2, item(2)) == ""


async def test_a_flood_of_bad_lines_pushes_its_own_oldest_results_out(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_queue_results=5) as (store, redis, prefix):
        for number in range(1, 9):
            await queued(store, number, answer(number, 400))
        assert await store.queue.trim(ANN) == 3
        assert await store.queue.trim(ANN) == 0
        found, _ = await store.queue.results(ANN, "", 100)
        assert [one.number for one in found] == [4, 5, 6, 7, 8]
        assert await store.queue.waiting(ANN) == 0
        assert b"seq-3" not in await everything(redis, prefix)


# ---------------------------------------------------------------------------------------------- validation


async def test_many_batches_of_one_tenant_do_not_keep_anothers_waiting(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    go_on = asyncio.Event()
    validate = runner_module.validate

    async def held(store: BatchStore, job: object, *more: object) -> None:
        began.append(job.tenant)  # type: ignore[attr-defined]
        await go_on.wait()
        await validate(store, job, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "validate", held)
    async with batch_world(redis_server) as world:
        many = [await world.create(lines(1)) for _ in range(6)]
        async with world.runner():
            await until(lambda: began.count(ANN) == runner_module.VALIDATE_AT_ONCE)
            other = await world.create(lines(1), BOB)
            await until(lambda: BOB in began)
            assert began.count(ANN) == runner_module.VALIDATE_AT_ONCE
            go_on.set()
            for job in (*many, other):
                await world.until(job, "completed")


async def listed(desk: JobDesk, after: str = "") -> tuple[list[BatchId], bool]:
    page = await desk.answer(Delivery("x", BatchList(tenant=ANN, after=after, limit=100), Context()))
    assert isinstance(page, BatchPage)
    return [info.batch_id for info in page.batches], page.has_more


async def test_a_record_that_goes_while_its_page_is_read_is_no_error(redis_server: RedisServer) -> None:
    async with batch_world(redis_server) as world, world.runner() as (_, desk):
        assert await listed(desk) == ([], False)
        first, gone, last = [(await world.create(lines(1))).batch_id for _ in range(3)]
        assert await listed(desk) == ([last, gone, first], False)
        await world.redis.execute("UNLINK", f"{world.prefix}:{{{ANN}}}:job:{gone}")
        assert await listed(desk) == ([last, first], False)


async def test_a_page_ends_early_rather_than_be_too_long(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "MAX_PAGE_BYTES", 1000)
    async with batch_world(redis_server) as world, world.runner() as (_, desk):
        jobs = [await world.create(lines(1), metadata={"k": "x" * 400}) for _ in range(3)]
        found, more, pages = list[BatchId](), True, 0
        while more:
            page, more = await listed(desk, found[-1] if found else "")
            found, pages = found + page, pages + 1
        assert found == [job.batch_id for job in jobs[::-1]]
        assert pages > 1


async def test_a_tenant_has_so_many_requests_open() -> None:
    requests, at_work, go_on = OpenRequests(2, 3), [0], asyncio.Event()

    async def ask(tenant: TenantId) -> int:
        async with requests.one(tenant):
            at_work[0] += 1
            await go_on.wait()
            return at_work[0]

    held = [asyncio.create_task(ask(ANN)) for _ in range(3)]
    await until(lambda: at_work[0] == 2)
    with pytest.raises(Overloaded, match="3 requests"):
        await ask(ANN)
    held.append(asyncio.create_task(ask(BOB)))
    await until(lambda: at_work[0] == 3)
    go_on.set()
    assert (await asyncio.gather(*held))[2] == 4
    assert await ask(ANN) == 5


async def test_redis_away_is_no_fault_of_a_batch(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    away = runner_module.VALIDATION_TRIES + 1
    validate = runner_module.validate

    async def sometimes(*given: object) -> None:
        nonlocal away
        away -= 1
        if away >= 0:
            raise Unavailable("redis: away")
        await validate(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_module, "validate", sometimes)
    async with batch_world(redis_server) as world:
        job = await world.create(lines(1))
        async with world.runner(pause_s=0.01):
            done = await world.until(job, "completed", "failed")
    assert (done.status, done.errors) == ("completed", ())
