"""Stored responses by the official client, unchanged, against gateways over policy's own desks and a real Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from services.gateway import stored as stored_module
from services.gateway.stored_run import EVENTS_A_RUN
from services.policy.tenants import KeyRecord
from shared.contracts.errors import QuotaExceeded, Unavailable
from shared.store.redis_store import RedisStore, connect_redis
from tests.pipeline.gateway_support import MODEL, default_output
from tests.pipeline.keyed_support import Gateway, World, keyed_world, until
from tests.pipeline.test_gateway_openai import client
from tests.pipeline.test_keyed_requests import found_keys
from tests.servers import RedisServer

TEXT = default_output("")
ENDED = "response.completed"


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    async with connect_redis(redis_server.url) as redis:
        yield redis


def ai_of(world: World, number: int = 0, key: str = "key-a") -> openai.AsyncOpenAI:
    return client(world.gateways[number].url, key, strict=False)


def has_status(ai: openai.AsyncOpenAI, response_id: str, *wanted: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return (await ai.responses.retrieve(response_id)).status in wanted

    return look


async def gone_on(world: World, ai: openai.AsyncOpenAI, response_id: str, status: str = "completed") -> None:
    """As policy's clockwork does, until the response has ended."""
    ended = has_status(ai, response_id, status)

    async def look() -> bool:
        await world.desk.ask_quiet()
        await world.orphans.sweep()
        return await ended()

    await until(look)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = (line for line in answer.text.splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def get(gateway: Gateway, path: str, key: str = "key-a") -> httpx.Response:
    return await gateway.client.get(f"/v1/responses/{path}", headers={"authorization": f"Bearer {key}"})


async def texts(redis: RedisStore, world: World) -> int:
    """Keys in which Redis holds texts of responses."""
    return len([key async for key in redis._client.scan_iter(f"{world.responses._prefix}:*:response-*:*")])


# ---------------------------------------------------------------------------------------------- stored at their end


async def test_a_stored_response_is_asked_for_at_any_gateway_and_deleted(redis: RedisStore) -> None:
    async with keyed_world(redis) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        items: Any = [{"role": "user", "content": f"part {number}"} for number in range(3)]
        made = await ai.responses.create(model=MODEL, input=items, store=True, metadata={"a": "b"})
        assert made.output_text == TEXT
        assert (await other.responses.retrieve(made.id)).to_dict() == made.to_dict()
        listed = await other.responses.input_items.list(made.id, limit=2)
        assert [item.content[0].text for item in listed.data] == ["part 2", "part 1"]  # type: ignore[union-attr]
        assert listed.has_more
        rest = await other.responses.input_items.list(made.id, after=listed.last_id)
        assert [item.content[0].text for item in rest.data] == ["part 0"]  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="background"):
            await ai.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await ai.responses.retrieve(made.id, stream=True)
        async with ai_of(world, 1, "key-b") as stranger:
            await missing(stranger, made.id)
        assert await texts(redis, world) == 2
        deleted = await world.gateways[1].client.delete(
            f"/v1/responses/{made.id}", headers={"authorization": "Bearer key-a"}
        )
        assert deleted.json() == {"id": made.id, "object": "response", "deleted": True}
        assert await texts(redis, world) == 0
        await missing(ai, made.id)
        await world.settled(1)


async def missing(ai: openai.AsyncOpenAI, response_id: str) -> None:
    asked = (ai.responses.retrieve, ai.responses.delete, ai.responses.cancel, ai.responses.input_items.list)
    for ask in asked:
        with pytest.raises(openai.NotFoundError):
            await ask(response_id)
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.responses.create(model=MODEL, input="hi", previous_response_id=response_id)
    assert bad.value.code == "previous_response_not_found"


async def test_what_is_not_to_be_stored_is_not(redis: RedisStore) -> None:
    async with keyed_world(redis) as world, ai_of(world) as ai:
        for fields in ({}, {"store": False}):
            made = await ai.responses.create(model=MODEL, input="hi", **fields)
            with pytest.raises(openai.NotFoundError):
                await ai.responses.retrieve(made.id)
        service = world.gateways[0].service
        service.config = replace(service.config, store_responses="always")
        by_default = await ai.responses.create(model=MODEL, input="hi")
        assert (await ai.responses.retrieve(by_default.id)).output_text == TEXT
        service.config = replace(service.config, store_responses="never")
        for fields in ({"store": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="stores no responses"):
                await ai.responses.create(model=MODEL, input="hi", **fields)
        await world.settled(3)


async def test_streamed_it_is_stored_before_its_end_is_told(redis: RedisStore) -> None:
    async with keyed_world(redis) as world, ai_of(world) as ai:
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True, store=True)
        async for event in stream:
            if event.type == "response.created":
                with pytest.raises(openai.NotFoundError):
                    await ai.responses.retrieve(event.response.id)
            if event.type == ENDED:
                assert (await ai.responses.retrieve(event.response.id)).to_dict() == event.response.to_dict()
        await world.settled(1)


async def test_one_that_its_client_leaves_or_that_fails_is_not_stored(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai:
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True, store=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        (settle,) = await world.settled(1)
        assert settle.finish == "cancelled"
        failing = asyncio.create_task(ai.responses.create(model=MODEL, input="hi", store=True))
        sessions = world.gateways[0].service.ingress.sessions
        await until(lambda: sessions)
        next(iter(sessions.values())).fail(Unavailable("gone", code="worker_lost"))
        with pytest.raises(openai.InternalServerError):
            await failing
        await world.settled(2)
        assert not [key async for key in redis._client.scan_iter(f"{world.responses._prefix}:*:response:*")]
        assert await texts(redis, world) == 0


async def test_the_same_idempotency_key_is_the_same_response(redis: RedisStore) -> None:
    for fields in ({"store": True}, {"store": True, "stream": True}, {"background": True}):
        async with keyed_world(redis) as world, ai_of(world, 1) as ai:
            first, second = world.gateways
            body = {"model": MODEL, "input": "hi", **fields}
            made = await first.post("responses", body, "k")
            assert (await second.post("responses", body, "k")).content == made.content
            found = events(made)[-1]["response"] if "stream" in fields else made.json()
            await until(has_status(ai, found["id"], "completed"))
            assert len(world.backend.submits) == 1
            await world.settled(1)


async def kept_of_keys(redis: RedisStore, world: World) -> list[bytes]:
    """Keys in which Redis remembers what was answered under Idempotency-Keys."""
    return [key async for key in redis._client.scan_iter(f"{world.records._prefix}:*:once*:*")]


@pytest.mark.parametrize("fields", [{"store": True}, {"store": True, "stream": True}, {"background": True}])
async def test_deleted_it_is_gone_from_its_idempotency_key_too(redis: RedisStore, fields: dict[str, Any]) -> None:
    async with keyed_world(redis) as world, ai_of(world, 1) as ai:
        first, second = world.gateways
        body = {"model": MODEL, "input": "hi", **fields}
        made = await first.post("responses", body, "k")
        await first.post("responses", {**body, "input": "another"}, "l")
        found = events(made)[-1]["response"] if "stream" in fields else made.json()
        await until(has_status(ai, found["id"], "completed"))
        kept = len(await kept_of_keys(redis, world))
        assert kept == 4  # record and parts of each
        await ai.responses.delete(found["id"])
        assert len(await kept_of_keys(redis, world)) == kept - 2
        again = await second.post("responses", body, "k")
        told = events(again)[-1]["response"] if "stream" in fields else again.json()
        assert told["id"] != found["id"]
        await until(has_status(ai, told["id"], "completed"))
        await world.settled(3)


@pytest.mark.parametrize("stream", [False, True])
async def test_deleted_while_it_runs_nothing_stays_under_its_idempotency_key(redis: RedisStore, stream: bool) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world, 1) as ai:
        first = world.gateways[0]
        body = {"model": MODEL, "input": "hi", "store": True, "stream": stream}
        asked = asyncio.create_task(first.post("responses", body, "k"))
        await world.backend.sent()
        (session,) = first.service.ingress.sessions.values()
        await ai.responses.delete(f"resp_{session.request_id.removeprefix('req-')}")
        hold.set()
        assert (await asked).status_code == 200  # whoever waits has the answer, and it is billed
        await until(lambda: not first.door.stored.once.entries and not first.door.keyed.once.entries)
        assert await kept_of_keys(redis, world) == []
        assert await texts(redis, world) == 0
        await world.settled(1)


# ---------------------------------------------------------------------------------------------- conversations


async def test_a_response_goes_on_from_another(redis: RedisStore) -> None:
    prompts: list[str] = []

    def text(prompt: str) -> str:
        prompts.append(prompt)
        return f"answer {len(prompts)}"

    async with keyed_world(redis, text=text) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        one = await ai.responses.create(model=MODEL, input="one", instructions="be brief", store=True)
        two = await other.responses.create(model=MODEL, input="two", previous_response_id=one.id, store=True)
        three = await ai.responses.create(model=MODEL, input="three", previous_response_id=two.id)
        assert (two.previous_response_id, three.output_text) == (one.id, "answer 3")
        assert "be brief" in prompts[0]
        assert "be brief" not in prompts[1]
        said = ["one", "answer 1", "two", "answer 2", "three"]
        places = [prompts[2].index(part) for part in said]
        assert places == sorted(places)
        listed = await ai.responses.input_items.list(two.id, order="asc")
        assert [item.content[0].text for item in listed.data] == said[:3]  # type: ignore[union-attr]
        await ai.responses.delete(one.id)
        again = await ai.responses.create(model=MODEL, input="three", previous_response_id=two.id)
        assert again.output_text == "answer 4"
        assert prompts[3] == prompts[2]
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.responses.create(model=MODEL, input="x " * 300, previous_response_id=two.id)
        assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "input")
        await world.settled(4)


async def test_a_turn_of_tools_goes_on_by_id(redis: RedisStore) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}

    def text(prompt: str) -> str:
        return "done" if "tool_response" in prompt else call

    async with keyed_world(redis, text=text, context=4096) as world, ai_of(world) as ai:
        first = await ai.responses.create(model=MODEL, input="hi", tools=[tool], store=True, max_output_tokens=200)
        (made,) = first.output
        assert made.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": made.call_id, "output": "2"}]
        second = await ai.responses.create(
            model=MODEL, input=output, tools=[tool], previous_response_id=first.id, store=True, max_output_tokens=200
        )
        assert second.output_text == "done"
        listed = await ai.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed.data] == ["message", "function_call", "function_call_output"]


# ---------------------------------------------------------------------------------------------- in the background


async def test_in_the_background_and_cancelled(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        made = await ai.responses.create(model=MODEL, input="hi", background=True, metadata={"a": "b"})
        assert (made.status, made.background, made.metadata) == ("queued", True, {"a": "b"})
        await until(has_status(other, made.id, "in_progress"))
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        assert bad.value.code == "previous_response_not_ended"
        gone = await other.responses.cancel(made.id)
        assert (gone.status, gone.error) == ("cancelled", None)
        assert TEXT.startswith(gone.output_text)
        assert gone.output_text
        assert (await ai.responses.cancel(made.id)).to_dict() == gone.to_dict()
        (settle,) = await world.settled(1)
        assert settle.finish == "cancelled"
        hold.set()
        done = await ai.responses.create(model=MODEL, input="hi", background=True)
        await until(has_status(other, done.id, "completed"))
        assert (await other.responses.cancel(done.id)).output_text == TEXT
        await world.settled(2)


async def test_one_that_runs_is_deleted(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        made = await ai.responses.create(model=MODEL, input="hi", background=True)
        await world.backend.sent()
        await other.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await ai.responses.retrieve(made.id)
        (settle,) = await world.settled(1)
        assert settle.finish == "cancelled"
        await until(lambda: not world.gateways[0].door.stored.once.entries)
        assert await texts(redis, world) == 0


async def test_one_that_fails_says_so(redis: RedisStore) -> None:
    async with keyed_world(redis, hold=asyncio.Event()) as world, ai_of(world) as ai:
        made = await ai.responses.create(model=MODEL, input="hi", background=True)
        await world.backend.sent()
        for session in list(world.gateways[0].service.ingress.sessions.values()):
            session.fail(Unavailable("gone", code="worker_lost"))
        await until(has_status(ai, made.id, "failed"))
        failed = await ai.responses.retrieve(made.id)
        assert failed.error is not None
        assert failed.error.code == "server_error"
        with pytest.raises(openai.BadRequestError):
            await ai.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        await world.settled(1)


async def test_a_stream_in_the_background_is_resumed_anywhere(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        first, second = world.gateways
        stream = await ai.responses.create(model=MODEL, input="hi", background=True, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        made = seen[0].response.id  # type: ignore[union-attr]
        last = seen[-1].sequence_number
        resumed = await other.responses.retrieve(made, stream=True, starting_after=last)
        following = asyncio.create_task(collect(resumed))
        hold.set()
        rest = await following
        assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
        assert rest[-1].type == ENDED
        whole = events(await get(first, f"{made}?stream=true"))
        assert whole == events(await get(second, f"{made}?stream=true"))
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert "".join(e["delta"] for e in whole if e["type"] == "response.output_text.delta") == TEXT
        assert whole[-1]["response"] == (await ai.responses.retrieve(made)).to_dict(exclude_unset=True)
        assert events(await get(first, f"{made}?stream=true&starting_after={len(whole) - 1}")) == []
        async with other.responses.stream(response_id=made, starting_after=last) as helped:
            assert (await helped.get_final_response()).output_text == TEXT
        for query, param in (
            (f"stream=true&starting_after={len(whole)}", "starting_after"),
            ("starting_after=1", "starting_after"),
            ("stream=yes", "stream"),
            ("other=1", "other"),
        ):
            bad = await get(first, f"{made}?{query}")
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, param)
        await world.settled(1)


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_what_is_refused_is_told_at_once_and_leaves_nothing(redis: RedisStore) -> None:
    async with keyed_world(redis) as world, ai_of(world) as ai:
        world.backend.policy_refuses = QuotaExceeded("too many", retry_after_s=3)
        for fields in ({"store": True}, {"background": True}, {"background": True, "stream": True}):
            with pytest.raises(openai.RateLimitError):
                await ai.responses.create(model=MODEL, input="hi", **fields)
        with pytest.raises(openai.BadRequestError, match="context"):
            await ai.responses.create(model=MODEL, input="x" * 600, background=True)
        assert await texts(redis, world) == 0
        assert await world.responses.in_background() == []


async def test_what_cannot_be_stored_at_its_end_is_stored_later(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai:
        stored, failing = world.responses.keep_input, True

        async def keep_input(news: Any) -> Any:
            if failing:
                raise Unavailable("Redis is away")
            return await stored(news)

        world.responses.keep_input = keep_input  # type: ignore[method-assign]
        hold.set()
        made = await ai.responses.create(model=MODEL, input="hi", store=True)
        assert made.output_text == TEXT
        with pytest.raises(openai.NotFoundError):
            await ai.responses.retrieve(made.id)
        failing = False

        async def is_there() -> bool:
            return (await get(world.gateways[1], made.id)).status_code == 200

        await until(is_there)
        await world.settled(1)


async def test_what_redis_lost_of_one_in_the_background_is_written_again(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world, 1) as ai:
        body = {"model": MODEL, "input": "hi", "background": True, "stream": True}
        asked = asyncio.create_task(world.gateways[0].post("responses", body))
        (parts,) = await found_keys(redis, f"{world.responses._prefix}:*:response-parts:*")
        (given,) = await found_keys(redis, f"{world.responses._prefix}:*:response-input:*")
        # Given one of which something is kept, when Redis loses that and all behind it
        await redis.execute("DEL", parts, given)
        # Then it ends as if nothing had been lost
        hold.set()
        told = events(await asked)[-1]["response"]
        await until(has_status(ai, told["id"], "completed"))
        assert (await ai.responses.retrieve(told["id"])).output_text == TEXT
        assert len((await ai.responses.input_items.list(told["id"])).data) == 1
        whole = events(await get(world.gateways[1], f"{told['id']}?stream=true"))
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        await world.settled(1)


async def test_one_that_was_begun_too_often_has_failed(redis: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "MAX_RUNS", 1)
    async with keyed_world(redis, hold=asyncio.Event()) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        made = await ai.responses.create(model=MODEL, input="hi", background=True)
        await world.backend.sent()
        await world.gateways[0].service.drain()
        await gone_on(world, other, made.id, "failed")
        failed = await other.responses.retrieve(made.id)
        assert (failed.status, failed.output) == ("failed", [])


# ---------------------------------------------------------------------------------------------- when gateways go


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_dead_gateway_ran_is_gone_on_with(redis: RedisStore, stream: bool) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world, 1) as ai:
        first, second = world.gateways
        body = {"model": MODEL, "input": "hi", "background": True, "stream": stream, "store": True}
        asked = asyncio.create_task(first.post("responses", body))
        await world.backend.sent()
        (session,) = first.service.ingress.sessions.values()
        made = f"resp_{session.request_id.removeprefix('req-')}"
        await until(has_status(ai, made, "in_progress"))
        await first.kill()
        hold.set()
        await gone_on(world, ai, made)
        assert (await ai.responses.retrieve(made)).output_text == TEXT
        one, two = world.backend.submits
        assert one.attempt.request_id == two.attempt.request_id
        assert len(two.token_ids) > len(one.token_ids)  # it went on from where it was
        if stream:
            found = events(await get(second, f"{made}?stream=true"))
            assert found[0]["sequence_number"] == EVENTS_A_RUN
            lost = await get(second, f"{made}?stream=true&starting_after=4")
            assert (lost.status_code, lost.json()["error"]["param"]) == (409, "starting_after")
        (settle,) = await world.settled(1)
        assert settle.attempt.epoch == two.attempt.epoch
        asked.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_dead_gateway_ran_under_a_key_that_was_revoked_has_failed(redis: RedisStore, stream: bool) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world:
        first, second = world.gateways
        # Given one in the background whose key was revoked, while its tenant has another
        async with ai_of(world, 1, "key-a2") as ai:
            body = {"model": MODEL, "input": "hi", "background": True, "stream": stream}
            asked = asyncio.create_task(first.post("responses", body))
            await world.backend.sent()
            (session,) = first.service.ingress.sessions.values()
            made = f"resp_{session.request_id.removeprefix('req-')}"
            await until(has_status(ai, made, "in_progress"))
            revoked = hashlib.sha256(b"key-a").hexdigest()
            await world.policy_records.change_key(revoked, lambda old: replace_key(old, revoked=True))
            # When its gateway dies
            await first.kill()
            # Then it has failed soon, and says why
            await gone_on(world, ai, made, "failed")
            failed = await ai.responses.retrieve(made)
            assert failed.error is not None
            assert "was revoked" in failed.error.message
            assert len(world.backend.submits) == 1
            if stream:
                (event,) = events(await get(second, f"{made}?stream=true", "key-a2"))
                assert event["type"] == "response.failed"
        asked.cancel()


def replace_key(old: KeyRecord | None, *, revoked: bool) -> KeyRecord:
    assert old is not None
    return msgspec.structs.replace(old, revoked=revoked)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_keyed_one_whose_gateway_died_is_the_same_response_at_the_next(redis: RedisStore, stream: bool) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world, 1) as ai:
        first, second = world.gateways
        body = {"model": MODEL, "input": "hi", "store": True, "stream": stream}
        asked = asyncio.create_task(first.post("responses", body, "k"))
        await world.backend.sent()
        await world.desk.ask_quiet()
        await first.kill()
        hold.set()
        answer = await second.post("responses", body, "k")
        if stream and "error" in events(answer)[-1]:  # it had read from the run that died
            answer = await second.post("responses", body, "k")
        found = events(answer)[-1]["response"] if stream else answer.json()
        assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", TEXT)
        assert (await ai.responses.retrieve(found["id"])).to_dict(exclude_unset=True) == found
        assert (await second.post("responses", body, "k")).content == answer.content
        (settle,) = await world.settled(1)
        assert settle.attempt.epoch == world.backend.submits[-1].attempt.epoch
        asked.cancel()


async def test_what_a_stopping_gateway_ran_is_gone_on_with_or_cancelled(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        one, two = [await ai.responses.create(model=MODEL, input="hi", background=True) for _ in range(2)]
        await until(lambda: len(world.backend.submits) == 2)
        await world.gateways[0].service.drain()
        cancelled = await other.responses.cancel(two.id)
        assert cancelled.status == "cancelled"
        hold.set()
        await gone_on(world, other, one.id)
        assert (await other.responses.retrieve(one.id)).output_text == TEXT
        assert (await other.responses.retrieve(two.id)).status == "cancelled"
        assert await world.responses.in_background() == []
        await world.settled(3)
