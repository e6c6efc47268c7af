"""The Messages API by its official client, unchanged, against the gateway behind a real HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from shared.bus.memory_bus import MemoryBroker
from shared.contracts.errors import QuotaExceeded, Unavailable
from shared.store.redis_store import connect_redis
from tests.pipeline.gateway_support import HEADERS, MODEL, Backend, default_output, gateway_stack, http_stack
from tests.pipeline.keyed_support import keyed_world
from tests.pipeline.test_keyed_requests import events
from tests.servers import RedisServer

TEXT = default_output("")
HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Well. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
ROOM = 4096


def client(url: str, key: str = "key-a") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_created_whole_and_streamed() -> None:
    async with http_stack() as (stack, url), client(url) as ai:
        whole = await ai.messages.create(model=MODEL, max_tokens=100, messages=HI)
        assert [block.text for block in whole.content if block.type == "text"] == [TEXT]
        assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
        assert whole.usage.cache_read_input_tokens == 3
        assert whole._request_id
        async with ai.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == TEXT
        assert (final.usage, final.stop_reason) == (whole.usage, "end_turn")
        assert final.content[0].text == TEXT  # type: ignore[union-attr]
        counted = await ai.messages.count_tokens(model=MODEL, messages=HI)
        assert counted.input_tokens == whole.usage.input_tokens + 3
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="key-a", max_retries=0) as bearer:
            short = await bearer.messages.create(model=MODEL, max_tokens=3, messages=HI)
        assert short.stop_reason == "max_tokens"
        await stack.settled(3)


async def test_the_stop_sequence_is_told() -> None:
    async with http_stack() as (_, url), client(url) as ai:
        for streamed in (False, True):
            arguments: Any = {"model": MODEL, "max_tokens": 100, "messages": HI, "stop_sequences": ["six", "five"]}
            if streamed:
                async with ai.messages.stream(**arguments) as stream:
                    found = await stream.get_final_message()
            else:
                found = await ai.messages.create(**arguments)
            assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "five")
            assert found.content[0].text == TEXT[: TEXT.index("five")]  # type: ignore[union-attr]


async def test_a_turn_of_tools() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: "It is sunny." if "tool_response" in prompt else CALL)
    async with http_stack(backend, context=ROOM) as (_, url), client(url) as ai:
        asked: Any = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
        whole = await ai.messages.create(**asked, messages=HI)
        async with ai.messages.stream(**asked, messages=HI) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            assert [block.type for block in message.content] == ["text", "tool_use"]
            assert message.stop_reason == "tool_use"
            assert message.content[1].input == {"city": "Rome"}  # type: ignore[union-attr]
            called: Any = message.content[1]
            result = {"type": "tool_result", "tool_use_id": called.id, "content": "sunny"}
            turns: Any = [
                *HI,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
            answer = await ai.messages.create(**asked, messages=turns)
            assert answer.content[0].text == "It is sunny."  # type: ignore[union-attr]


async def test_errors_are_the_clients_exceptions() -> None:
    backend = Backend(MemoryBroker())
    async with http_stack(backend) as (_, url), client(url) as ai:
        for fields, param in (
            ({"max_tokens": 10_000}, "max_tokens"),
            ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
                "messages.0.content.0.type",
            ),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ):
            arguments: Any = {"model": MODEL, "max_tokens": 9, "messages": HI} | fields
            with pytest.raises(anthropic.BadRequestError) as bad:
                await ai.messages.create(**arguments)
            body: Any = bad.value.body
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert param in body["error"]["message"] or "context" in body["error"]["message"]
        with pytest.raises(anthropic.NotFoundError):
            await ai.messages.count_tokens(model="other", messages=HI)
        async with client(url, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.create(model=MODEL, max_tokens=9, messages=HI)
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        assert not backend.submits
        backend.policy_refuses = QuotaExceeded("too much", retry_after_s=7)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await ai.messages.create(model=MODEL, max_tokens=9, messages=HI)
        assert limited.value.response.headers["retry-after"] == "7"


async def test_a_stream_that_breaks_raises_in_the_client() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url), client(url) as ai:
        stream = await ai.messages.create(model=MODEL, max_tokens=100, messages=HI, stream=True)
        await backend.sent()
        for session in list(stack.service.ingress.sessions.values()):
            session.fail(Unavailable("gone", code="worker_lost"))
        with pytest.raises(anthropic.APIStatusError) as broken:
            _ = [event async for event in stream]
        assert broken.value.body["error"] == {"type": "overloaded_error", "message": "gone"}  # type: ignore[index]
        assert backend.hold is not None
        backend.hold.set()


async def test_a_silent_stream_gets_pings() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend, keep_alive_s=0.05) as (_, url), client(url) as ai:
        body: Any = {"model": MODEL, "max_tokens": 100, "messages": HI}
        pings, answer = 0, await ai.messages.create(**body, stream=True)
        async for line in answer.response.aiter_lines():
            pings += line == "event: ping"
            assert not line.startswith(":")
            if pings == 4:
                assert backend.hold is not None
                backend.hold.set()
        assert pings >= 4


async def test_routing_errors_have_this_apis_form_too() -> None:
    async with gateway_stack() as stack:
        wrong = await stack.client.get("/v1/messages", headers=HEADERS)
        assert wrong.status_code == 405
        assert wrong.json()["error"]["type"] == "invalid_request_error"
        assert wrong.headers["request-id"] == wrong.headers["x-request-id"]
        big = await stack.client.post("/v1/messages", headers=HEADERS, content=b"x" * (5 << 20))
        assert (big.status_code, big.json()["error"]["type"]) == (413, "request_too_large")


async def test_a_keyed_message_is_run_once(redis_server: RedisServer) -> None:
    body = {"model": MODEL, "max_tokens": 100, "messages": HI, "stream": True}
    async with connect_redis(redis_server.url) as redis, keyed_world(redis) as world:
        first, second = world.gateways
        whole = await first.post("messages", body, "k")
        assert (await second.post("messages", body, "k")).content == whole.content
        found = events(whole)
        rest = await second.post("messages", body, "k", **{"last-event-id": found[3][0]})
        assert events(rest) == found[4:]
        other = await second.post("messages", body | {"max_tokens": 9}, "k")
        assert (other.status_code, other.json()["type"]) == (422, "error")
        assert len(world.backend.submits) == 1
        await world.settled(1)
