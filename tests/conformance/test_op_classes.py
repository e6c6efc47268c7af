"""OP-35, OP-36 and OP-38: what is too large, what is long and what is urgent. A real stack, a pool of 64 blocks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from shared.telemetry import attributes as a
from tests.stack.running import Baton
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import CHATML, tokenizer_json

pytestmark = pytest.mark.timeout(180)

MODEL, PLACES, CHUNK = "tiny", 4, 16
BLOCK, BLOCKS = 16, 64
BLOCK_BYTES = 4 * 2 * 2 * 16 * 4 * BLOCK  # layers, K and V, heads, width, float32, tokens
LOW_TOKENS, STREAM_TOKENS = 120, 200
ROUNDS = 10
SETTINGS = {
    "model.name": MODEL,
    "model.dtype": "float32",
    "kv.block_size": str(BLOCK),
    "kv.pool_bytes": str(BLOCKS * BLOCK_BYTES),
    "engine.max_sequences": str(PLACES),
    "engine.chunk_size": str(CHUNK),
    "engine.kernels": "torch",  # slow enough to meet requests that still run
    "engine.publish_interval_ms": "0",
    "workers.prefill": "0",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    base = tmp_path_factory.mktemp("classes")
    folder = make_tiny_model(base / "tiny", eos_token_id=None, max_position_embeddings=4096)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    texts = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    baton = Baton(base / "state")
    try:
        settings = SETTINGS | {"model.path": str(folder)}
        baton.up(*(part for name, value in settings.items() for part in ("--set", f"{name}={value}")))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


@asynccontextmanager
async def client_of(stack: Baton) -> AsyncIterator[httpx.AsyncClient]:
    assert stack.record is not None
    headers = {"Authorization": f"Bearer {stack.record.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=100) as client:
        yield client


@dataclass
class Seen:
    """What a client saw of one stream."""

    id: str = ""
    pieces: list[str] = field(default_factory=list)
    finish: str = ""
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def body(prompt: str | list[int], tokens: int, tier: str = "priority") -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "service_tier": tier}


def long_prompt(number: int, length: int) -> list[int]:
    return [3 + (number * 7 + i) % 200 for i in range(length)]


async def stream(client: httpx.AsyncClient, asked: dict[str, Any], seen: Seen | None = None) -> Seen:
    seen = seen or Seen()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=asked | more) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            seen.id = event["id"]
            seen.tokens = (event.get("usage") or {}).get("completion_tokens", seen.tokens)
            for choice in event["choices"]:
                seen.first_s = seen.first_s or time.monotonic()
                seen.pieces.append(choice["text"])
                seen.finish = choice["finish_reason"] or seen.finish
    seen.end_s = time.monotonic()
    return seen


async def test_op35_what_can_never_fit_is_refused_at_once_and_holds_up_nobody(stack: Baton) -> None:
    async with client_of(stack) as client:
        # Given a pool of 1024 tokens and a context of 4096, a prompt of 1500, then ten short ones
        short = [asyncio.create_task(stream(client, body(f"short {i}", 8))) for i in range(5)]
        huge = asyncio.create_task(client.post("/v1/completions", json=body(long_prompt(0, 1500), 8)))
        short += [asyncio.create_task(stream(client, body(f"short {i}", 8))) for i in range(5, 10)]
        answer = await huge
        # Then it is refused with the real limit
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"{BLOCK * BLOCKS + 1} tokens" in error["message"]
        assert "retry-after" not in answer.headers
        # And the short ones finish
        for seen in await asyncio.gather(*short):
            assert (seen.finish, seen.tokens) == ("length", 8)
        # A prompt that fits, with an output that does not, is refused alike; one token less is served to its end
        prompt = long_prompt(1, 900)
        answer = await client.post("/v1/completions", json=body(prompt, 126))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        seen = await stream(client, body(prompt, 125))
        assert (seen.finish, seen.tokens) == ("length", 125)
        # Where no length was asked for, the output ends with the pool
        seen = await stream(client, {name: value for name, value in body(prompt, 0).items() if name != "max_tokens"})
        assert (seen.finish, seen.tokens) == ("length", 125)
        # Choices that could not all begin are told so too
        answer = await client.post("/v1/completions", json=body(long_prompt(2, 1000), 16) | {"n": 4})
        assert answer.status_code == 400, answer.text
    await asyncio.to_thread(stack.wait_idle)


async def test_op36_long_prompts_do_not_stop_a_stream(stack: Baton) -> None:
    """That each step has the stream's token in it is counted in tests/unit/test_mixed_steps.py; here it is seen."""
    async with client_of(stack) as client:
        asked = body("a long stream", STREAM_TOKENS)
        reference = await stream(client, asked)
        meanwhile, seen = list[int](), Seen()
        running = asyncio.create_task(stream(client, asked, seen))
        while not seen.pieces:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        # When five prompts of twenty chunks come one after the other
        for number in range(5):
            count = len(seen.text)
            late = await stream(client, body(long_prompt(number, 20 * CHUNK), 1))
            assert (late.finish, late.tokens) == ("length", 1)
            if not running.done():
                meanwhile.append(len(seen.text) - count)  # a piece may hold several tokens
        got = await running
        # Then each of them came to its token, and the stream went on meanwhile, to the same text
        assert meanwhile
        assert sum(meanwhile) >= 5 * len(meanwhile)
        assert got.text == reference.text
        assert (got.finish, got.tokens) == ("length", STREAM_TOKENS)
    await asyncio.to_thread(stack.wait_idle)


async def one_round(stack: Baton, client: httpx.AsyncClient) -> tuple[list[Seen], Seen]:
    """Four long requests of a lower class fill all places, then one short urgent one comes."""
    low = [Seen() for _ in range(PLACES)]
    tasks = [
        asyncio.create_task(stream(client, body(f"low {i}", LOW_TOKENS, "flex"), seen)) for i, seen in enumerate(low)
    ]
    async with asyncio.timeout(60):
        while not all(seen.pieces for seen in low):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    high = await stream(client, body("urgent", 4))
    await asyncio.gather(*tasks)
    return low, high


def preemptions(stack: Baton, seen: Seen) -> int:
    spans = {span["name"]: span for span in stack.trace(seen.id, "gateway.request", "decode.run")}
    return int(spans["decode.run"]["attributes"][a.PREEMPTIONS])


async def test_op38_an_urgent_request_does_not_wait_for_a_place(stack: Baton) -> None:
    async with client_of(stack) as client:
        alone = [(await stream(client, body(f"low {i}", LOW_TOKENS, "flex"))).text for i in range(PLACES)]
        for _ in range(ROUNDS):  # a worker may be done with one before another's client has begun
            low, high = await one_round(stack, client)
            # whatever happened, every text is the reference's and whole
            assert [seen.text for seen in low] == alone
            assert {(seen.finish, seen.tokens) for seen in low} == {("length", LOW_TOKENS)}
            assert (high.finish, high.tokens) == ("length", 4)
            counts = await asyncio.to_thread(lambda low=low: [preemptions(stack, seen) for seen in low])
            if sum(counts) and high.end_s < min(seen.end_s for seen in low):
                break
        # The urgent one had a place of one of the four, and ended before any of them
        assert sum(counts) == 1
        assert high.end_s < min(seen.end_s for seen in low)
    await asyncio.to_thread(stack.wait_idle)
