"""Items through an executor: results once, billed as the results show, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from services.batch import executor as executor_module
from services.batch.item_rules import request_id_of
from services.batch.records import Put
from services.batch.tenant_terms import KEPT_S, RETENTION_EVERY_S, RetentionNews, TokenLimits
from shared.bus.memory_bus import MemoryBroker
from shared.contracts.attempt import Attempt
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import InvalidInput, Overloaded, Unavailable, UnknownModel
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Epoch
from shared.contracts.message import encode
from shared.contracts.messages import AdmitTenant, Settle
from tests.pipeline import gateway_support
from tests.pipeline.batch_support import ANN, BOB, answer
from tests.pipeline.executor_support import chat_body, executor_world
from tests.pipeline.gateway_support import CONTEXT, Backend
from tests.servers import RedisServer


def backend(**options: Any) -> Backend:
    return Backend(MemoryBroker(), **options)


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_items_are_run_stored_and_billed_as_the_results_show(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job = await world.job([chat_body(f"item {number}") for number in range(1, 9)])
        await world.enqueue(job)
        await executor.follow()
        results = await world.finished(job)
        await until(lambda: len(world.backend.settles) == 8 and not executor.running)
        shown = {}
        for number, result in results.items():
            body = json.loads(result.body)
            assert (result.custom_id, result.status_code, result.ok) == (f"c{number}", 200, True)
            assert result.request_id == request_id_of(ANN, job.batch_id, number, f"c{number}")
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["finish_reason"] == "length"
            assert body["usage"]["completion_tokens"] == result.completion_tokens == 5
            shown[result.request_id] = (body["usage"]["prompt_tokens"], 5)
        assert world.billed() == shown
        for admit in world.backend.admits:
            assert isinstance(admit, AdmitTenant)
            assert admit.tenant == ANN
        now = await world.store.jobs.get(ANN, job.batch_id)
        assert (now.completed, now.failed, now.completion_tokens) == (8, 0, 40)
        assert {left for _, _, left in world.results} == set(range(8))
        # acknowledged: another process finds nothing to do, and no settlement is left over
        claims = [await world.store.items.claim(ANN, job.batch_id, number) for number in range(1, 9)]
        assert all(claim.done and not claim.settle for claim in claims)
    async with executor_world(redis_server, backend()) as world, world.executor():
        await asyncio.sleep(0.1)
        assert not world.backend.submits


async def test_an_item_of_several_choices_is_billed_for_all_of_them(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job = await world.job([chat_body("two", n=2, seed=3)])
        await world.enqueue(job)
        await executor.follow()
        result = (await world.finished(job))[1]
        await until(lambda: world.backend.settles and not executor.running)
        body = json.loads(result.body)
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["completion_tokens"] == result.completion_tokens == 10
        assert world.billed() == {result.request_id: (body["usage"]["prompt_tokens"], 10)}
        assert world.backend.admits[-1].choices == 2


async def test_no_more_than_max_running_are_at_work_and_tenants_take_turns(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(redis_server, backend(hold=hold)) as world:
        jobs = [await world.job([chat_body("x")] * count, tenant) for tenant, count in ((ANN, 12), (BOB, 4))]
        for job in jobs:
            await world.enqueue(job)
        async with world.executor(max_running=3) as executor:
            await until(lambda: len(world.backend.running) == 3)
            await asyncio.sleep(0.2)
            assert len(world.backend.submits) == executor.running == 3
            hold.set()
            for job in jobs:
                await world.finished(job)
        first = [admit.tenant for admit in world.backend.admits if isinstance(admit, AdmitTenant)][:9]
        assert 3 <= first.count(BOB) <= 4


async def test_a_request_without_a_limit_gets_the_tenants_default(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job = await world.job([chat_body(max_tokens=None)])
        await world.enqueue(job)
        await executor.follow()
        results = await world.finished(job)
        assert results[1].completion_tokens == 7
        assert world.backend.submits[0].sampling[0].max_tokens == 7


async def test_a_tenants_limit_of_waiting_tokens_is_policys_word_for_a_moment(redis_server: RedisServer) -> None:
    now = 100.0
    limited = backend(limits=Limits(batch_enqueued_tokens=70))
    async with executor_world(redis_server, limited) as world, world.executor() as executor:
        limits = TokenLimits(executor._ingress, clock=lambda: now)
        assert await limits.of(ANN, "tiny") == 70
        world.backend.limits = Limits(batch_enqueued_tokens=0)
        assert await limits.of(ANN, "tiny") == 70
        assert await limits.of(BOB, "tiny") == 0
        now += KEPT_S
        assert await limits.of(ANN, "tiny") == 0
        world.backend.policy_refuses = UnknownModel("no such model", param="model")
        now += KEPT_S
        with pytest.raises(UnknownModel):
            await limits.of(ANN, "huge")


async def test_policy_is_asked_for_retentions_now_and_then(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, grant = 100.0, gateway_support.Grant
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        queue = world.store.queue
        limits = TokenLimits(executor._ingress, lambda: now, on_retention=queue.note_retention)
        news = RetentionNews(limits, executor._ingress.models, lambda: now)
        for retention_s, heard, later_s in ((3600, 3600, 1.0), (60, 3600, RETENTION_EVERY_S), (60, 60, 0.0)):
            monkeypatch.setattr(gateway_support, "Grant", partial(grant, retention_s=retention_s))
            await news.hear(ANN)
            assert await queue.retention_s(ANN) == heard
            now += later_s
        # what it refuses leaves all as it is
        world.backend.policy_refuses = UnknownModel("no such model", param="model")
        now += RETENTION_EVERY_S
        await news.hear(ANN)
        assert await queue.retention_s(ANN) == 60


async def test_items_that_cannot_run_get_their_error_and_cost_nothing(redis_server: RedisServer) -> None:
    bodies = [chat_body(model="other"), chat_body("x" * 2 * CONTEXT), chat_body(temperature=9), chat_body(stream=True)]
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job = await world.job(bodies)
        await world.enqueue(job)
        await executor.follow()
        results = await world.finished(job)
        found = [(r.status_code, r.error_code, json.loads(r.body)["error"]["param"]) for r in results.values()]
        assert found == [
            (404, "model_not_found", "model"),
            (400, "context_length_exceeded", "messages"),
            (400, "invalid_value", "temperature"),
            (400, "invalid_value", "stream"),
        ]
        assert not any(result.completion_tokens for result in results.values())
        assert not world.backend.submits
        assert not world.backend.settles


async def test_policys_no_is_the_items_error(redis_server: RedisServer) -> None:
    refusing = backend(policy_refuses=InvalidInput("max_tokens is above your limit of 2", param="max_tokens"))
    async with executor_world(redis_server, refusing) as world, world.executor() as executor:
        job = await world.job([chat_body()])
        await world.enqueue(job)
        await executor.follow()
        result = (await world.finished(job))[1]
        assert (result.status_code, result.error_code) == (400, "invalid_value")
        assert "limit of 2" in result.error_message


@pytest.mark.parametrize("refusal", ["policy_refuses", "scheduler_refuses", "refuse_placement"])
async def test_overload_is_waited_for(redis_server: RedisServer, refusal: str) -> None:
    busy = backend(**{refusal: Overloaded("full", retry_after_s=0.3)})
    async with executor_world(redis_server, busy) as world, world.executor() as executor:
        job = await world.job([chat_body()] * 3)
        await world.enqueue(job)
        await executor.follow()
        seen = world.backend.admits if refusal == "policy_refuses" else world.backend.submits
        await until(lambda: len(seen) >= 6)  # each came back
        setattr(world.backend, refusal, None)
        results = await world.finished(job)
        assert all(result.ok for result in results.values())
        await until(lambda: not executor.running)
        assert {tokens for _, tokens in world.billed().values()} == {5}
        # every run in an epoch of its own, above those before
        epochs = [submit.attempt.epoch for submit in world.backend.submits]
        assert all(epoch % 16 == 1 for epoch in epochs)
        assert len(set(zip((s.attempt.request_id for s in world.backend.submits), epochs, strict=True))) == len(epochs)


async def test_who_waits_long_for_capacity_keeps_no_slot_from_others(redis_server: RedisServer) -> None:
    busy = backend(policy_refuses=Overloaded("full", retry_after_s=20.0))
    async with executor_world(redis_server, busy) as world, world.executor(max_running=1) as executor:
        waiting = await world.job([chat_body()])
        await world.enqueue(waiting)
        await executor.follow()
        await until(lambda: world.backend.admits)
        world.backend.policy_refuses = None
        other = await world.job([chat_body()], BOB)
        await world.enqueue(other)
        await executor.follow()
        assert (await world.finished(other, timeout_s=10.0))[1].ok
        assert (await world.store.jobs.get(ANN, waiting.batch_id)).finished == 0


async def test_a_result_whose_process_died_is_settled_by_the_next(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world:
        job = await world.job([chat_body()])
        claim = await world.store.items.claim(ANN, job.batch_id, 1)
        request_id = request_id_of(ANN, job.batch_id, 1, "c1")
        grant = SignedGrant(b"", b"")
        settle = Settle(attempt=Attempt(request_id, Epoch(1)), grant=grant, prompt_tokens=10, completion_tokens=5)
        put, _ = await world.store.items.put_result(
            ANN, job.batch_id, 1, answer(1), epoch=claim.epoch, settle=encode(settle)
        )
        assert put is Put.STORED
        await world.enqueue(job)
        async with world.executor() as executor:
            await until(lambda: world.backend.settles == [settle] and not executor.running)
        assert not world.backend.submits
        assert not (await world.store.items.claim(ANN, job.batch_id, 1)).settle


async def test_a_stop_hands_items_back_and_another_process_finishes_them(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(redis_server, backend(hold=hold)) as world:
        job = await world.job([chat_body()] * 3)
        await world.enqueue(job)
        async with world.executor():
            await until(lambda: len(world.backend.running) == 3)
            await asyncio.sleep(0.05)
            started = time.monotonic()
        assert time.monotonic() - started < 4
        assert {cancel.reason for cancel in world.backend.cancels} == {"shutting_down"}
        assert len(world.backend.settles) == 3
        assert not any(settle.completion_tokens or settle.prompt_tokens for settle in world.backend.settles)
        assert all(settle.compute for settle in world.backend.settles)
        hold.set()
        async with world.executor():
            results = await world.finished(job)
        assert all(result.ok for result in results.values())
        assert [submit.attempt.epoch for submit in world.backend.submits] == [1, 1, 1, 17, 17, 17]
        assert set(world.billed().values()) == {(results[1].prompt_tokens, 5)}
        assert len(world.results) == 3


async def test_a_cancelled_batch_ends_its_runs_at_the_workers(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "WATCH_S", 0.1)
    async with executor_world(redis_server, backend(hold=asyncio.Event())) as world, world.executor(2) as executor:
        job = await world.job([chat_body()] * 5)
        await world.enqueue(job)
        await executor.follow()
        await until(lambda: len(world.backend.running) == 2)
        assert await world.store.jobs.move(job, {"status": "cancelling"}) == ""
        await until(lambda: not executor.running and len(world.backend.settles) == 2)
        assert {cancel.reason for cancel in world.backend.cancels} == {"batch_ended"}
        assert len(world.backend.submits) == 2
        assert not any(settle.completion_tokens for settle in world.backend.settles)
        assert all(settle.compute for settle in world.backend.settles)
        assert not world.results  # the batch's own word follows
        await asyncio.sleep(0.1)
        assert executor.running == 0  # the rest was acknowledged unrun


async def test_a_run_that_was_claimed_by_another_process_stores_and_bills_nothing(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(redis_server, backend(hold=hold)) as world, world.executor() as executor:
        job = await world.job([chat_body()])
        await world.enqueue(job)
        await executor.follow()
        await until(lambda: len(world.backend.running) == 1)
        other = await world.store.items.claim(ANN, job.batch_id, 1)
        assert other.epoch == 2
        hold.set()
        await until(lambda: len(world.backend.settles) == 1 and not executor.running)
        assert (world.backend.settles[0].completion_tokens, world.backend.settles[0].attempt.epoch) == (0, 1)
        assert not world.results
        put, left = await world.store.items.put_result(ANN, job.batch_id, 1, answer(1), epoch=other.epoch)
        assert (put, left) == (Put.STORED, 0)


async def test_a_result_whose_answer_was_lost_is_billed_all_the_same(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        put, times = world.store.items.put_result, 0

        async def lost_once(*args: Any, **options: Any) -> Any:
            nonlocal times
            done, times = await put(*args, **options), times + 1
            if times == 1:
                raise Unavailable("stored, but the answer did not come back")
            return done

        monkeypatch.setattr(world.store.items, "put_result", lost_once)
        job = await world.job([chat_body()])
        await world.enqueue(job)
        await executor.follow()
        result = (await world.finished(job))[1]
        await until(lambda: world.backend.settles and not executor.running)
        assert world.billed() == {result.request_id: (result.prompt_tokens, 5)}
        assert len(world.results) == 1
        assert not (await world.store.items.claim(ANN, job.batch_id, 1)).settle


async def test_the_same_item_twice_in_one_process_runs_once(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(redis_server, backend(hold=hold)) as world, world.executor() as executor:
        job = await world.job([chat_body()])
        await world.enqueue(job)
        await world.enqueue(job, again="-again")
        await executor.follow()
        await until(lambda: len(world.backend.running) == 1)
        await asyncio.sleep(0.1)
        hold.set()
        assert (await world.finished(job))[1].ok
        assert len(world.backend.submits) == 1


async def test_a_lost_worker_is_not_noticed_by_a_batch(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(redis_server, backend(hold=hold)) as world, world.executor() as executor:
        job = await world.job([chat_body()] * 2)
        await world.enqueue(job)
        await executor.follow()
        await until(lambda: len(world.backend.running) == 2)
        await asyncio.sleep(0.05)
        await world.backend.lose_worker()
        hold.set()
        results = await world.finished(job)
        assert all(result.ok and result.completion_tokens == 5 for result in results.values())
        claims = [await world.store.items.claim(ANN, job.batch_id, number) for number in (1, 2)]
        assert [claim.lost for claim in claims] == [1, 1]
        assert [submit.attempt.epoch for submit in world.backend.submits] == [1, 1, 2, 2]


async def test_an_item_that_kills_workers_is_run_alone_and_then_given_up(redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    alone: list[int] = []
    async with executor_world(redis_server, backend(hold=hold)) as world, world.executor() as executor:
        job = await world.job([chat_body("poison"), chat_body("fine"), chat_body("fine")])
        await world.store.items.add_lost(ANN, job.batch_id, 1)  # in another process
        await world.enqueue(job)
        await executor.follow()
        await until(lambda: len(world.backend.running) == 3)
        await asyncio.sleep(0.05)
        await world.backend.lose_worker()
        hold.set()
        await until(lambda: len(world.results) == 2)
        hold.clear()
        # nobody else's lines while the suspect runs
        await until(lambda: any(s.attempt.epoch > 16 for s in world.backend.submits))
        more = await world.job([chat_body("later")])
        await world.enqueue(more)
        await asyncio.sleep(0.3)
        alone = [run.submit.attempt.epoch for run in world.backend.running.values() if not run.acked]
        assert len(alone) == 1
        await world.backend.lose_worker()
        hold.set()
        results = await world.finished(job)
        await world.finished(more)
        assert [result.ok for result in results.values()] == [False, True, True]
        assert (results[1].error_code, results[1].status_code, results[1].body) == ("poison", 0, b"")
        now = await world.store.jobs.get(ANN, job.batch_id)
        (letter,) = now.dead_letters
        assert (letter.code, letter.line, letter.param) == ("poison", 1, "c1")
        assert "3 times" in letter.message
        assert world.billed()[results[1].request_id] == (0, 0)


async def test_a_suspect_that_is_innocent_gets_its_result(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job = await world.job([chat_body()])
        await world.store.items.add_lost(ANN, job.batch_id, 1, 2)
        await world.enqueue(job)
        await executor.follow()
        assert (await world.finished(job))[1].ok


async def test_an_item_of_another_tenants_subject_is_dropped(redis_server: RedisServer) -> None:
    async with executor_world(redis_server, backend()) as world, world.executor() as executor:
        job, other = await world.job([chat_body()]), await world.job([chat_body()], BOB)
        item = BatchItem(tenant=ANN, batch_id=job.batch_id, number=1, custom_id="c1")
        await world.backend.bus.publish_durable(f"baton.v1.batch.item.{BOB}", item, message_id="forged")
        await world.enqueue(other)
        await executor.follow()
        await world.finished(other)
        assert (await world.store.jobs.get(ANN, job.batch_id)).claims == 0


async def test_without_redis_items_wait(own_redis_server: RedisServer) -> None:
    hold = asyncio.Event()
    async with executor_world(own_redis_server, backend(hold=hold)) as world, world.executor() as executor:
        job = await world.job([chat_body()])
        await world.enqueue(job)
        await executor.follow()
        await until(lambda: len(world.backend.running) == 1)
        own_redis_server.kill()
        hold.set()
        await asyncio.sleep(1.0)
        assert not world.backend.settles  # the result comes first
        await asyncio.to_thread(own_redis_server.start)
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await world.finished(job))[1].ok
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
        await until(lambda: len(world.backend.settles) == 1)
        assert len(world.backend.submits) == 1
