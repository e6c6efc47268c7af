"""Batches from validation to their files, over crashes, cancels and expiry, with a fake executor on a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from opentelemetry.context import Context

from services.batch.files import FileDesk
from services.batch.item_queue import ITEM_STREAM, durable_of
from services.batch.jobs import JobDesk
from services.batch.records import QUEUE_BATCH, FileMeta, ItemResult, Job
from services.batch.runner import BatchRunner
from services.batch.runner_config import RunnerConfig
from shared.bus.bus import Delivery
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.batch_messages import FILE_CHUNK_BYTES, BatchItem
from shared.contracts.errors import BodyTooLarge, Conflict, InvalidInput, NotFound
from shared.contracts.ids import BatchId, FileId, TenantId
from shared.security import keeping
from tests.pipeline.batch_support import (
    ANN,
    BOB,
    ENDPOINT,
    MODEL,
    BatchWorld,
    answer,
    batch_world,
    eventually,
    input_line,
    item,
    lines,
    upload,
)
from tests.servers import RedisServer


@pytest.fixture
async def world(redis_server: RedisServer) -> AsyncIterator[BatchWorld]:
    async with batch_world(redis_server) as world:
        yield world


async def ask(desk: JobDesk | FileDesk, message: msgspec.Struct) -> Any:
    return await desk.answer(Delivery("subject", message, Context()))


async def both_files(world: BatchWorld, job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of output and error file; each custom_id must be in them once, and counts must agree."""
    output, errors = await world.content(job, job.output_file_id), await world.content(job, job.error_file_id)
    ids = Counter(line["custom_id"] for line in output + errors)
    assert ids == Counter(f"c{number}" for number in range(1, job.total + 1))
    assert (len(output), len(errors)) == (job.completed, job.failed)
    return output, errors


async def delivered(world: BatchWorld, count: int) -> None:
    async def enough() -> bool:
        return len(world.executor.deliveries) >= count

    await eventually(enough)


async def completed(world: BatchWorld, job: Job, count: int) -> None:
    async def enough() -> bool:
        return (await world.store.jobs.get(ANN, job.batch_id)).completed >= count

    await eventually(enough)


async def test_a_batch_runs_to_its_files(world: BatchWorld) -> None:
    world.executor.respond = lambda item: answer(item.number, 400 if item.number == 3 else 200)
    file_id = await upload(world.store, lines(120))
    async with world.runner() as (_, desk):
        create = b.BatchCreate(
            tenant=ANN, input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h", metadata={"k": "v"}
        )
        info: b.BatchInfo = await ask(desk, create)
        assert (info.status, info.total, info.metadata) == ("validating", 0, {"k": "v"})
        assert info.expires_s - info.created_s == 86400
        job = await world.until(await world.store.jobs.get(ANN, info.batch_id), "completed")
    output, errors = await both_files(world, job)
    assert (job.completed, job.failed, job.model) == (119, 1, MODEL)
    assert (job.prompt_tokens, job.completion_tokens) == (1200, 600)
    assert errors[0]["custom_id"] == "c3"
    assert output[0]["response"]["status_code"] == 200
    times = [job.spec.created_s, job.in_progress_s, job.finalizing_s, job.completed_s]
    assert times == sorted(times)
    assert times[0] > 0
    file = await world.store.files.get(ANN, job.output_file_id)
    assert (file.meta.purpose, file.meta.expires_s) == ("batch_output", 0)
    # one claim each: nothing ran twice
    assert len(world.executor.claims) == 120


async def test_no_file_where_there_would_be_no_line(world: BatchWorld) -> None:
    async with world.runner():
        good = await world.until(await world.create(lines(2)), "completed")
        assert good.output_file_id
        assert not good.error_file_id
        world.executor.respond = lambda item: answer(item.number, 400)
        bad = await world.until(await world.create(lines(2)), "completed")
        assert not bad.output_file_id
        assert bad.error_file_id


async def test_a_bad_line_fails_the_batch_and_nothing_runs(world: BatchWorld) -> None:
    data = lines(300) + b"{broken\n" + input_line("c1") + b"\n" + lines(5, model="gpt", start=400)
    async with world.runner():
        job = await world.until(await world.create(data), "failed")
    assert [(error.line, error.code) for error in job.errors] == [
        (301, "invalid_json_line"),
        (302, "duplicate_custom_id"),
        *((number, "model_not_found") for number in range(303, 308)),
    ]
    assert (job.total, job.completed, job.failed, job.failed_s > 0) == (0, 0, 0, True)
    assert (job.output_file_id, job.error_file_id) == ("", "")
    assert world.executor.deliveries == []
    keys = await world.redis.execute("KEYS", f"{world.prefix}:*job:{job.batch_id}*")
    assert len(keys) == 1
    await world.store.files.delete(ANN, job.spec.input_file_id)


async def test_models_closed_to_the_tenant_are_unknown_to_it(world: BatchWorld) -> None:
    async with world.runner():
        job = await world.until(await world.create(lines(1), models=("another",)), "failed")
    assert [error.code for error in job.errors] == ["model_not_found"]
    assert MODEL not in job.errors[0].message


async def test_a_batch_over_the_token_limit_fails_and_one_that_fits_runs(world: BatchWorld) -> None:
    async with world.runner():
        job = await world.until(await world.create(lines(3), enqueued_tokens_limit=5), "failed")
        assert [error.code for error in job.errors] == ["token_limit_exceeded"]
        assert await world.store.jobs.enqueued_tokens(ANN) == 0
        await world.until(await world.create(lines(3), enqueued_tokens_limit=1000), "completed")
        assert await world.store.jobs.enqueued_tokens(ANN) == 0


async def test_a_line_far_too_long_for_the_model_is_left_to_be_refused_when_it_runs(world: BatchWorld) -> None:
    async with world.runner():
        job = await world.until(await world.create(input_line("c1", prompt="word " * 9000)), "completed")
    assert job.total == 1


async def test_a_window_of_items_is_on_the_queue_at_once(world: BatchWorld) -> None:
    world.executor.respond = lambda item: None
    async with world.runner():
        job = await world.until(await world.create(lines(200)), "in_progress")
        await delivered(world, 50)
        await asyncio.sleep(0.3)
        assert len(world.executor.deliveries) == 50
        assert (await world.store.jobs.get(ANN, job.batch_id)).enqueued == 50
        # room comes with results
        for number in range(1, 31):
            await world.store.items.put_result(ANN, job.batch_id, number, answer(number), epoch=1)
        await delivered(world, 80)


async def test_cancel_in_mid_run_ends_in_files_that_hold_every_line_once(world: BatchWorld) -> None:
    world.executor.respond = lambda item: answer(item.number) if item.number <= 5 else None
    async with world.runner() as (_, desk):
        job = await world.create(lines(25))
        await world.until(job, "in_progress")
        await completed(world, job, 5)
        info: b.BatchInfo = await ask(desk, b.BatchCancel(tenant=ANN, batch_id=job.batch_id))
        assert info.status in ("cancelling", "cancelled")
        done = await world.until(job, "cancelled", timeout_s=10)
        output, errors = await both_files(world, done)
        assert {line["custom_id"] for line in output} == {f"c{number}" for number in range(1, 6)}
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert done.completion_tokens == 25
        assert done.cancelling_s
        assert done.cancelled_s
        # what still ran comes too late
        late = await world.store.items.put_result(ANN, job.batch_id, 9, answer(9), epoch=1)
        assert late[0].value == "ended"
        with pytest.raises(Conflict):
            await ask(desk, b.BatchCancel(tenant=ANN, batch_id=job.batch_id))
        assert await world.store.jobs.enqueued_tokens(ANN) == 0


async def test_a_cancel_before_anything_ran_leaves_error_lines_or_nothing(world: BatchWorld) -> None:
    validating = await world.create(lines(3))
    assert await world.store.jobs.move(validating, {"status": "cancelling", "cancelling_s": 1}) == ""
    async with world.runner() as (_, desk):
        done = await world.until(validating, "cancelled")
        assert (done.total, done.output_file_id, done.error_file_id) == (0, "", "")
        again = await world.store.jobs.get(ANN, validating.batch_id)
        assert again.finished == 0
        with pytest.raises(NotFound):
            await ask(desk, b.BatchCancel(tenant=BOB, batch_id=validating.batch_id))
        with pytest.raises(NotFound):
            await ask(desk, b.BatchCancel(tenant=ANN, batch_id=QUEUE_BATCH))


async def test_a_batch_expires_with_what_it_has(world: BatchWorld) -> None:
    world.executor.respond = lambda item: answer(item.number) if item.number <= 2 else None
    async with world.runner(), world.runner("p2"):
        job = await world.create(lines(6), expires_s=int(time.time()) + 3)
        done = await world.until(job, "expired")
    output, errors = await both_files(world, done)
    assert len(output) == 2
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert done.expired_s >= job.spec.expires_s
    assert done.finalizing_s


async def test_a_batch_whose_time_is_up_before_it_is_validated_expires(world: BatchWorld) -> None:
    async with world.runner():
        done = await world.until(await world.create(lines(6), expires_s=1), "expired")
    assert (done.total, done.output_file_id, done.error_file_id) == (0, "", "")


async def test_output_files_expire_from_their_own_creation_and_are_swept(world: BatchWorld) -> None:
    async with world.runner():
        job = await world.until(await world.create(lines(2), output_expires_after_s=3600), "completed")
        file = await world.store.files.get(ANN, job.output_file_id)
        assert file.meta.expires_s == file.meta.created_s + 3600
        gone = await upload(world.store, b"x", expires_s=int(time.time()) - 1)

        async def swept() -> bool:
            files, _ = await world.store.files.page(ANN, purpose="batch")
            return gone not in [file.file_id for file in files]

        await eventually(swept)


async def test_results_of_the_queue_end_with_their_tenants_retention(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "LEAST_S", 0)
    queue = world.store.queue
    for tenant, retention_s in ((ANN, 0), (BOB, 3600)):
        slot = await queue.slot(tenant, "1-1", "c", 1)
        await world.store.items.put_result(tenant, QUEUE_BATCH, slot.number, answer(1), epoch=0)
        await queue.note_retention(tenant, retention_s)

    async def gone() -> bool:
        return (await queue.results(ANN, "", 10))[0] == []

    async with world.runner(sweep_s=0.05):
        await eventually(gone)
    assert len((await queue.results(BOB, "", 10))[0]) == 1


async def test_a_lowered_retention_ends_results_of_a_tenant_that_sends_no_more_lines(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "LEAST_S", 0)
    queue = world.store.queue
    slot = await queue.slot(ANN, "1-1", "c", 1)
    await world.store.items.put_result(ANN, QUEUE_BATCH, slot.number, answer(1), epoch=0)
    await queue.note_retention(ANN, 3600)

    async def hear(tenant: TenantId) -> None:
        await queue.note_retention(tenant, 0)

    async def gone() -> bool:
        return (await queue.results(ANN, "", 10))[0] == []

    config = replace(world.config, sweep_s=0.05)
    async with BatchRunner(world.store, world.bus, world.models, config, "p1", hear=hear):
        await eventually(gone)


# ---------------------------------------------------------------------------------------------- crashes


STEPS = [
    *("jobs.move", "items.put_bodies", "jobs.set_enqueued", "items.end", "files.open", "files.append", "files.close"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("cancel", [False, True], ids=["to the end", "cancelled"])
async def test_a_process_that_dies_at_any_write_is_followed_by_one_that_ends_the_batch(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch, step: str, after: bool, cancel: bool
) -> None:
    """At each use of `step` a runner freezes for good, before or after the write; the next one takes over."""
    if cancel:
        world.executor.respond = lambda item: answer(item.number) if item.number % 2 else None
    part, name = step.split(".")
    target = getattr(world.store, part)
    real = getattr(target, name)
    frozen = asyncio.Event()
    deaths = 0

    async def dies(*arguments: Any, **options: Any) -> Any:
        nonlocal deaths
        deaths += 1
        done = await real(*arguments, **options) if after or deaths > 6 else None
        if deaths <= 6:
            frozen.set()
            await asyncio.Event().wait()
        return done

    job = await world.create(lines(60))
    monkeypatch.setattr(target, name, dies)
    for life in range(12):
        async with world.runner(f"p{life}", lease_s=0.5) as (_, desk):
            frozen.clear()
            async with asyncio.timeout(15):
                while not frozen.is_set():
                    now = await world.store.jobs.get(ANN, job.batch_id)
                    if now.status in ("completed", "cancelled"):
                        break
                    if cancel and now.status == "in_progress" and now.completed > 3:
                        await real_cancel(world, desk, job)
                    await asyncio.sleep(0.02)
        if now.status in ("completed", "cancelled"):
            break
    done = await world.until(job, "cancelled" if cancel else "completed")
    output, _ = await both_files(world, done)
    assert done.completion_tokens == 5 * len(output)
    assert deaths or step == "items.end"
    names = [file.meta.filename for file in (await world.store.files.page(ANN, purpose="batch_output"))[0]]
    assert len(names) == len(set(names)) == bool(done.output_file_id) + bool(done.error_file_id)


async def real_cancel(world: BatchWorld, desk: JobDesk, job: Job) -> None:
    """A cancel that no death of this test stops."""
    now = await world.store.jobs.get(ANN, job.batch_id)
    if now.status == "in_progress":
        key = f"{world.prefix}:{{{ANN}}}:job:{job.batch_id}"
        await world.redis.execute("HSET", key, "status", "cancelling", "cancelling_s", int(time.time()))


async def test_one_runner_drives_a_batch_though_many_run(world: BatchWorld) -> None:
    async with world.runner("p1"), world.runner("p2"), world.runner("p3"):
        jobs = [await world.create(lines(30)) for _ in range(4)]
        for job in jobs:
            await both_files(world, await world.until(job, "completed"))
    assert len(world.executor.deliveries) == 120
    assert len(world.executor.claims) == 120


async def test_a_runner_that_lost_its_lease_lets_go_and_another_goes_on(world: BatchWorld) -> None:
    world.executor.deaf = True
    job = await world.create(lines(10))
    lease = f"{world.prefix}:{{{ANN}}}:job:{job.batch_id}:lease"
    async with world.runner("frozen") as (runner, _):
        await delivered(world, 10)
        # When its lease ran out while it was frozen, and another process took it
        await world.redis.execute("SET", lease, "another", "PX", 60_000)

        async def let_go() -> bool:
            return runner.driving == 0

        await eventually(let_go)
        # Then it does not take it back, nor end the batch
        assert await world.redis.execute("GET", lease) == b"another"
        for number in range(1, 11):
            await world.store.items.put_result(ANN, job.batch_id, number, answer(number), epoch=0)
        await asyncio.sleep(0.2)
        assert (await world.store.jobs.get(ANN, job.batch_id)).status == "in_progress"
        # Until the other one is gone too
        await world.redis.execute("DEL", lease)
        await both_files(world, await world.until(job, "completed"))


async def test_items_the_queue_lost_are_put_there_again(world: BatchWorld) -> None:
    world.executor.deaf = True
    job = await world.create(lines(10))
    async with world.runner(stall_s=0.5):
        await delivered(world, 10)
        world.executor.deaf = False
        await both_files(world, await world.until(job, "completed"))


async def test_what_an_empty_queue_forgot_is_put_there_again_soon(world: BatchWorld) -> None:
    """A NATS server that came back without its store: the consumer is there, and has nothing to do."""
    await world.bus.consume(ITEM_STREAM, subjects.batch_item(ANN), BatchItem, nothing, durable=durable_of(ANN))
    world.executor.deaf = True
    job = await world.create(lines(10))
    await queued_line(world, 1)
    async with world.runner(look_s=0.1, stall_s=3600.0, sweep_s=0.1):
        await delivered(world, 10)
        world.executor.deaf = False
        await both_files(world, await world.until(job, "completed"))
        await eventually(lambda: no_line_waits(world))


async def test_items_that_only_wait_are_not_put_on_the_queue_twice(world: BatchWorld) -> None:
    hold = asyncio.Event()

    async def waits(delivery: Delivery) -> None:
        await hold.wait()

    await world.bus.consume(ITEM_STREAM, subjects.batch_item(ANN), BatchItem, waits, durable=durable_of(ANN))
    world.executor.deaf = True
    await world.create(lines(10))
    await queued_line(world, 1)
    async with world.runner(look_s=0.05, stall_s=3600.0, sweep_s=0.05):
        await delivered(world, 10)
        await asyncio.sleep(0.5)
        assert len(world.executor.deliveries) == 10
    hold.set()


async def test_one_process_looks_after_queued_lines(world: BatchWorld) -> None:
    await world.bus.consume(ITEM_STREAM, subjects.batch_item(ANN), BatchItem, nothing, durable=durable_of(ANN))
    world.executor.deaf = True
    await queued_line(world, 1)
    lease = f"{world.prefix}:{{{ANN}}}:job:{QUEUE_BATCH}:lease"
    await world.redis.execute("SET", lease, "another", "PX", 60_000)
    async with world.runner(look_s=0.05, stall_s=3600.0, sweep_s=0.05):
        await asyncio.sleep(0.5)
        assert not world.executor.deliveries
        await world.redis.execute("DEL", lease)
        await delivered(world, 1)


async def nothing(delivery: Delivery) -> None:
    """Acknowledges."""


async def queued_line(world: BatchWorld, number: int) -> None:
    """A line of the queue, stored but not on it."""
    slot = await world.store.queue.slot(ANN, f"message-{number}", f"c{number}", 1)
    assert slot.number == number
    assert await world.store.queue.put_body(ANN, number, item(number)) == ""


async def no_line_waits(world: BatchWorld) -> bool:
    return await world.store.queue.waiting(ANN) == 0


async def test_a_broken_input_chunk_fails_the_batch_in_the_end(world: BatchWorld) -> None:
    job = await world.create(lines(10))
    key = f"{world.prefix}:{{{ANN}}}:file:{job.spec.input_file_id}:data"
    await world.redis.execute("HSET", key, "0", b"tampered")
    async with world.runner():
        done = await world.until(job, "failed")
    assert [error.code for error in done.errors] == ["internal_error"]


# ---------------------------------------------------------------------------------------------- the desks


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": FileId("file-none")}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_is_refused_at_once(world: BatchWorld, changes: dict[str, Any], param: str) -> None:
    file_id = await upload(world.store, lines(1))
    async with world.runner() as (_, desk):
        create = b.BatchCreate(tenant=ANN, input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h")
        with pytest.raises(InvalidInput) as caught:
            await ask(desk, msgspec.structs.replace(create, **changes))
        assert caught.value.param == param
        with pytest.raises(NotFound) as missing:
            await ask(desk, msgspec.structs.replace(create, tenant=BOB))
        assert missing.value.param == "input_file_id"
        assert (await ask(desk, b.BatchList(tenant=ANN))).batches == ()


async def test_an_output_file_is_no_input(world: BatchWorld) -> None:
    output = await world.store.files.open(ANN, FileMeta("o", "batch_output", 1), 1)
    await world.store.files.close(ANN, output)
    async with world.runner() as (_, desk):
        with pytest.raises(InvalidInput, match="purpose"):
            await ask(desk, b.BatchCreate(tenant=ANN, input_file_id=output, endpoint=ENDPOINT, completion_window="24h"))


async def test_batches_are_listed_newest_first_and_only_to_their_tenant(world: BatchWorld) -> None:
    jobs = [await world.create(lines(1)) for _ in range(3)]
    async with world.runner() as (_, desk):
        page: b.BatchPage = await ask(desk, b.BatchList(tenant=ANN, limit=2))
        assert [info.batch_id for info in page.batches] == [jobs[2].batch_id, jobs[1].batch_id]
        assert page.has_more
        rest: b.BatchPage = await ask(desk, b.BatchList(tenant=ANN, after=jobs[1].batch_id))
        assert [info.batch_id for info in rest.batches] == [jobs[0].batch_id]
        assert (await ask(desk, b.BatchList(tenant=BOB))).batches == ()
        with pytest.raises(NotFound):
            await ask(desk, b.BatchGet(tenant=BOB, batch_id=jobs[0].batch_id))
        with pytest.raises(NotFound):
            await ask(desk, b.BatchGet(tenant=ANN, batch_id=BatchId("../x")))


async def test_files_over_the_bus(world: BatchWorld) -> None:
    desk = FileDesk(world.store, RunnerConfig(max_file_bytes=FILE_CHUNK_BYTES + 5))
    opened: b.FileOpened = await ask(desk, b.FileOpen(tenant=ANN, filename="a", purpose="batch", expires_after_s=60))
    file_id = opened.file_id
    chunk = b"x" * FILE_CHUNK_BYTES
    await ask(desk, b.FileAppend(tenant=ANN, file_id=file_id, number=0, data=chunk))
    with pytest.raises(BodyTooLarge):
        await ask(desk, b.FileAppend(tenant=ANN, file_id=file_id, number=1, data=b"123456"))
    with pytest.raises(NotFound):
        await ask(desk, b.FileAppend(tenant=BOB, file_id=file_id, number=1, data=b"1"))
    await ask(desk, b.FileAppend(tenant=ANN, file_id=file_id, number=1, data=b"12345"))
    info: b.FileInfo = await ask(desk, b.FileClose(tenant=ANN, file_id=file_id))
    assert (info.num_bytes, info.expires_s - info.created_s) == (FILE_CHUNK_BYTES + 5, 60)
    tail: b.FileBytes = await ask(desk, b.FileRead(tenant=ANN, file_id=file_id, offset=FILE_CHUNK_BYTES))
    assert (tail.data, tail.num_bytes) == (b"12345", FILE_CHUNK_BYTES + 5)
    page: b.FilePage = await ask(desk, b.FileList(tenant=ANN))
    assert page.files == (info,)
    assert await ask(desk, b.FileDelete(tenant=ANN, file_id=file_id)) == b.FileDeleted(file_id=file_id)
    for wrong in (
        b.FileOpen(tenant=ANN, filename="a", purpose="fine-tune"),
        b.FileOpen(tenant=ANN, filename="", purpose="batch"),
        b.FileRead(tenant=ANN, file_id=file_id, offset=-1),
        b.FileAppend(tenant=ANN, file_id=file_id, number=-1, data=b""),
        b.FileList(tenant=ANN, limit=0),
    ):
        with pytest.raises(InvalidInput):
            await ask(desk, wrong)


async def test_an_unfinished_upload_is_given_up(world: BatchWorld) -> None:
    desk = FileDesk(world.store, world.config)
    opened: b.FileOpened = await ask(desk, b.FileOpen(tenant=ANN, filename="a", purpose="batch"))
    await ask(desk, b.FileAppend(tenant=ANN, file_id=opened.file_id, number=0, data=b"x"))
    await ask(desk, b.FileClose(tenant=ANN, file_id=opened.file_id, abort=True))
    assert await world.store.files.stored_bytes(ANN) == 0


async def test_results_of_any_shape_make_lines(world: BatchWorld) -> None:
    made = ItemResult("", error_code="poison", error_message="its worker died three times")
    world.executor.respond = lambda item: made
    async with world.runner():
        job = await world.until(await world.create(lines(2)), "completed")
    _, errors = await both_files(world, job)
    assert [line["error"]["code"] for line in errors] == ["poison", "poison"]
