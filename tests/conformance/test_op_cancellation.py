"""OP-32 to 34: clients that leave or stop reading, at any point; nothing of theirs goes on, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shared.bus.memory_bus import MemoryBroker
from tests.pipeline.gateway_support import HEADERS, Backend, completion, http_stack
from tests.stack.running import MODEL, OTHER_KEY, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
SLOTS = 32
LIMIT_S = 60.0


def body(max_tokens: int, number: int, prompt_tokens: int = 20, **more: Any) -> dict[str, Any]:
    """A prompt that no other number shares."""
    prompt = [1000 + random.Random(number * 10_000 + place).randrange(8000) for place in range(prompt_tokens)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}


@asynccontextmanager
async def client_of(stack: Baton, key: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120, limits=limits) as client:
        yield client


async def stream(client: httpx.AsyncClient, asked: dict[str, Any]) -> str:
    """The finish reason of a stream read to its end."""
    finish = ""
    async with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    finish = choice["finish_reason"] or finish
    return finish


async def asked_at(stack: Baton, key: str, asked: dict[str, Any]) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    """Ask on a connection of its own."""
    where = urlsplit(stack.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return writer, reader


async def left_after(stack: Baton, seconds: float, asked: dict[str, Any]) -> None:
    """Ask on a connection of its own and close it so much later, whatever has come."""
    assert stack.record is not None
    writer, _ = await asked_at(stack, stack.record.api_key, asked)
    await asyncio.sleep(seconds)
    writer.transport.abort()


async def idle(stack: Baton) -> None:
    await asyncio.to_thread(stack.wait_idle, LIMIT_S)


async def test_op32_who_leaves_frees_everything_wherever_the_request_is(fake_stack: Baton) -> None:
    async with client_of(fake_stack, OTHER_KEY) as other:
        bystander = asyncio.create_task(stream(other, body(300, 1)))
        # streamed and not; in the decode, and with a prompt that takes prefill some steps
        leaving = [
            left_after(fake_stack, pause_s, body(4000, 10 + number, prompt_tokens, stream=number % 2 == 0))
            for number, (pause_s, prompt_tokens) in enumerate(
                [(1.0, 20), (1.0, 20), (0.0, 4000), (0.0, 4000), (0.05, 4000), (0.05, 4000), (0.2, 4000), (0.2, 20)]
            )
        ]
        await asyncio.gather(*leaving)
        assert await bystander == "length"
    # 4,000 tokens of any of them would take far longer than this
    await idle(fake_stack)
    gone = [one for one in fake_stack.get("/baton/traces?limit=50")["data"] if one["status"] == "client_gone"]
    assert gone


async def test_op33_who_leaves_the_queue_never_runs(fake_stack: Baton) -> None:
    def running() -> int:
        return sum(one["running"] for one in fake_stack.get("/baton/cluster")["workers"] if one["role"] == "decode")

    async with client_of(fake_stack, OTHER_KEY) as other:
        fillers = [asyncio.create_task(stream(other, body(6000, 100 + number))) for number in range(SLOTS)]
        await asyncio.to_thread(until, lambda: running() >= SLOTS, LIMIT_S)
        rng = random.Random(7)
        queued = [left_after(fake_stack, rng.uniform(0, 0.5), body(500, 200 + n, stream=n % 2 == 0)) for n in range(10)]
        # some slots get free while they leave
        for filler in fillers[:3]:
            filler.cancel()
        await asyncio.gather(*queued)
        for filler in fillers:
            filler.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)
    await idle(fake_stack)
    async with client_of(fake_stack, fake_stack.record.api_key) as client:
        canary = await client.post("/v1/completions", json=body(4, 300))
    assert canary.json()["usage"]["completion_tokens"] == 4


async def test_op34_who_does_not_read_is_cut_and_others_are_served() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: "x" * 100_000, tokens_per_frame=100)
    options: dict[str, Any] = {"max_unsent_bytes": 20_000, "context": 1_000_000, "send_buffer": 16_384}
    async with http_stack(backend, **options) as (stack, url):
        data = json.dumps(completion(stream=True, max_tokens=100_000)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nContent-Length: {len(data)}"
        readers = [unread(url, head.encode() + b"\r\n\r\n" + data) for _ in range(4)]
        try:
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                answer = await client.post(
                    "/v1/completions",
                    json=completion(max_tokens=2000),
                    headers={**HEADERS, "authorization": "Bearer key-b"},
                )
            assert answer.json()["usage"]["completion_tokens"] == 2000
            async with asyncio.timeout(LIMIT_S):
                while stack.service.ingress.sessions or len(backend.settles) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            for reader in readers:
                reader.close()
        assert len({cancel.attempt for cancel in backend.cancels if cancel.reason == "slow_client"}) == 4
        assert sorted(settle.finish for settle in backend.settles) == ["cancelled"] * 4 + ["length"]


def unread(url: str, request: bytes) -> socket.socket:
    """A connection that asks and reads nothing."""
    where = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((where.hostname, where.port))
    sock.sendall(request)
    return sock
