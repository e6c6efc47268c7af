"""32 concurrent streams of mixed lengths: no error, no stall, and everything idle afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.stack.running import MODEL, Baton

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

STREAMS, MAX_STALL_S = 32, 5.0


@dataclass
class Seen:
    """What the clients saw. A gap is the time between two deltas of one stream, seconds."""

    finished: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def request(draw: random.Random) -> dict[str, Any]:
    """A prompt of 4 to 120 tokens and an answer of 4 to 32."""
    prompt = [draw.randrange(1000, 40_000) for _ in range(draw.choice((4, 12, 40, 120)))]
    shape = {"max_tokens": draw.randint(4, 32), "temperature": draw.choice((0, 0.8)), "seed": draw.randrange(2**32)}
    return {"model": MODEL, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **shape}


async def one_stream(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    last = time.monotonic()
    gaps: list[float] = []
    tokens, finish, done = 0, "", False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            seen.errors.append(f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}")
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            done = line == "data: [DONE]"
            if not done:
                event = json.loads(line.removeprefix("data: "))
                finish = "".join(choice["finish_reason"] or "" for choice in event.get("choices", ())) or finish
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                seen.errors += [str(event["error"])] if "error" in event else []
    if not (done and finish in ("stop", "length") and 0 < tokens <= body["max_tokens"]):
        seen.errors.append(f"ended with done={done} finish={finish!r} tokens={tokens}")
    seen.finished += 1
    seen.tokens += tokens
    seen.first += gaps[:1]
    seen.gaps += gaps[1:]


async def closed_loop(stack: Baton, streams: int, seconds: float) -> Seen:
    """Every one of `streams` clients sends its next request when the one before has ended, until time is up."""
    assert stack.record is not None
    seen = Seen()
    headers = {"Authorization": f"Bearer {stack.record.api_key}"}
    limits = httpx.Limits(max_connections=streams)
    deadline = time.monotonic() + seconds

    async def client_loop(number: int, client: httpx.AsyncClient) -> None:
        draw = random.Random(number)
        while time.monotonic() < deadline:
            await one_stream(client, request(draw), seen)

    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120, limits=limits) as client:
        await asyncio.gather(*(client_loop(number, client) for number in range(streams)))
    return seen


@pytest.mark.parametrize("seconds", [8.0, pytest.param(15.0, marks=pytest.mark.long)])
async def test_32_streams(stack: Baton, seconds: float) -> None:
    # Given an idle stack
    await asyncio.to_thread(stack.wait_idle)
    # When 32 clients stream answers of mixed lengths for some seconds, each one after another
    started = time.monotonic()
    seen = await closed_loop(stack, STREAMS, seconds)
    took = time.monotonic() - started
    print(
        f"\n{seen.finished} streams, {seen.tokens} tokens in {took:.1f} s; "
        f"first token after at most {max(seen.first):.2f} s; longest gap {max(seen.gaps):.2f} s"
    )
    # Then none failed, none stood still, and all of them got their turn
    assert not seen.errors
    assert max(seen.gaps) < MAX_STALL_S
    assert seen.finished >= STREAMS
    # And everything is as it was before: no request, no sequence, no block is held
    await asyncio.to_thread(stack.wait_idle)
    assert await asyncio.to_thread(stack.answers)
