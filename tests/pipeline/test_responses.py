"""The Responses API by the official client, unchanged, against the gateway behind a real HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from shared.bus.memory_bus import MemoryBroker
from shared.contracts.errors import Unavailable
from shared.store.redis_store import connect_redis
from tests.pipeline.gateway_support import HEADERS, MODEL, Backend, default_output, gateway_stack, http_stack
from tests.pipeline.keyed_support import keyed_world
from tests.pipeline.test_gateway_openai import client
from tests.pipeline.test_keyed_requests import events
from tests.servers import RedisServer

TEXT = default_output("")
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
ROOM = 4096


async def test_created_whole_and_streamed() -> None:
    async with http_stack() as (stack, url), client(url, strict=False) as ai:
        whole = await ai.responses.create(model=MODEL, input="hi", store=False)
        assert (whole.output_text, whole.status) == (TEXT, "completed")
        assert whole.usage is not None
        assert whole.usage.input_tokens_details.cached_tokens == 3
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == TEXT
        short = await ai.responses.create(model=MODEL, input="hi", max_output_tokens=3)
        assert short.status == "incomplete"
        assert short.incomplete_details is not None
        assert short.incomplete_details.reason == "max_output_tokens"
        await stack.settled(3)


async def test_the_stream_helper_and_a_turn_of_tools() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: "It is sunny." if "tool_response" in prompt else CALL)
    async with http_stack(backend, context=ROOM) as (_, url), client(url, strict=False) as ai:
        items: list[Any] = [{"role": "user", "content": "The weather in Rome?"}]
        async with ai.responses.stream(model=MODEL, input=items, tools=[TOOL], max_output_tokens=200) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        (call,) = final.output
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')
        items += final.output  # as its documentation does
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        answer = await ai.responses.create(model=MODEL, input=items, tools=[TOOL], max_output_tokens=200)
        assert answer.output_text == "It is sunny."


async def test_answers_are_what_openai_describes() -> None:
    """This client holds all of them to OpenAI's document."""
    backend = Backend(MemoryBroker(), text=lambda prompt: "Well. " + CALL)
    async with gateway_stack(backend, context=ROOM) as stack:
        body = {"model": MODEL, "input": "hi", "tools": [TOOL], "max_output_tokens": 200, "service_tier": "flex"}
        whole = (await stack.client.post("/v1/responses", json=body, headers=HEADERS)).json()
        assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
        streamed = await stack.client.post("/v1/responses", json=body | {"stream": True}, headers=HEADERS)
        assert streamed.text.count("event: response.") == streamed.text.count("data: {") > 10
        assert "[DONE]" not in streamed.text


async def test_errors_are_the_clients_exceptions() -> None:
    async with http_stack() as (stack, url), client(url) as ai:
        for fields, param in (
            ({"background": True, "store": False}, "background"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"max_output_tokens": 10_000}, "input"),
            ({"input": "x" * 600}, "input"),
            ({"tool_choice": "required"}, "tool_choice"),
        ):
            with pytest.raises(openai.BadRequestError) as bad:
                await ai.responses.create(**({"model": MODEL, "input": "hi"} | fields))  # type: ignore[call-overload]
            assert bad.value.param == param
        with pytest.raises(openai.NotFoundError):
            await ai.responses.create(model="other", input="hi")
        async with client(url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model=MODEL, input="hi")
        assert not stack.backend.submits


async def test_a_stream_that_breaks_ends_as_failed() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url), client(url, strict=False) as ai:
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True)
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                for session in list(stack.service.ingress.sessions.values()):
                    session.fail(Unavailable("gone", code="worker_lost"))
        assert kinds[-1] == "response.failed"
        assert backend.hold is not None
        backend.hold.set()


async def test_a_client_that_leaves_cancels_its_response() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url), client(url, strict=False) as ai:
        stream = await ai.responses.create(model=MODEL, input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        (settle,) = await stack.settled()
        assert settle.finish == "cancelled"


async def test_a_keyed_response_is_run_once_and_resumed(redis_server: RedisServer) -> None:
    body = {"model": MODEL, "input": "hi", "stream": True}
    async with connect_redis(redis_server.url) as redis, keyed_world(redis) as world:
        first, second = world.gateways
        whole = await first.post("responses", body, "k")
        assert (await second.post("responses", body, "k")).content == whole.content
        found = events(whole)
        assert [event["sequence_number"] for _, event in found] == list(range(len(found)))
        rest = await second.post("responses", body, "k", **{"last-event-id": found[4][0]})
        assert events(rest) == found[5:]
        once = await first.post("responses", body | {"stream": False}, "k2")
        assert (await second.post("responses", body | {"stream": False}, "k2")).json() == once.json()
        assert len(world.backend.submits) == 2
        other = await second.post("responses", body | {"input": "ho"}, "k")
        assert other.status_code == 422
        await world.settled(2)
