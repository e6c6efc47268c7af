"""OP-11, 12, 14 to 20: borders of parameters, prompts, bodies and ids."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import httpx
import pytest

from shared.bus.memory_bus import MemoryBroker
from tests.conformance.support import bystander, deltas, frames, refused, send
from tests.pipeline.gateway_support import (
    CONTEXT,
    HEADERS,
    MODEL,
    TOKENIZER,
    Backend,
    chat,
    completion,
    gateway_stack,
    http_stack,
)

TOKENIZED = 200_000
"""A context of which 2.4 MB of text can only be said to be over it once it is tokenized."""
KEPT_BYTES = 32 * 1024 * 1024
"""What a huge prompt may leave in the process."""


async def test_op11_max_tokens_edges() -> None:
    async with gateway_stack(Backend(MemoryBroker(), text=lambda prompt: "y" * 2000)) as stack, bystander(stack):
        await refused(stack, "completions", completion(max_tokens=0, echo=True, logprobs=1), "max_tokens")
        for value in (0, -1, "5", 2**40):
            await refused(stack, "completions", completion(max_tokens=value), "max_tokens")
        one = (await send(stack, "completions", completion(max_tokens=1))).json()
        assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")
        missing = (await send(stack, "completions", completion())).json()
        assert missing["usage"]["total_tokens"] == CONTEXT
        assert missing["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
async def test_op12_non_finite_parameters_are_named(name: str, literal: str) -> None:
    async with gateway_stack() as stack, bystander(stack):
        await refused(stack, "completions", f'{{"model":"{MODEL}","prompt":"a","{name}":{literal}}}'.encode(), name)


async def test_op12_border_parameters() -> None:
    async with gateway_stack() as stack, bystander(stack):
        for name, value in (("temperature", -0.1), ("top_p", 0), ("top_p", 1.01), ("top_k", -1)):
            await refused(stack, "completions", completion(**{name: value}), name)
        for more in ({"top_p": 1}, {"top_k": 0}):
            assert (await send(stack, "completions", completion(**more))).status_code == 200
        unset, border = stack.backend.submits[-2:]
        assert unset.sampling[0].top_p == border.sampling[0].top_p == 1.0


async def test_op14_a_parameter_works_or_is_refused_by_name() -> None:
    async with gateway_stack() as stack, bystander(stack):
        for name, value in (("best_of", 3), ("echo", "true"), ("suffix", "x"), ("logprobs", True)):
            await refused(stack, "completions", completion(**{name: value}), name)
        for name, value in (("logprobs", 5), ("top_logprobs", 3), ("unheard_of", 1)):
            await refused(stack, "chat/completions", chat(**{name: value}), name)
        assert len(stack.backend.admits) == 1  # the bystander's


async def test_op15_empty_input() -> None:
    async with gateway_stack() as stack, bystander(stack):
        for prompt in ("", [""], [], [[]], ["ok", ""]):
            await refused(stack, "completions", completion(prompt), "prompt")
        await refused(stack, "chat/completions", {"model": MODEL, "messages": []}, "messages")
        await refused(stack, "chat/completions", chat(None), "messages.0.content")
        # the template's own tokens make a prompt of it
        empty = await send(stack, "chat/completions", chat(""))
        assert empty.status_code == 200
        assert empty.json()["usage"]["prompt_tokens"] >= 1
        assert (await stack.client.get("/health")).status_code == 200


async def test_op16_prompt_as_token_ids() -> None:
    async with gateway_stack() as stack, bystander(stack):
        fine = await send(stack, "completions", completion([1, 2, 3]))
        assert fine.status_code == 200
        assert fine.json()["usage"]["prompt_tokens"] == 3
        size = TOKENIZER.vocab_size
        for prompt in ([size], [-1], [9223372036854775808], [1.5], [[1, 2], [3.0]], ["a", [1]], [True]):
            await refused(stack, "completions", completion(prompt), "prompt")
        assert len(stack.backend.admits) == 2  # the bystander's too


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00"])
async def test_op17_half_of_a_surrogate_pair(half: str) -> None:
    tool = f'{{"type":"function","function":{{"name":"{half}"}}}}'
    async with gateway_stack() as stack, bystander(stack):
        bodies = [
            f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"{half}"}}]}}',
            f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"a"}}],"stop":"{half}"}}',
            f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"a"}}],"user":"{half}"}}',
            f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"a"}}],"tools":[{tool}]}}',
        ]
        for body in bodies:
            response = await send(stack, "chat/completions", body.encode())
            assert response.status_code == 400
            response.json()
        pair = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"\\ud83d\\ude00"}}]}}'
        assert (await send(stack, "chat/completions", pair.encode())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [CONTEXT + 1, 4 * CONTEXT])
async def test_op18_a_prompt_over_the_context(length: int, stream: bool) -> None:
    async with gateway_stack() as stack, bystander(stack):
        body = completion("x" * length, stream=stream)
        response = await send(stack, "completions", body)
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert len(stack.backend.admits) == len(stack.backend.submits) == 1  # the bystander's


HUGE = """
import json, sys, httpx
url, headers, chat, completion = json.loads(sys.argv[1])
size, piece, long = 64 * 1024 * 1024, b"x" * (1024 * 1024), "ab " * 800_000
with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
    answers = [client.post("/v1/completions", content=b"x" * size)]
    answers.append(client.post("/v1/completions", content=(piece for _ in range(size // len(piece)))))
    completion["prompt"] = chat["messages"][0]["content"] = long
    answers.append(client.post("/v1/completions", json=completion))
    answers.append(client.post("/v1/chat/completions", json=chat))
print(json.dumps([(answer.status_code, answer.json()["error"]["code"]) for answer in answers]))
"""
"""A client in a process of its own, so that the memory here is the gateway's."""


async def test_op19_a_huge_body_with_and_without_length() -> None:
    async with (
        http_stack(context=TOKENIZED) as (stack, url),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        bystander(stack),
    ):
        slowest, done = 0.0, False

        async def poll() -> None:
            nonlocal slowest
            while not done:
                started, computed = time.monotonic(), time.process_time()
                await asyncio.sleep(0.05)  # what holds the loop up now, one who asks meanwhile would wait for
                assert (await client.get("/health")).status_code == 200
                # while others have the cores of a busy machine, this process computes nothing
                slowest = max(slowest, min(time.monotonic() - started, time.process_time() - computed))

        before = resident_bytes()
        polling = asyncio.create_task(poll())
        told = json.dumps([url, HEADERS, chat(), completion()])
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", HUGE, told, stdout=PIPE)
        answers = json.loads((await child.communicate())[0])
        done = True
        await polling
        # the last two, of 2.4 MB, are under the limit and are tokenized, in a thread of their own
        assert answers == [[413, "request_too_large"]] * 2 + [[400, "context_length_exceeded"]] * 2
        assert slowest < 0.25
        async with asyncio.timeout(60):
            while resident_bytes() > before + KEPT_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def resident_bytes() -> int:
    """Of this process, in which the gateway runs."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


async def test_op20_the_same_request_id_twice() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: f"you said {prompt}", step_s=0.001)
    async with gateway_stack(backend) as stack, bystander(stack):
        await refused(stack, "completions", completion(request_id="same"), "request_id")
        for turn in range(20):
            one, two = await asyncio.gather(
                send(stack, "completions", completion(f"a{turn}", stream=True), "key-a", **{"X-Request-Id": "same"}),
                send(stack, "completions", completion(f"b{turn}", stream=True), "key-b", **{"X-Request-Id": "same"}),
            )
            for response, prompt in ((one, f"a{turn}"), (two, f"b{turn}")):
                assert response.headers["x-request-id"] == "same"
                text = "".join(c["text"] for event in frames(response)[:-1] for c in event["choices"])
                assert text == f"you said {prompt}"
        assert len({submit.attempt.request_id for submit in backend.submits}) == 41  # the bystander's too


async def test_op20_cancelling_one_of_the_same_request_id_leaves_the_other_alone() -> None:
    go = asyncio.Event()
    backend = Backend(MemoryBroker(), text=lambda prompt: f"you said {prompt}", held_prompts={"go": go, "stay": go})
    same = {**HEADERS, "X-Request-Id": "same"}
    async with (
        http_stack(backend) as (stack, url),
        bystander(stack),
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        staying = asyncio.create_task(send(stack, "completions", completion("stay", stream=True), "key-b", **same))
        async with client.stream(
            "POST", "/v1/completions", json=completion("go", stream=True), headers=same
        ) as leaving:
            await anext(leaving.aiter_lines())
        async with asyncio.timeout(30):
            while not backend.cancels:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        response = await staying
        assert response.headers["x-request-id"] == "same"
        assert "".join(deltas(frames(response))) == "you said stay"
        assert len({cancel.attempt for cancel in backend.cancels}) == 1
