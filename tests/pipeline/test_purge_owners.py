"""What each owner of copies does with a purge: gateway, scheduler and batch service, and when the order comes again."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.batch import intake as intake_module
from services.batch.intake import Intake
from services.batch.records import QUEUE_BATCH, FileMeta, Put
from services.scheduler.effects import CancelAt
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import PURGE_ACK_STREAM, submit_stream
from shared.contracts import batch_messages as b
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import PURGED, Cancelled, from_wire
from shared.contracts.grants import Scope
from shared.contracts.ids import FileId, ScopeGeneration, TenantId
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.security.generations import Generations
from shared.security.purge_orders import PurgeOrders
from shared.telemetry import attributes as attr
from shared.telemetry.trace_buffer import root_of
from tests.pipeline import gateway_support
from tests.pipeline.batch_support import (
    ANN,
    BOB,
    MODEL,
    answer,
    batch_store,
    everything,
    input_line,
    item,
    job_in_progress,
    upload,
)
from tests.pipeline.executor_support import chat_body, executor_world
from tests.pipeline.gateway_support import HEADERS, Backend, chat, gateway_stack
from tests.pipeline.keyed_support import until
from tests.servers import RedisServer
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.scheduler_support import Bench, grant, reserved, submit


def order_for(tenant: str, purge_id: str = "p-1", **fields: Any) -> m.PurgeOrder:
    return m.PurgeOrder(purge_id=purge_id, tenant=TenantId(tenant), generation=ScopeGeneration(2), **fields)


class Acks:
    """Acknowledgements as policy hears them."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker, "policy")
        self.heard: list[m.PurgeAck] = []

    async def listen(self) -> None:
        async def on_ack(delivery: Delivery) -> None:
            assert delivery.subject == subjects.purge_ack(delivery.message.service)
            self.heard.append(delivery.message)

        await self.bus.consume(PURGE_ACK_STREAM, subjects.ANY_PURGE_ACK, m.PurgeAck, on_ack, durable="test")

    async def order(self, order: m.PurgeOrder) -> m.PurgeAck:
        known = len(self.heard)
        await self.bus.publish(subjects.PURGE_ORDER, order)
        await until(lambda: len(self.heard) > known)
        return self.heard[-1]


# ---------------------------------------------------------------------------------------------- gateway


async def test_a_stream_of_a_purged_tenant_ends_with_the_error_and_its_traces_go() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    assert backend.hold is not None
    async with gateway_stack(backend) as stack:
        acks = Acks(backend.broker)
        await acks.listen()
        # Given a request that ended, whose trace is here until its tenant is purged
        backend.hold.set()
        assert (await stack.client.post("/v1/chat/completions", json=chat(), headers=HEADERS)).status_code == 200
        await until(lambda: stack.service.traces.recent(tenant="tenant-a"))
        assert (await acks.order(order_for("tenant-a", "p-0"))).counts["traces"] >= 1
        assert not stack.service.traces.recent(tenant="tenant-a")
        backend.hold.clear()
        # and one whose answer has begun
        streamed = stack.client.post("/v1/chat/completions", json=chat(stream=True), headers=HEADERS)
        answer = asyncio.create_task(streamed)
        await until(lambda: any(run.sent for run in backend.running.values() if not run.acked))
        # When its tenant is purged (the stand-in for policy grants to the tenant `tenant`)
        ack = await acks.order(order_for("tenant"))
        # Then the stream ends with the error and no clean end
        frames = [line[6:] for line in (await answer).text.split("\n\n") if line]
        assert json.loads(frames[-1])["error"]["code"] == PURGED
        assert "[DONE]" not in frames
        assert (ack.owner, ack.counts["requests"]) == ("gateway-1", 1)
        # And what policy granted before is not begun any more
        late = await stack.client.post("/v1/chat/completions", json=chat(), headers=HEADERS)
        assert (late.status_code, late.json()["error"]["code"]) == (499, PURGED)
        backend.hold.set()
        await acks.bus.close()


# ---------------------------------------------------------------------------------------------- scheduler


def test_what_waits_of_a_purged_tenant_is_refused_and_what_runs_is_forgotten() -> None:
    bench = Bench()
    bench.beat("d1")

    def submit_of(name: str, tenant: str = "a") -> None:
        of = msgspec.structs.replace(grant(name), tenant=TenantId(tenant), scope=Scope(TenantId(tenant)))
        bench.take(bench.table.submit(bench.now, submit(name), of)[1])

    submit_of("runs")
    bench.match()
    bench.reserve(reserved())
    submit_of("placing")
    bench.match()
    submit_of("stays", "b")
    bench.told.clear()
    generations = Generations()
    generations.rise(TenantId("a"), ScopeGeneration(2))
    count, effects = bench.table.purge(bench.now, lambda grant: generations.is_over(grant.scope))
    bench.take(effects)
    assert count == 2
    (told,) = bench.told
    assert (told.attempt.request_id, from_wire(told.error).code) == ("placing", PURGED)
    cancelled = [effect.message.attempt.request_id for effect in bench.effects if isinstance(effect, CancelAt)]
    assert cancelled == ["placing"]
    assert bench.table.record(submit("stays").attempt.request_id) is not None
    # and neither comes back: a late duplicate runs nowhere
    submit_of("runs")
    assert bench.table.record(submit("runs").attempt.request_id) is None


# ---------------------------------------------------------------------------------------------- batch


async def test_a_purge_takes_files_batches_and_queue_of_one_tenant(redis_server: RedisServer) -> None:
    async with batch_store(redis_server) as (store, redis, prefix):
        for tenant in (ANN, BOB):
            await job_in_progress(store, 3, tenant)
            await store.files.close(tenant, await upload(store, b"some lines", tenant), once="once-1")
            await store.queue.slot(tenant, "1-1", "c", 1)
        others = sorted((await everything(redis, f"{prefix}:{{{BOB}}}")).split(b"\n"))
        order = order_for(ANN, ordered_s=await redis.now_s())
        # a batch, its input, another file, and the standing batch of the queue
        assert await store.purges.purge(order) == {"files": 2, "batches": 2}
        left = [key.decode().rpartition(":")[2] for key in await redis.execute("KEYS", f"{prefix}:{{{ANN}}}:*")]
        assert sorted(left) == ["line-serial", "lines-before", "p-1"]
        assert sorted((await everything(redis, f"{prefix}:{{{BOB}}}")).split(b"\n")) == others
        # the same order takes nothing that was made since
        made = await upload(store, b"new", ANN)
        assert await store.purges.purge(order) == {"files": 2, "batches": 2}
        assert await store.files.is_ready(ANN, made)
        assert await store.purges.purge(order_for(ANN, "p-2")) == {"files": 1, "batches": 0}


async def test_a_line_after_a_purge_has_no_number_of_one_before_it_and_the_retention_stays(
    redis_server: RedisServer,
) -> None:
    async with batch_store(redis_server) as (store, _, _):
        numbers = [(await store.queue.slot(ANN, f"{at}-1", "", 1)).number for at in (1, 2)]
        await store.queue.note_retention(ANN, 3600)
        await store.purges.purge(order_for(ANN, "p-1", ordered_s=9.0))
        numbers.append((await store.queue.slot(ANN, "3-9000001", "", 1)).number)
        assert numbers == [1, 2, 3]
        assert await store.queue.waiting(ANN) == 1
        assert await store.queue.retention_s(ANN) == 3600
        # an older order that is carried out later lets no older line in
        await store.purges.purge(order_for(ANN, "p-0", ordered_s=5.0))
        assert await store.purges.purged_us(ANN) == 9_000_000


async def test_a_purge_spares_what_was_made_after_it_was_ordered(redis_server: RedisServer) -> None:
    """Whenever it is carried out: late, by a second process, or again after half of it."""
    async with batch_store(redis_server) as (store, redis, _):
        old_job, old_file = await job_in_progress(store, 3, ANN), await upload(store, b"old", ANN)
        await store.queue.put_body(ANN, (await store.queue.slot(ANN, "1-1", "c", 1)).number, item(1))
        await store.queue.slot(ANN, "2-1", "d", 1)
        await store.items.put_result(ANN, QUEUE_BATCH, 2, answer(2), epoch=0)
        ordered_s = await redis.now_s()
        new_job, new_file = await job_in_progress(store, 2, ANN), await upload(store, b"new", ANN)
        since = int(ordered_s * 1e6)
        await store.queue.put_body(ANN, (await store.queue.slot(ANN, f"3-{since}", "c2", 1)).number, item(3))
        await store.queue.slot(ANN, f"4-{since}", "d", 1)
        await store.items.put_result(ANN, QUEUE_BATCH, 4, answer(4), epoch=0)
        # what a batch from before it writes now goes with it
        meta = FileMeta("out", "batch_output", 1, 0)
        late = await store.files.open(ANN, meta, int(ordered_s), FileId("file-late"), old_job.made_us)
        for purge_id, took in (("p-1", {"files": 3, "batches": 1}), ("p-2", {"files": 0, "batches": 0})):
            assert await store.purges.purge(order_for(ANN, purge_id, ordered_s=ordered_s)) == took
            assert {file.file_id for file in (await store.files.page(ANN))[0]} == {new_file, new_job.spec.input_file_id}
            assert [job.batch_id for job in (await store.jobs.page(ANN))[0]] == [new_job.batch_id]
            assert not await store.files.is_ready(ANN, old_file)
            assert await store.files.chunk(ANN, late, 0) == b""
            assert [found.number for found in (await store.queue.results(ANN, "", 9))[0]] == [4]
            assert (await store.queue.open_items(ANN))[0] == [3]
            assert await store.queue.waiting(ANN) == 1
            # 2 lines of the batch, and one of the queue
            assert await store.jobs.enqueued_tokens(ANN) == 30
        assert await store.items.unfinished(ANN, new_job.batch_id, [1, 2]) == {1: "c1", 2: "c2"}
        # a line of before it that is still in hand comes to nothing
        assert await store.queue.put_body(ANN, 1, item(1)) == "done"
        assert (await store.items.put_result(ANN, QUEUE_BATCH, 1, answer(1), epoch=0))[0] is Put.ENDED
        # and nothing is left, of counts neither, when the rest is purged too
        await store.purges.purge(order_for(ANN, "p-3", ordered_s=await redis.now_s()))
        assert (await store.files.stored_bytes(ANN), await store.jobs.enqueued_tokens(ANN)) == (0, 0)


async def test_an_item_that_runs_ends_and_leaves_nothing(redis_server: RedisServer) -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    assert backend.hold is not None
    async with executor_world(redis_server, backend) as world, world.executor() as executor:
        acks = Acks(backend.broker)
        await acks.listen()
        job = await world.job([chat_body("one"), chat_body("two")])
        await world.enqueue(job)
        await backend.sent()
        await world.store.purges.purge(order_for(ANN))
        ack = await acks.order(order_for(ANN))
        assert (ack.owner, ack.counts["requests"] >= 1) == ("batch-1", True)
        await until(lambda: not executor.running)
        assert not world.results
        assert await world.store.jobs.status(ANN, job.batch_id) == ""
        backend.hold.set()
        await acks.bus.close()


async def test_lines_from_before_a_purge_are_not_taken(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of a batch service that was down meanwhile."""
    stored_us = {"old": 5_000_000.0, "new": 7_000_000.0}
    monkeypatch.setattr(intake_module, "_stored_us", lambda d: stored_us[json.loads(d.message)["custom_id"]])
    async with batch_store(redis_server) as (store, _, _):
        broker, items = MemoryBroker(), []
        await store.purges.purge(order_for(ANN, ordered_s=6.0))

        async def on_item(delivery: Delivery) -> None:
            items.append(delivery.message.custom_id)

        async def no_limit(tenant: TenantId, model: str) -> int:
            return 0

        bus, tenant = MemoryBus(broker, "batch"), MemoryBus(broker, "tenant")
        await bus.consume("batch-item", subjects.ANY_BATCH_ITEM, BatchItem, on_item, durable="test")
        await bus.make_stream(submit_stream(ANN), subjects.batch_submit(ANN))
        for custom_id in ("old", "new"):
            await tenant.publish_durable(subjects.batch_submit(ANN), input_line(custom_id), message_id=custom_id)
        tenants = tmp_path / "tenants"
        tenants.write_text(json.dumps([ANN]))
        codec = PromptCodec(tiny_tokenizer(), 64)
        models = ServedModels([ServedModel(MODEL, "default", 64, codec)])
        async with Intake(bus, store, models, no_limit, tenants, max_lines=10):
            await until(lambda: items)
        assert items == ["new"]
        codec.close()
        await tenant.close()
        await bus.close()


# ---------------------------------------------------------------------------------------------- all of them


async def test_an_order_that_failed_is_carried_out_when_it_comes_again_and_one_that_was_is_not() -> None:
    broker, tries = MemoryBroker(), []

    async def carry_out(order: m.PurgeOrder) -> dict[str, int]:
        tries.append(order.purge_id)
        if len(tries) == 1:
            raise RuntimeError("the engine has stopped")
        return {"blocks": 2}

    acks, bus = Acks(broker), MemoryBus(broker, "decode")
    await acks.listen()
    orders = PurgeOrders(bus, "decode", "decode-1", carry_out)
    await orders.start()
    await acks.bus.publish(subjects.PURGE_ORDER, order_for("a"))
    await until(lambda: tries)
    # what is old is refused from the first moment on, also while it could not be carried out
    with pytest.raises(Cancelled):
        orders.generations.require_live(Scope(TenantId("a")))
    orders.generations.require_live(Scope(TenantId("a"), generation=ScopeGeneration(2)))
    assert (await acks.order(order_for("a"))).counts == {"blocks": 2}
    await acks.bus.publish(subjects.PURGE_ORDER, order_for("a"))
    await acks.bus.publish(subjects.PURGE_ORDER, order_for("b", "p-2"))
    await until(lambda: "p-2" in tries)
    assert tries == ["p-1", "p-1", "p-2"]
    await orders.stop()
    await bus.close()
    await acks.bus.close()


# ---------------------------------------------------------------------------------------------- retention


async def test_a_root_span_tells_the_retention_of_its_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_support, "Grant", partial(gateway_support.Grant, retention_s=3600))
    async with gateway_stack(Backend(MemoryBroker())) as stack:
        assert (await stack.client.post("/v1/chat/completions", json=chat(), headers=HEADERS)).status_code == 200
        await until(lambda: stack.service.traces.recent(tenant="tenant-a"))
        (trace,) = stack.service.traces.recent(tenant="tenant-a")
        root = root_of(stack.service.traces.get(trace.trace_id))
        assert root is not None
        assert root.attributes[attr.RETENTION_S] == 3600


async def test_files_of_a_tenant_with_a_retention_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gateway asks of the batch service for a tenant whose data is kept for an hour."""
    monkeypatch.setattr(m, "Identity", partial(m.Identity, retention_s=3600))
    backend = Backend(MemoryBroker())
    async with gateway_stack(backend) as stack:
        asked: list[Any] = []
        record = b.FileInfo(file_id=FileId("file-1"), filename="f", purpose="batch", num_bytes=1, created_s=1)

        async def on_file(delivery: Delivery) -> Any:
            asked.append(delivery.message)
            message = delivery.message
            if isinstance(message, b.FileClose):
                return record
            opened = isinstance(message, b.FileOpen)
            return b.FileOpened(file_id=record.file_id) if opened else b.FileAppended(num_bytes=1)

        files = await backend.bus.serve(subjects.BATCH_FILES, b.FileRequest, on_file)
        for given, kept in ((None, 3600), ("7200", 3600)):
            form = {"purpose": "batch"}
            if given is not None:
                form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": given}
            sent = await stack.client.post("/v1/files", data=form, files={"file": ("f", b"x")}, headers=HEADERS)
            assert sent.status_code == 200, sent.text
            assert asked[-1].expires_after_s == kept
        await files.stop()
