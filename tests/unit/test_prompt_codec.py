"""Long bodies and prompts: refused without tokenizing where that is sure, and beside the event loop otherwise."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared.contracts.errors import ContextExceeded, InvalidInput, SettingsError
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.parse import parse_chat, parse_completion
from shared.ingress.prompt_codec import SHORT_BODY_BYTES, SHORT_CHAT_MESSAGES, SHORT_TEXT_CHARS, PromptCodec
from shared.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import tiny_tokenizer, tokenizer_json

TOKENIZER = tiny_tokenizer()
CONTEXT = 100
TOO_LONG = "a" * (CONTEXT * TOKENIZER.longest_token + 1)


@pytest.fixture
def codec() -> Iterator[PromptCodec]:
    made = PromptCodec(TOKENIZER, CONTEXT)
    yield made
    made.close()


def completion_body(prompt: str) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing(
    codec: PromptCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TOKENIZER, "encode", untouched)
    monkeypatch.setattr(TOKENIZER, "encode_marked", untouched)
    chat = {"model": "m", "messages": [{"role": "user", "content": TOO_LONG}]}
    with pytest.raises(ContextExceeded) as caught:
        await codec.encode(parse_completion(completion_body(TOO_LONG)))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextExceeded) as caught:
        await codec.encode(parse_chat(json.dumps(chat).encode()))
    assert caught.value.param == "messages"


async def test_what_may_fit_is_tokenized(codec: PromptCodec) -> None:
    assert await codec.encode(parse_completion(completion_body("abc"))) == [TOKENIZER.encode("abc")]


async def test_a_model_without_a_chat_template_takes_completions_only() -> None:
    codec = PromptCodec(Tokenizer(tokenizer_json(), {}), CONTEXT)
    assert await codec.encode(parse_completion(completion_body("abc")))
    with pytest.raises(InvalidInput) as caught:
        await codec.encode(parse_chat(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    codec.close()


def test_a_broken_chat_template_is_found_at_start() -> None:
    with pytest.raises(SettingsError):
        PromptCodec(tiny_tokenizer(chat_template="{% for %}"), CONTEXT)


async def test_a_long_body_is_parsed_beside_the_event_loop(codec: PromptCodec) -> None:
    async def thread_of(body: bytes) -> int:
        seen: list[int] = []

        def parse(body: bytes) -> object:
            seen.append(threading.get_ident())
            return parse_completion(body)

        await codec.parse(parse, body)  # type: ignore[type-var]
        return seen[0]

    assert await thread_of(completion_body("short")) == threading.get_ident()
    assert await thread_of(completion_body("a" * SHORT_BODY_BYTES)) != threading.get_ident()


async def test_only_short_texts_are_tokenized_on_the_event_loop(
    codec: PromptCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    encode_now = codec.encode_now

    def seen(request: GenerationRequest) -> list[list[int]]:
        threads.append(threading.get_ident())
        return encode_now(request)

    monkeypatch.setattr(codec, "encode_now", seen)
    loop = threading.get_ident()
    for body, here in (
        (completion_body("a" * SHORT_TEXT_CHARS), True),
        (completion_body("a" * (SHORT_TEXT_CHARS + 1)), False),
        (json.dumps({"model": "m", "prompt": ["a" * 300, "b" * 300]}).encode(), False),
        (json.dumps({"model": "m", "prompt": list(range(3, 100)) * 10}).encode(), True),
        (json.dumps({"model": "m", "prompt": "a", "structured_outputs": {"regex": "a+"}}).encode(), False),
    ):
        await codec.encode(parse_completion(body))
        assert (threads[-1] == loop) == here, body[:80]
    said = {"role": "user", "content": "a" * (SHORT_TEXT_CHARS // SHORT_CHAT_MESSAGES)}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answered = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for chat, here in (
        ({"messages": [said] * SHORT_CHAT_MESSAGES}, True),
        ({"messages": [{**said, "content": ""}] * (SHORT_CHAT_MESSAGES + 1)}, False),
        ({"messages": [said, {**said, "content": "a" * SHORT_TEXT_CHARS}]}, False),
        ({"messages": [{**said, "content": [{"type": "text", "text": "a"}]}]}, False),
        ({"messages": [said, *answered]}, False),
        ({"messages": [said], "tools": tools}, False),
        ({"messages": [said], "response_format": {"type": "json_object"}}, False),
    ):
        with suppress(InvalidInput):  # this model calls no tools
            await codec.encode(parse_chat(json.dumps({"model": "m", **chat}).encode()))
        assert (threads[-1] == loop) == here, chat


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenized() -> None:
    text = "whales sing at dawn " * 40_000
    for _ in range(3):
        started = time.monotonic()
        work = asyncio.get_running_loop().run_in_executor(None, TOKENIZER.encode, text)
        longest, last = 0.0, started
        while not work.done():
            await asyncio.sleep(0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        # the library's plain `encode` keeps all other threads waiting for as long as it takes
        assert longest < 0.6 * (time.monotonic() - started)
