"""Shared by the conformance cases: each sends something odd, then a canary must still be served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.pipeline.gateway_support import HEADERS, MODEL, Stack


async def send(stack: Stack, path: str, body: Any, key: str = "key-a", **headers: str) -> httpx.Response:
    """POST a body: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**HEADERS, "authorization": f"Bearer {key}", "content-type": "application/json", **headers}
    return await stack.client.post(f"/v1/{path}", content=content, headers=headers)


def frames(response: httpx.Response) -> list[Any]:
    """The events of a stream; `[DONE]` as that string. Every byte must be valid UTF-8."""
    text = response.content.decode("utf-8")
    assert text.endswith("\n\n")
    parts = [frame.removeprefix("data: ") for frame in text.removesuffix("\n\n").split("\n\n")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


def deltas(got: list[Any]) -> list[str]:
    """The pieces of text of choice 0."""
    choices = [choice for event in got if event != "[DONE]" for choice in event["choices"]]
    pieces = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
    return [piece for piece in pieces if piece]


def finishes(got: list[Any]) -> list[str | None]:
    """The finish reasons of all chunks, null ones included."""
    return [choice["finish_reason"] for event in got if event != "[DONE]" for choice in event["choices"]]


async def refused(stack: Stack, path: str, body: Any, param: str) -> None:
    """Assert a 400 that names `param`, in OpenAI's shape."""
    response = await send(stack, path, body)
    assert response.status_code == 400, f"{body!r}: {response.status_code}"
    error = response.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@asynccontextmanager
async def bystander(stack: Stack, canary_key: str = "key-a") -> AsyncIterator[None]:
    """A long stream of the other tenant, running before and saying in the end what it says alone; a canary comes last.

    The stand-in for a worker has it run until the case is over; a real one takes its time for 200 tokens.
    """
    body = {"model": MODEL, "prompt": "bystander", "temperature": 0, "seed": 1, "max_tokens": 200, "ignore_eos": True}
    go = stack.backend.held_prompts["bystander"] = asyncio.Event()
    before = stack.service.ingress.sessions.copy()
    running = asyncio.create_task(send(stack, "completions", body | {"stream": True}, "key-b"))
    async with asyncio.timeout(30):
        while not any(s.stream.num_committed for i, s in stack.service.ingress.sessions.items() if i not in before):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    try:
        yield
    finally:
        go.set()
    got = frames(await running)
    assert got[-1] == "[DONE]"
    alone = (await send(stack, "completions", body, "key-b")).json()["choices"][0]
    assert "".join(deltas(got)) == alone["text"]
    assert [finish for finish in finishes(got) if finish] == [alone["finish_reason"]]
    await canary(stack, canary_key)


async def canary(stack: Stack, key: str = "key-a") -> None:
    """Greedy, 4 tokens, must be served."""
    body = {"model": MODEL, "prompt": "canary", "temperature": 0, "max_tokens": 4}
    response = await send(stack, "completions", body, key)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 4
