"""The batch service's state in a real Redis: files, written-once results, counts, leases, sealing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence

import pytest

from services.batch import file_store, item_store
from services.batch.file_store import UPLOAD_IDLE_S
from services.batch.records import QUEUE_BATCH, FileMeta, JobSpec, Put
from services.batch.store import BatchStore
from shared.contracts.batch_messages import FILE_CHUNK_BYTES, BatchError
from shared.contracts.errors import Conflict, Forbidden, InvalidInput, NotFound
from shared.contracts.ids import BatchId, FileId
from tests.pipeline.batch_support import (
    ANN,
    BOB,
    ENDPOINT,
    answer,
    batch_store,
    everything,
    item,
    job_in_progress,
    upload,
)
from tests.servers import RedisServer


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[BatchStore]:
    async with batch_store(redis_server) as (store, _, _):
        yield store


# ---------------------------------------------------------------------------------------------- files


async def test_a_file_comes_back_as_it_was_from_any_offset(store: BatchStore) -> None:
    data = os.urandom(2 * FILE_CHUNK_BYTES + 17)
    file_id = await upload(store, data)
    file = await store.files.get(ANN, file_id)
    assert (file.num_bytes, file.ready, file.meta.filename) == (len(data), True, "in.jsonl")
    assert b"".join([chunk async for chunk in store.files.chunks(ANN, file_id)]) == data
    for offset in (0, 1, FILE_CHUNK_BYTES - 1, FILE_CHUNK_BYTES, len(data) - 1, len(data), len(data) + 1):
        piece = await store.files.read(ANN, file_id, offset)
        assert data[offset:].startswith(piece)
        assert bool(piece) == (offset < len(data))


async def test_an_upload_is_no_file_until_it_is_closed(store: BatchStore) -> None:
    file_id = await store.files.open(ANN, FileMeta("f", "batch", 1), 1)
    await store.files.append(ANN, file_id, 0, b"abc", 1)
    with pytest.raises(NotFound):
        await store.files.get(ANN, file_id)
    assert await store.files.page(ANN) == ([], False)
    await store.files.close(ANN, file_id)
    await store.files.close(ANN, file_id)
    assert [file.file_id for file in (await store.files.page(ANN))[0]] == [file_id]
    with pytest.raises(NotFound):
        await store.files.append(ANN, file_id, 1, b"more", 1)


async def test_chunks_come_in_order_and_the_same_one_twice_counts_once(store: BatchStore) -> None:
    file_id = await store.files.open(ANN, FileMeta("f", "batch", 1), 1)
    with pytest.raises(Conflict):
        await store.files.append(ANN, file_id, 1, b"x", 1)
    full = b"y" * FILE_CHUNK_BYTES
    assert await store.files.append(ANN, file_id, 0, full, 1) == len(full)
    assert await store.files.append(ANN, file_id, 0, full, 1) == len(full)
    assert await store.files.append(ANN, file_id, 1, b"short", 1) == len(full) + 5
    with pytest.raises(Conflict):
        await store.files.append(ANN, file_id, 2, b"behind a short one", 1)
    assert await store.files.stored_bytes(ANN) == len(full) + 5


async def test_another_tenants_file_does_not_exist(store: BatchStore) -> None:
    file_id = await upload(store, b"abc")
    for call in (store.files.get(BOB, file_id), store.files.delete(BOB, file_id), store.files.close(BOB, file_id)):
        with pytest.raises(NotFound):
            await call
    assert await store.files.chunk(BOB, file_id, 0) == b""
    assert await store.files.page(BOB) == ([], False)


@pytest.mark.parametrize("name", ["", "a:b", "../x", "{ann}:job", "x" * 65, "file-\n"])
async def test_what_is_no_id_is_not_found(store: BatchStore, name: str) -> None:
    with pytest.raises(NotFound):
        await store.files.get(ANN, FileId(name))
    with pytest.raises(NotFound):
        await store.jobs.get(ANN, BatchId(name))
    with pytest.raises(NotFound):
        await store.files.append(ANN, FileId(name), 0, b"x", 1)


async def test_pages_go_by_age_both_ways_and_by_purpose(store: BatchStore) -> None:
    ids = [await upload(store, b"x", name=f"{number}") for number in range(5)]
    output = await store.files.open(ANN, FileMeta("out", "batch_output", 1), 1)
    await store.files.close(ANN, output)

    async def page(**options: object) -> tuple[list[FileId], bool]:
        files, more = await store.files.page(ANN, **options)  # type: ignore[arg-type]
        return [file.file_id for file in files], more

    assert await page() == ([output, *reversed(ids)], False)
    assert await page(purpose="batch", limit=2) == ([ids[4], ids[3]], True)
    assert await page(purpose="batch", limit=3, after=ids[3]) == ([ids[2], ids[1], ids[0]], False)
    assert await page(limit=2, after=ids[1], ascending=True) == ([ids[2], ids[3]], True)
    assert await page(purpose="fine-tune") == ([], False)
    with pytest.raises(NotFound):
        await page(after="file-unknown")


async def test_a_deleted_file_leaves_nothing(redis_server: RedisServer) -> None:
    async with batch_store(redis_server) as (store, redis, prefix):
        file_id = await upload(store, b"abc")
        given_up = await store.files.open(ANN, FileMeta("f", "batch", 1), 1)
        await store.files.append(ANN, given_up, 0, b"abc", 1)
        await store.files.delete(ANN, file_id)
        await store.files.abort(ANN, given_up)
        with pytest.raises(NotFound):
            await store.files.delete(ANN, file_id)
        assert await store.files.stored_bytes(ANN) == 0
        left = {key.decode().removeprefix(f"{prefix}:") for key in await redis.execute("KEYS", f"{prefix}:*")}
        assert left == {"tenants", "{ann}:stored", "{ann}:serial"}


async def test_expired_files_and_abandoned_uploads_are_swept(store: BatchStore) -> None:
    kept, expired = await upload(store, b"x", expires_s=5000), await upload(store, b"x", expires_s=2000)
    await store.files.open(ANN, FileMeta("f", "batch", 1), 1000)
    assert await store.files.sweep(ANN, 1999) == 0
    assert await store.files.sweep(ANN, 2000) == 1
    assert await store.files.sweep(ANN, 1000 + UPLOAD_IDLE_S) == 1
    assert [file.file_id for file in (await store.files.page(ANN))[0]] == [kept]
    assert expired != kept


async def test_expired_files_that_batches_read_keep_no_others_from_being_swept(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "SWEEP", 2)
    for _ in range(3):
        file_id = await upload(store, b"x", expires_s=2000)
        spec = JobSpec(endpoint=ENDPOINT, created_s=1000, expires_s=9000, input_file_id=file_id)
        await store.jobs.create(ANN, spec, "validating")
    unread = await upload(store, b"x", expires_s=2001)
    assert await store.files.sweep(ANN, 2001) == 1
    assert not await store.files.is_ready(ANN, unread)
    assert len((await store.files.page(ANN))[0]) == 3


async def test_long_bodies_are_not_read_at_once(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_store, "READ_BYTES", 100)
    job = await job_in_progress(store, 5)
    await store.items.put_result(ANN, job.batch_id, 2, answer(2), epoch=0)
    read = store.items._many
    groups: list[Sequence[int]] = []

    async def noted(key: str, numbers: Sequence[int]) -> dict[int, bytes]:
        groups.append(numbers)
        return await read(key, numbers)

    monkeypatch.setattr(store.items, "_many", noted)
    names = await store.items.unfinished(ANN, job.batch_id, range(1, 7))
    assert names == {number: f"c{number}" for number in (1, 3, 4, 5)}
    assert groups == [[1], [3], [4], [5]]
    assert await store.items.unfinished(ANN, job.batch_id, []) == {}


async def test_the_storage_limit_counts_what_is_there(redis_server: RedisServer) -> None:
    async with batch_store(redis_server, max_stored_bytes=10) as (store, _, _):
        first = await upload(store, b"123456")
        second = await store.files.open(ANN, FileMeta("f", "batch", 1), 1)
        with pytest.raises(Forbidden, match="10 bytes"):
            await store.files.append(ANN, second, 0, b"12345", 1)
        await store.files.append(ANN, second, 0, b"12345", 1, limited=False)
        await store.files.delete(ANN, first)
        await upload(store, b"12345")


# ---------------------------------------------------------------------------------------------- batches


async def test_a_batch_keeps_its_input_file_until_it_ends(store: BatchStore) -> None:
    job = await job_in_progress(store)
    with pytest.raises(Conflict):
        await store.files.delete(ANN, job.spec.input_file_id)
    assert await store.jobs.move(job, {"status": "completed", "completed_s": 9}, ends=True) == ""
    await store.files.delete(ANN, job.spec.input_file_id)
    ended = await store.jobs.get(ANN, job.batch_id)
    assert (ended.status, ended.completed_s, ended.spec.metadata) == ("completed", 9, {"a": "b"})
    assert [pair async for pair in store.jobs.active()] == []


async def test_a_batch_over_a_missing_file_is_refused(store: BatchStore) -> None:
    job = await job_in_progress(store)
    await store.jobs.move(job, {"status": "completed"}, ends=True)
    await store.files.delete(ANN, job.spec.input_file_id)
    with pytest.raises(NotFound):
        await store.jobs.create(ANN, job.spec, "validating")
    assert len((await store.jobs.page(ANN))[0]) == 1


async def test_a_move_from_another_state_changes_nothing(store: BatchStore) -> None:
    job = await job_in_progress(store)
    assert await store.jobs.move(job, {"status": "cancelling", "cancelling_s": 5}) == ""
    assert await store.jobs.move(job, {"status": "finalizing", "finalizing_s": 6}) == "moved"
    assert (await store.jobs.get(ANN, job.batch_id)).status == "cancelling"


async def test_errors_and_dead_letters_are_kept_and_bounded(store: BatchStore) -> None:
    job = await job_in_progress(store)
    error = BatchError("invalid_json", "line 3: broken", 3, "body")
    await store.jobs.move(job, {"status": "failed", "errors": [error]}, ends=True)
    for number in range(1, 103):
        await store.items.add_dead_letter(ANN, job.batch_id, number, f"c{number}", "poison", "lost 3 times")
    found = await store.jobs.get(ANN, job.batch_id)
    assert found.errors == (error,)
    assert len(found.dead_letters) == 100
    assert found.dead_letters[0] == BatchError("poison", "lost 3 times", 102, "c102")
    assert found.info().dead_letters == found.dead_letters


async def test_one_process_at_a_time_has_the_lease(store: BatchStore) -> None:
    job = await job_in_progress(store)
    take = store.jobs.take_lease
    won = await asyncio.gather(*(take(ANN, job.batch_id, f"p{number}", 60) for number in range(8)))
    assert won.count(True) == 1
    owner = f"p{won.index(True)}"
    assert await take(ANN, job.batch_id, owner, 60)
    await store.jobs.give_lease(ANN, job.batch_id, "another")
    assert not await take(ANN, job.batch_id, "another", 60)
    await store.jobs.give_lease(ANN, job.batch_id, owner)
    assert await take(ANN, job.batch_id, "another", 0.05)
    await asyncio.sleep(0.1)
    assert await take(ANN, job.batch_id, owner, 60)


async def test_the_token_limit_counts_items_without_a_result(store: BatchStore) -> None:
    job = await job_in_progress(store, 3, tokens=10)
    assert await store.jobs.enqueued_tokens(ANN) == 30
    second = await store.jobs.get(ANN, await store.jobs.create(ANN, job.spec, "validating"))
    assert await store.jobs.move(second, {"status": "in_progress"}, tokens=71, tokens_limit=100) == "over_limit"
    assert await store.jobs.enqueued_tokens(ANN) == 30
    await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=0)
    assert await store.jobs.enqueued_tokens(ANN) == 20
    assert await store.jobs.move(second, {"status": "in_progress"}, tokens=80, tokens_limit=100) == ""
    assert await store.jobs.enqueued_tokens(BOB) == 0


# ---------------------------------------------------------------------------------------------- items


async def test_a_result_is_written_once_and_counts_go_with_it(store: BatchStore) -> None:
    job = await job_in_progress(store, 2)
    claim = await store.items.claim(ANN, job.batch_id, 1)
    assert (claim.status, claim.epoch, claim.done, claim.body) == ("in_progress", 1, False, item(1))

    async def put(settle: bytes) -> tuple[Put, int]:
        return await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=1, settle=settle)

    outcomes = await asyncio.gather(*(put(b"settle %d" % number) for number in range(10)))
    assert sorted(put.value for put, _ in outcomes) == ["exists"] * 9 + ["stored"]
    assert {left for _, left in outcomes} == {1}
    assert await store.items.put_result(ANN, job.batch_id, 2, answer(2, 400), epoch=0) == (Put.STORED, 0)
    now = await store.jobs.get(ANN, job.batch_id)
    assert (now.total, now.completed, now.failed, now.finished, now.claims) == (2, 1, 1, 2, 1)
    assert (now.prompt_tokens, now.completion_tokens) == (20, 10)
    assert await store.items.results(ANN, job.batch_id, [1, 2, 3]) == {1: answer(1), 2: answer(2, 400)}


async def test_a_redelivered_item_settles_again_and_does_not_run_again(store: BatchStore) -> None:
    job = await job_in_progress(store, 1)
    await store.items.claim(ANN, job.batch_id, 1)
    await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=1, settle=b"the settlement")
    again = await store.items.claim(ANN, job.batch_id, 1)
    assert (again.done, again.body, again.epoch, again.settle) == (True, None, 1, b"the settlement")
    # the batch may end before the settlement is known to be published
    await store.jobs.move(job, {"status": "completed"}, ends=True)
    late = await store.items.claim(ANN, job.batch_id, 1)
    assert (late.status, late.body, late.settle) == ("completed", None, b"the settlement")
    await store.items.settled(ANN, job.batch_id, 1)
    assert (await store.items.claim(ANN, job.batch_id, 1)).settle == b""


async def test_an_older_claims_result_is_fenced(store: BatchStore) -> None:
    job = await job_in_progress(store, 1)
    first, second = [await store.items.claim(ANN, job.batch_id, 1) for _ in range(2)]
    assert (first.epoch, second.epoch) == (1, 2)
    put = store.items.put_result
    assert (await put(ANN, job.batch_id, 1, answer(1), epoch=1))[0] is Put.FENCED
    assert (await put(ANN, job.batch_id, 1, answer(1), epoch=2))[0] is Put.STORED


@pytest.mark.parametrize("status", ["validating", "finalizing", "cancelling", "completed"])
async def test_items_run_only_while_their_batch_is_in_progress(store: BatchStore, status: str) -> None:
    job = await job_in_progress(store, 1)
    await store.jobs.move(job, {"status": status})
    claim = await store.items.claim(ANN, job.batch_id, 1)
    assert (claim.status, claim.body, claim.epoch) == (status, None, 0)


async def test_an_item_of_no_batch_is_gone(store: BatchStore) -> None:
    assert (await store.items.claim(ANN, BatchId("batch-none"), 1)).status == ""
    put = await store.items.put_result(ANN, BatchId("batch-none"), 1, answer(1), epoch=1)
    assert put == (Put.ENDED, 0)


async def test_no_result_after_the_end_though_results_are_gone(store: BatchStore) -> None:
    job = await job_in_progress(store, 1)
    await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=0)
    await store.jobs.move(job, {"status": "cancelled"}, ends=True)
    assert (await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=0))[0] is Put.ENDED
    assert (await store.jobs.get(ANN, job.batch_id)).completed == 1


async def test_losses_add_up_over_claims(store: BatchStore) -> None:
    job = await job_in_progress(store, 1)
    assert await store.items.add_lost(ANN, job.batch_id, 1) == 1
    assert await store.items.add_lost(ANN, job.batch_id, 1, 2) == 3
    assert (await store.items.claim(ANN, job.batch_id, 1)).lost == 3


async def test_bodies_are_taken_only_in_the_state_they_belong_to(store: BatchStore) -> None:
    job = await job_in_progress(store, 1)
    assert not await store.items.put_bodies(ANN, job.batch_id, "validating", [(2, item(2))])
    assert await store.items.unfinished(ANN, job.batch_id, [1, 2]) == {1: "c1"}


async def test_what_an_ended_batch_leaves_is_its_record(redis_server: RedisServer) -> None:
    async with batch_store(redis_server) as (store, redis, prefix):
        job = await job_in_progress(store, 3)
        await store.items.claim(ANN, job.batch_id, 1)
        await store.items.add_lost(ANN, job.batch_id, 1)
        for number in (1, 2, 3):
            await store.items.put_result(ANN, job.batch_id, number, answer(number), epoch=int(number == 1))
        await store.jobs.move(job, {"status": "completed"}, ends=True)
        left = {key.decode() for key in await redis.execute("KEYS", f"{prefix}:*job:*")}
        assert left == {f"{prefix}:{{ann}}:job:{job.batch_id}"}
        assert await store.jobs.enqueued_tokens(ANN) == 0


async def test_no_text_of_a_tenant_lies_open(redis_server: RedisServer) -> None:
    async with batch_store(redis_server) as (store, redis, prefix):
        await redis.execute("CONFIG", "SET", "rdbcompression", "no")  # DUMP would hide texts
        await upload(store, b"secret file content", name="secret name")
        job = await job_in_progress(store, 2)
        await store.items.claim(ANN, job.batch_id, 1)
        await store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=1, settle=b"secret settle")
        await store.items.add_dead_letter(ANN, job.batch_id, 2, "secret-id", "poison", "secret reason")
        slot = await store.queue.slot(ANN, "origin-1", "secret-id", 5)
        await store.queue.put_body(ANN, slot.number, item(1))
        await store.jobs.move(job, {"status": "failed", "errors": [BatchError("c", "secret words")]})
        held = await everything(redis, prefix)
        assert b"origin-1" in held
        assert b"secret" not in held


# ---------------------------------------------------------------------------------------------- the standing batch


async def test_a_queued_line_has_one_number_however_often_it_is_delivered(store: BatchStore) -> None:
    slots = await asyncio.gather(*(store.queue.slot(ANN, "seq-1", "a", 5) for _ in range(4)))
    assert {(slot.number, slot.duplicate) for slot in slots} == {(1, False)}
    other = await store.queue.slot(ANN, "seq-2", "a", 5)
    assert (other.number, other.duplicate) == (2, True)
    nameless = [await store.queue.slot(ANN, f"seq-{number}", "", 5) for number in (3, 4)]
    assert [(slot.number, slot.duplicate) for slot in nameless] == [(3, False), (4, False)]
    assert (await store.queue.slot(BOB, "seq-1", "a", 5)).number == 1


async def test_queued_results_come_in_order_of_finishing_behind_a_cursor(store: BatchStore) -> None:
    for number in (1, 2, 3):
        await store.queue.slot(ANN, f"seq-{number}", f"c{number}", 5)
        assert await store.queue.put_body(ANN, number, item(number)) == ""
    assert await store.jobs.enqueued_tokens(ANN) == 30
    for number in (2, 3, 1):
        claim = await store.items.claim(ANN, QUEUE_BATCH, number)
        assert claim.body == item(number)
        await store.items.put_result(ANN, QUEUE_BATCH, number, answer(number), epoch=claim.epoch)
    assert await store.queue.put_body(ANN, 1, item(1)) == "done"
    first, more = await store.queue.results(ANN, "", 2)
    assert ([found.number for found in first], more) == ([2, 3], True)
    rest, more = await store.queue.results(ANN, first[-1].cursor, 2)
    assert ([found.result for found in rest], more) == ([answer(1)], False)
    assert await store.queue.results(ANN, rest[-1].cursor, 2) == ([], False)
    assert await store.jobs.enqueued_tokens(ANN) == 0
    with pytest.raises(InvalidInput, match="cursor"):
        await store.queue.results(ANN, "abc", 2)


async def test_a_queued_line_over_the_token_limit_is_refused(store: BatchStore) -> None:
    await store.queue.slot(ANN, "seq-1", "a", 5)
    assert await store.queue.put_body(ANN, 1, item(1), tokens_limit=10) == ""
    assert await store.queue.put_body(ANN, 1, item(1), tokens_limit=10) == ""
    await store.queue.slot(ANN, "seq-2", "b", 5)
    assert await store.queue.put_body(ANN, 2, item(2), tokens_limit=10) == "over_limit"


async def test_old_queued_results_go_and_their_names_are_free_again(redis_server: RedisServer) -> None:
    async with batch_store(redis_server) as (store, redis, prefix):
        await store.queue.slot(ANN, "seq-1", "a", 5)
        await store.queue.slot(ANN, "seq-2", "a", 5)
        for number in (1, 2):
            await store.items.put_result(ANN, QUEUE_BATCH, number, answer(number), epoch=0)
        now = int(await redis.now_s())
        assert await store.queue.trim(ANN, now - 60) == 0
        assert await store.queue.trim(ANN, now + 60) == 2
        assert await store.queue.results(ANN, "", 10) == ([], False)
        assert (await store.queue.slot(ANN, "seq-9", "a", 5)).duplicate is False
        names = [key.decode().rpartition(":")[2] for key in await redis.execute("KEYS", f"{prefix}:*queue:*")]
        assert sorted(names) == ["finished", "ids", "origins", "refs"]
