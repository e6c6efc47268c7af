"""Comments of a silent stream, which no client may take for news."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from shared.bus.memory_bus import MemoryBroker
from shared.contracts.errors import Unavailable
from tests.pipeline.gateway_support import HEADERS, MODEL, Backend, Stack, default_output, http_stack

COMMENT = b": keep-alive\n\n"
TEXT = default_output("hi")
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "stream": True}


def slow(step_s: float) -> Backend:
    return Backend(MemoryBroker(), step_s=step_s, tokens_per_frame=30)


async def post(url: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        return await client.post("/v1/completions", json=BODY)


async def running(stack: Stack) -> None:
    async with asyncio.timeout(30):
        while not stack.backend.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_says_something_before_its_first_token_and_between_them() -> None:
    async with http_stack(slow(0.3), keep_alive_s=0.05) as (_, url):
        response = await post(url)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.content.startswith(COMMENT)
        frames = response.content.removesuffix(b"\n\n").split(b"\n\n")
        said = [frame for frame in frames if not frame.startswith(b":")]
        assert frames.count(COMMENT.strip()) > 1
        assert said[-1] == b"data: [DONE]"
        events = [json.loads(frame.removeprefix(b"data: ")) for frame in said[:-1]]
        assert "".join(event["choices"][0]["text"] for event in events) == TEXT


async def test_the_official_client_hears_none_of_it() -> None:
    async with http_stack(slow(0.2), keep_alive_s=0.05) as (_, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=0) as ai:
            stream = await ai.completions.create(model=MODEL, prompt="hi", stream=True)
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def fail_all(stack: Stack) -> None:
    for session in stack.service.ingress.sessions.values():
        session.fail(Unavailable("gone", code="worker_lost"))


async def test_what_fails_before_the_first_comment_has_its_own_status() -> None:
    async with http_stack(slow(60.0), keep_alive_s=60.0) as (stack, url):
        asked = asyncio.create_task(post(url))
        await running(stack)
        fail_all(stack)
        assert (await asked).status_code == 503


async def test_what_fails_behind_a_comment_is_the_last_frame() -> None:
    async with http_stack(slow(60.0), keep_alive_s=0.1) as (stack, url):
        said = b""
        async with (
            httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=BODY) as response,
        ):
            assert response.status_code == 200
            async for piece in response.aiter_bytes():
                said += piece
                if stack.backend.running:
                    fail_all(stack)
        *comments, last = said.removesuffix(b"\n\n").split(b"\n\n")
        assert set(comments) == {COMMENT.strip()}
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"


async def test_the_official_client_raises_what_came_behind_a_comment() -> None:
    async with (
        http_stack(slow(60.0), keep_alive_s=0.1) as (stack, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=0) as ai,
    ):
        stream = await ai.completions.create(model=MODEL, prompt="hi", stream=True)
        fail_all(stack)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]


async def test_zero_switches_them_off() -> None:
    async with http_stack(slow(0.1), keep_alive_s=0) as (_, url):
        assert COMMENT not in (await post(url)).content
