"""OP-32 to 34: clients that leave or stop reading, at any point; nothing of theirs goes on, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from shared.bus.memory_bus import MemoryBroker
from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from tests.conformance.observed import sample
from tests.pipeline.gateway_support import HEADERS, Backend, completion, http_stack
from tests.stack.running import MODEL, OTHER_KEY, Baton, tenants_file, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
SLOTS = 32
LIMIT_S = 60.0
STILL_S = 2.0
"""From the close of a connection to the end of its request at the workers, by their clocks."""


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


async def stream(client: httpx.AsyncClient, asked: dict[str, Any], begun: asyncio.Event | None = None) -> str:
    """The finish reason of a stream read to its end. `begun` is set when its first chunk has come."""
    finish = ""
    async with client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if begun is not None:
                    begun.set()
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


def running_at(stack: Baton) -> int:
    """Sequences at the decode worker, by its beat."""
    return sum(one["running"] for one in stack.get("/baton/cluster")["workers"] if one["role"] == "decode")


class Counted:
    """Counters of the two workers of a stack, as they tell them themselves."""

    def __init__(self, stack: Baton) -> None:
        shown = json.loads(stack.run("status", "--json").stdout)["metrics"]
        self._urls = {name.partition("-")[0]: url for name, url in shown.items()}

    def at(self, role: str, metric: Metric) -> float:
        return sample(httpx.get(self._urls[role], timeout=10).text, metric.exposed)

    def begun(self) -> tuple[float, float]:
        """Prompt tokens of requests that got a token, and those computed in prefill."""
        return self.at("decode", names.PROMPT_TOKENS), self.at("prefill", names.COMPUTED_TOKENS)


def spans_of(stack: Baton, max_tokens: int) -> list[dict[str, Any]]:
    """The spans of the request that asked for so many tokens and was left, as far as they have come."""
    gone = [one for one in stack.get("/baton/traces?limit=200")["data"] if one["status"] == "client_gone"]
    for one in gone:
        spans: list[dict[str, Any]] = stack.get(f"/baton/traces/{one['trace_id']}")["spans"]
        if any(span.get("attributes", {}).get("baton.max_tokens") == max_tokens for span in spans):
            return spans
    return []


async def test_op32_who_leaves_frees_everything_wherever_the_request_is(fake_stack: Baton) -> None:
    assert fake_stack.record is not None
    key, closed = fake_stack.record.api_key, dict[int, float]()

    async def leaves(number: int, prompt_tokens: int, when: Callable[[], Awaitable[object]]) -> None:
        """`number` is told apart from others by its max_tokens."""
        asked = body(4000 + number, 10 + number, prompt_tokens, stream=number % 2 == 0)
        writer, _ = await asked_at(fake_stack, key, asked)
        await when()
        closed[number] = time.time()
        writer.transport.abort()

    async def decoding() -> None:
        await asyncio.to_thread(until, lambda: running_at(fake_stack) >= 3, LIMIT_S)
        await asyncio.sleep(1.0)

    async with client_of(fake_stack, OTHER_KEY) as other:
        bystander = asyncio.create_task(stream(other, body(500, 1)))
        await asyncio.to_thread(until, lambda: running_at(fake_stack) >= 1, LIMIT_S)
        # streamed and not; in the decode, and on the way there, which a long prompt makes longer
        await asyncio.gather(leaves(0, 20, decoding), leaves(1, 20, decoding))
        pauses = [0.0, 0.0, 0.02, 0.05, 0.1, 0.2]
        await asyncio.gather(*(leaves(2 + n, 2000, partial(asyncio.sleep, s)) for n, s in enumerate(pauses)))
        assert await bystander == "length"
    await idle(fake_stack)
    counted = Counted(fake_stack)
    generated = counted.at("decode", names.GENERATION_TOKENS)

    def ended() -> dict[int, list[dict[str, Any]]]:
        found = {number: spans for number in closed if (spans := spans_of(fake_stack, 4000 + number))}
        runs = {number: [s for s in spans if s["name"] == "decode.run"] for number, spans in found.items()}
        return found if runs.get(0) and runs.get(1) else {}

    for number, spans in (await asyncio.to_thread(until, ended, LIMIT_S)).items():
        root = next(span for span in spans if span["name"] == "gateway.request")
        assert root["attributes"]["baton.finish"] == "cancelled"
        for span in spans:
            if span["name"] in ("decode.run", "prefill.run"):
                assert span["end_ns"] / 1e9 - closed[number] < STILL_S, (number, span)
            if span["name"] == "decode.run":
                assert span["attributes"]["baton.completion_tokens"] < 4000
                assert span["attributes"]["baton.finish"] != "length"
    assert counted.at("decode", names.GENERATION_TOKENS) == generated


async def leave_the_queue(stack: Baton, slots: int, rounds: int) -> None:
    """Ten at a time wait for a worker whose every place is taken, and leave. In every other round a place gets free
    meanwhile; in the others none of the ten may begin, and none of the last ten when at once all places are free."""
    assert stack.record is not None
    rng, counted, filling = random.Random(7), Counted(stack), itertools.count(100)
    key, fillers = stack.record.api_key, list[asyncio.Task[str]]()
    async with client_of(stack, OTHER_KEY) as other:

        async def fill() -> None:
            runs = asyncio.Event()
            fillers.append(asyncio.create_task(stream(other, body(8000, next(filling)), runs)))
            async with asyncio.timeout(LIMIT_S):
                await runs.wait()

        def ten(number: int) -> list[dict[str, Any]]:
            return [body(500, 10_000 + 10 * number + n, stream=n % 2 == 0) for n in range(10)]

        try:
            await asyncio.gather(*(fill() for _ in range(slots)))
            for number in range(rounds):
                begun = counted.begun()
                leaving = asyncio.gather(*(left_after(stack, rng.uniform(0, 0.5), one) for one in ten(number)))
                if number % 2:
                    await asyncio.sleep(rng.uniform(0, 0.5))
                    fillers.pop(0).cancel()
                    await fill()
                await leaving
                await holds(stack, requests=slots, queued=0)
                if number % 2:  # one that had its place may be in a step still, which is counted at its end
                    await asyncio.sleep(0.5)
                    await holds(stack, requests=slots, queued=0)
                else:
                    assert counted.begun() == begun
            begun = counted.begun()
            waiting = [(await asked_at(stack, key, one))[0] for one in ten(rounds)]
            await holds(stack, requests=slots + 10, queued=10)
            for writer in waiting:
                await asyncio.sleep(rng.uniform(0, 0.05))
                writer.transport.abort()
            await holds(stack, requests=slots)
        finally:
            for filler in fillers:
                filler.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)
    await idle(stack)
    assert counted.begun() == begun


async def holds(stack: Baton, requests: int, queued: int | None = None) -> None:
    """Returns when the gateway has so many requests, so many wait for a place, and none is in prefill."""

    def so() -> bool:
        found = stack.get("/baton/cluster")
        prefills = [worker for worker in found["workers"] if worker["role"] == "prefill"]
        return (
            found["gateway"]["requests"] == requests
            and queued in (None, found["scheduler"]["queued"])
            and all(worker["free_blocks"] == worker["total_blocks"] for worker in prefills)
        )

    await asyncio.to_thread(until, so, LIMIT_S)


async def canary(stack: Baton) -> None:
    assert stack.record is not None
    async with client_of(stack, stack.record.api_key) as client:
        answer = await client.post("/v1/completions", json=body(4, 300))
    assert answer.json()["usage"]["completion_tokens"] == 4


async def test_op33_who_leaves_the_queue_never_runs(fake_stack: Baton) -> None:
    await leave_the_queue(fake_stack, SLOTS, rounds=2)
    await canary(fake_stack)


@pytest.mark.long
async def test_op33_fifty_rounds_at_one_place(own: Baton, tmp_path: Path) -> None:
    others = tenants_file(tmp_path / "tenants.json", [("other", OTHER_KEY)])
    own.up("--fake", "--set", "engine.max_sequences=1", "--set", f"policy.tenants={others}")
    await leave_the_queue(own, 1, rounds=50)
    await canary(own)
    own.down()


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
