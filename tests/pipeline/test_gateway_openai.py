"""The official client, unchanged, against the gateway behind a real HTTP server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from shared.bus.memory_bus import MemoryBroker
from shared.contracts.errors import Unavailable
from tests.pipeline.gateway_support import MODEL, Backend, default_output, http_stack

TEXT = default_output("")


def client(url: str, key: str = "key-a", *, strict: bool = True) -> openai.AsyncOpenAI:
    """`strict` checks every response against the client's types. They know only last chunks of streamed completions,
    whose `finish_reason` is never null; OpenAI's own service does not pass there either."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=strict)


async def test_chat_whole_and_streamed() -> None:
    async with http_stack() as (_, url), client(url) as ai:
        whole = await ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == TEXT
        stream = await ai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage == whole.usage


async def test_the_stream_helper_accumulates_the_same() -> None:
    async with http_stack() as (_, url), client(url) as ai:
        messages = [{"role": "user", "content": "hi"}]
        async with ai.chat.completions.stream(model=MODEL, messages=messages) as stream:  # type: ignore[arg-type]
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == TEXT
        assert final.choices[0].finish_reason == "stop"


async def test_completions_models_and_extensions() -> None:
    async with http_stack() as (stack, url), client(url) as ai:
        done = await ai.completions.create(model=MODEL, prompt="hi", max_tokens=5, extra_body={"top_k": 3})
        assert (done.choices[0].text, done.choices[0].finish_reason) == (TEXT[:5], "length")
        assert stack.backend.submits[0].sampling[0].top_k == 3
        assert [model.id async for model in await ai.models.list()] == [MODEL]
        assert (await ai.models.retrieve(MODEL)).id == MODEL


async def test_errors_are_the_clients_exceptions() -> None:
    async with http_stack() as (_, url), client(url) as ai:
        with pytest.raises(openai.BadRequestError) as bad:
            await ai.completions.create(model=MODEL, prompt="hi", max_tokens=0)
        assert bad.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            await ai.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError) as long:
            await ai.completions.create(model=MODEL, prompt="x" * 600, stream=True)
        assert long.value.code == "context_length_exceeded"
        async with client(url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_a_broken_stream_raises_in_the_client() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url), client(url, strict=False) as ai:
        stream = await ai.completions.create(model=MODEL, prompt="hi", stream=True)
        for session in stack.service.ingress.sessions.values():
            session.fail(Unavailable("gone", code="worker_lost"))
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
        backend.hold.set()  # type: ignore[union-attr]


async def test_many_streams_at_once_all_end_as_they_should() -> None:
    async with http_stack() as (stack, url), client(url, strict=False) as ai:

        async def one(limit: int | None) -> tuple[str, list[str]]:
            stream = await ai.completions.create(
                model=MODEL, prompt="hi", stream=True, max_tokens=openai.NOT_GIVEN if limit is None else limit
            )
            choices = [chunk.choices[0] async for chunk in stream]
            return "".join(c.text for c in choices), [c.finish_reason for c in choices if c.finish_reason]

        got = await asyncio.gather(*(one(5 if n % 2 else None) for n in range(32)))
        assert got == [(TEXT[:5], ["length"]) if n % 2 else (TEXT, ["stop"]) for n in range(32)]
        await stack.settled(32)
