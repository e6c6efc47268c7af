"""OP-01 to OP-05: detokenization, stop strings, usage and finish reasons of streams."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.memory_bus import MemoryBroker
from tests.conformance.support import canary, deltas, finishes, frames, send
from tests.pipeline.gateway_support import TOKENIZER, Backend, chat, completion, gateway_stack

COPY = "Copy this line unchanged: ď 龜 🫠 🥹 👨‍👩‍👧 ש"
COUNTING = "one, two, three, four, five, six, seven, eight, nine, ten"


def says(text: str, tokens_per_frame: int = 1) -> Backend:
    return Backend(MemoryBroker(), text=lambda prompt: text, tokens_per_frame=tokens_per_frame)


@pytest.mark.parametrize("tokens_per_frame", [1, 2, 3, 7])
async def test_op01_a_code_point_split_over_tokens_never_spans_two_deltas(tokens_per_frame: int) -> None:
    async with gateway_stack(says(COPY, tokens_per_frame)) as stack:
        body = chat(COPY, temperature=0, max_tokens=64)
        whole = (await send(stack, "chat/completions", body)).json()["choices"][0]["message"]["content"]
        pieces = deltas(frames(await send(stack, "chat/completions", {**body, "stream": True})))
        assert "".join(pieces) == whole
        assert whole == COPY
        assert not any("\ufffd" in piece for piece in pieces)


async def test_op01_output_cut_inside_a_code_point_is_equal_in_both_forms() -> None:
    async with gateway_stack(says(COPY)) as stack:
        body = chat(COPY, temperature=0, max_tokens=len(TOKENIZER.encode("Copy this line unchanged: ")) + 1)
        whole = (await send(stack, "chat/completions", body)).json()["choices"][0]["message"]["content"]
        pieces = deltas(frames(await send(stack, "chat/completions", {**body, "stream": True})))
        assert "".join(pieces) == whole == "Copy this line unchanged: \ufffd"


@pytest.mark.parametrize("tokens_per_frame", [1, 4, 100])
async def test_op02_a_stop_string_over_token_borders_cuts_and_never_leaks(tokens_per_frame: int) -> None:
    async with gateway_stack(says(COUNTING, tokens_per_frame)) as stack:
        stop = COUNTING[22:32]
        body = completion(temperature=0, stop=[stop])
        whole = (await send(stack, "completions", body)).json()
        assert whole["choices"][0]["text"] == COUNTING[: COUNTING.index(stop)]
        assert whole["choices"][0]["finish_reason"] == "stop"
        got = frames(await send(stack, "completions", {**body, "stream": True}))
        assert "".join(deltas(got)) == whole["choices"][0]["text"]
        assert finishes(got)[-1] == "stop"
        kept = COUNTING.index(stop) + len(stop)
        assert whole["usage"]["completion_tokens"] == kept
        settles = await stack.settled(2)
        assert [settle.completion_tokens for settle in settles] == [kept, kept]
        assert [finish.num_tokens for finish in stack.backend.finishes] == [kept, kept]


@pytest.mark.parametrize("stream", [False, True])
async def test_op03_a_tail_that_only_looks_like_a_stop_arrives(stream: bool) -> None:
    async with gateway_stack(says(COUNTING)) as stack:

        async def result(**more: object) -> tuple[str, str | None]:
            response = await send(stack, "completions", completion(temperature=0, stream=stream, **more))
            if not stream:
                choice = response.json()["choices"][0]
                return choice["text"], choice["finish_reason"]
            got = frames(response)
            return "".join(deltas(got)), finishes(got)[-1]

        assert await result(max_tokens=20, stop=[COUNTING[17:20] + "QZQ"]) == (COUNTING[:20], "length")
        assert await result(stop=[COUNTING[-3:] + "QZQ"]) == (COUNTING, "stop")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_op04_the_usage_chunk_comes_only_when_asked_for(path: str) -> None:
    async with gateway_stack(says(COUNTING)) as stack:
        base = chat() if path.startswith("chat") else completion()
        whole = (await send(stack, path, base)).json()["usage"]
        for options, wanted in ((None, False), ({"include_usage": False}, False), ({"include_usage": True}, True)):
            body = {**base, "stream": True} | ({} if options is None else {"stream_options": options})
            got = frames(await send(stack, path, body))
            assert got.pop() == "[DONE]"
            assert all("choices" in event for event in got)
            with_usage = [event for event in got if event.get("usage")]
            assert len(with_usage) == wanted
            if wanted:
                assert with_usage[0] is got[-1]
                assert (got[-1]["choices"], got[-1]["usage"]) == ([], whole)
                assert got[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("concurrency", [1, 32])
async def test_op05_exactly_one_finish_reason_in_the_last_chunk(concurrency: int) -> None:
    async with gateway_stack(says(COUNTING, 3)) as stack:
        cases = [({}, "stop"), ({"max_tokens": 5}, "length"), ({"stop": "three"}, "stop")]

        async def one(more: dict[str, object], reason: str) -> None:
            got = frames(await send(stack, "completions", completion(stream=True, temperature=0, **more)))
            assert got.count("[DONE]") == 1
            assert got[-1] == "[DONE]"
            assert finishes(got)[-1] == reason
            assert [finish for finish in finishes(got) if finish] == [reason]

        todo = cases * 100
        while todo:
            batch, todo = todo[:concurrency], todo[concurrency:]
            await asyncio.gather(*(one(*case) for case in batch))
        await canary(stack)
