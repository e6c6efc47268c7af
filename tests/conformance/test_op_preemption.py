"""OP-37 and OP-66: preemption changes no output, sends nothing twice, resets no clock. A real stack, a tiny pool."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from shared.telemetry import attributes as a
from tests.stack.running import Baton, until
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import CHATML, tokenizer_json

pytestmark = pytest.mark.timeout(150)

MODEL, STREAMS, TOKENS, ROUNDS = "tiny", 6, 400, 8
BLOCK_BYTES = 4 * 2 * 2 * 16 * 4 * 32  # layers, K and V, heads, width, float32, tokens
BLOCKS = 18  # one stream comes to need thirteen
PROMPTS = [f"stream {i}: hi user" for i in range(STREAMS)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    base = tmp_path_factory.mktemp("preemption")
    folder = make_tiny_model(base / "tiny", eos_token_id=None)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    texts = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    baton = Baton(base / "state")
    try:
        settings = {"model.path": str(folder), "model.name": MODEL, "kv.pool_bytes": str(BLOCKS * BLOCK_BYTES)}
        baton.up(*(part for name, value in settings.items() for part in ("--set", f"{name}={value}")))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


@dataclass
class Seen:
    """What a client saw of one stream."""

    id: str = ""
    pieces: list[str] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def stream(client: httpx.AsyncClient, prompt: str, tokens: int = TOKENS) -> Seen:
    seen, started = Seen(), time.monotonic()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            seen.id, seen.usage = event["id"], event.get("usage") or seen.usage
            for choice in event["choices"]:
                seen.first_s = seen.first_s or time.monotonic() - started
                seen.pieces.append(choice["text"])
                seen.finish = choice["finish_reason"] or seen.finish
    return seen


async def alone_and_together(stack: Baton) -> tuple[list[Seen], list[Seen]]:
    assert stack.record is not None
    headers = {"Authorization": f"Bearer {stack.record.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=100) as client:
        alone = [await stream(client, prompt) for prompt in PROMPTS]
        for _ in range(ROUNDS):  # a worker may be done with each before the next one's client has begun
            together = await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))
            if await asyncio.to_thread(lambda: any(preemptions(stack, seen) for seen in together)):  # noqa: B023
                break
    return alone, list(together)


def spans_of(stack: Baton, seen: Seen) -> dict[str, dict[str, Any]]:
    found = stack.trace(seen.id, "gateway.request", "decode.run")
    return {span["name"]: span for span in found}


def preemptions(stack: Baton, seen: Seen) -> int:
    return int(spans_of(stack, seen)["decode.run"]["attributes"][a.PREEMPTIONS])


@pytest.fixture(scope="module")
def runs(stack: Baton) -> tuple[list[Seen], list[Seen]]:
    return asyncio.run(alone_and_together(stack))


def test_op37_preempted_streams_equal_the_reference(stack: Baton, runs: tuple[list[Seen], list[Seen]]) -> None:
    alone, together = runs
    # Given references that nothing disturbed
    assert [preemptions(stack, seen) for seen in alone] == [0] * STREAMS
    # When six streams share a pool that holds one of them and a part of another
    counts = [preemptions(stack, seen) for seen in together]
    assert sum(counts) > 0
    # Then every text is the reference's, and each token was counted once
    for before, after in zip(alone, together, strict=True):
        assert after.text == before.text
        assert (after.finish, after.usage) == (before.finish, before.usage)
        assert after.usage["completion_tokens"] == TOKENS
    # And nothing is held any more
    stack.wait_idle()


def test_op66_a_preemption_resets_no_clock(stack: Baton, runs: tuple[list[Seen], list[Seen]]) -> None:
    _, together = runs
    hit = [seen for seen in together if preemptions(stack, seen)]
    assert hit
    for seen in hit:
        spans = spans_of(stack, seen)
        root, run = spans["gateway.request"], spans["decode.run"]
        told = root["attributes"][a.TTFT_S]
        # The client's own figure holds the way to it, and this process shares two cores with all of them.
        assert told <= seen.first_s
        assert seen.first_s - told < 0.1 * seen.first_s + 1.0
        events = [name for name, _ in run["events"]]
        assert events.count("preempted") == run["attributes"][a.PREEMPTIONS]


async def test_op66_the_first_chunk_is_no_first_token(stack: Baton) -> None:
    """A prompt of several chunks: the first token comes when all of it is computed."""
    assert stack.record is not None
    headers = {"Authorization": f"Bearer {stack.record.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=100) as client:
        crowd = [asyncio.create_task(stream(client, prompt, 60)) for prompt in PROMPTS[:3]]
        seen = await stream(client, "hi user " * 60, 1)
        await asyncio.gather(*crowd)
    spans = await asyncio.to_thread(spans_of, stack, seen)
    root, run = spans["gateway.request"], spans["decode.run"]
    assert root["attributes"][a.COMPLETION_TOKENS] == 1
    total = (root["end_ns"] - root["start_ns"]) / 1e9
    assert 0 < root["attributes"][a.TTFT_S] <= total
    assert run["attributes"][a.PREFILL_S] <= root["attributes"][a.TTFT_S]
    await asyncio.to_thread(until, stack.idle, 20.0)
