"""OP-21 to OP-25: content forms and roles, streamed tool calls, structured output. A bystander runs beside each."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from shared.bus.memory_bus import MemoryBroker
from tests.conformance.real_worker import RealBackend, real_options, real_stack, tiny_checkpoint
from tests.conformance.support import canary, finishes, frames, refused, send
from tests.json_schemas import SCHEMAS, WORD, obj
from tests.pipeline.gateway_support import MODEL, TOKENIZER, Backend, Stack, chat, completion, gateway_stack

CHAT = "chat/completions"
USER = {"role": "user", "content": "hi"}
F = {"type": "function", "function": {"name": "get_weather", "parameters": obj(city={"enum": ["Rome", "Oslo"]})}}
G = {"type": "function", "function": {"name": "get_time", "parameters": obj(zone={"enum": ["utc", "cet"]})}}
TWO_CALLS = """I look it up.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome", "note": "a } in a \\"string\\", and ď 龜"}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {"zone": "cet"}}
</tool_call>"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", initializer_range=0.05)


@pytest.fixture
async def stack(model: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with real_stack(real_options(tmp_path, model), context=2048) as running:
        yield running


@asynccontextmanager
async def bystander(stack: Stack) -> AsyncIterator[None]:
    """A long stream of the other tenant, which says the same as it would alone; a canary comes last."""
    body = completion("bystander", temperature=0, max_tokens=120, ignore_eos=True)
    alone = (await send(stack, "completions", body, "key-b")).json()["choices"][0]["text"]
    running = asyncio.create_task(send(stack, "completions", body | {"stream": True}, "key-b"))
    await asyncio.sleep(0)
    yield
    got = frames(await running)
    assert got[-1] == "[DONE]"
    assert "".join(choice["text"] for event in got[:-1] for choice in event["choices"]) == alone
    await canary(stack)


def wants(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "wanted", "strict": True, "schema": schema}}


async def ask(stack: Stack, **fields: Any) -> dict[str, Any]:
    response = await send(stack, CHAT, chat(**fields))
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


# ---------------------------------------------------------------------------------------------- OP-21


async def test_op21_a_string_and_its_one_part_list_are_the_same_prompt(stack: Stack) -> None:
    async with bystander(stack):
        answers = [
            await ask(stack, content=content, temperature=0, max_tokens=8)
            for content in (
                "hi",
                [{"type": "text", "text": "hi"}],
                [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            )
        ]
        texts = {answer["choices"][0]["message"]["content"] for answer in answers}
        assert len(texts) == 1
        assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1


CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ""}, USER],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
        [{"role": "developer", "content": "a"}, USER],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        ],
        [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": [{"type": "text", "text": "sun"}], "tool_call_id": "call_1"},
        ],
        [USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}, USER],
    ],
    ids=["empty system", "two systems", "developer", "calls without content", "calls alone", "thoughts come back"],
)
async def test_op21_roles_that_work(messages: list[Any]) -> None:
    async with gateway_stack(context=2048) as stack, bystander(stack):
        response = await send(stack, CHAT, {"model": MODEL, "messages": messages, "tools": [F]})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "sun"}, "messages.1.tool_call_id"),
        ({"role": "assistant", "content": None}, "messages.1.content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages.1.content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.1.content"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages.1.content"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"role": "function", "content": "x", "name": "f"}, "messages.1.name"),
    ],
)
async def test_op21_roles_that_do_not_fit_are_named(message: dict[str, Any], param: str) -> None:
    async with gateway_stack(context=2048) as stack, bystander(stack):
        await refused(stack, CHAT, {"model": MODEL, "messages": [USER, message]}, param)


async def test_op21_what_a_template_refuses_is_a_400_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    no_system = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hi"
    )
    async with gateway_stack(context=2048) as stack, bystander(stack):
        monkeypatch.setattr(TOKENIZER, "chat_template", no_system)
        response = await send(stack, CHAT, {"model": MODEL, "messages": [{"role": "system", "content": "x"}, USER]})
        assert response.status_code == 400
        assert "System role not supported" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "messages"


# ---------------------------------------------------------------------------------------------- OP-22


def joined(got: list[Any], choice: int = 0) -> tuple[str, list[dict[str, str]], int]:
    """(content, calls by index, how often a name came) of a stream."""
    deltas = [c["delta"] for event in got if event != "[DONE]" for c in event["choices"] if c["index"] == choice]
    calls: dict[int, dict[str, str]] = {}
    names = 0
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
        if "id" in piece:
            assert not call["arguments"], "the name comes first"
            names += 1
        call["id"] += piece.get("id", "")
        call["name"] += piece["function"].get("name", "")
        call["arguments"] += piece["function"].get("arguments", "")
    return "".join(delta.get("content") or "" for delta in deltas), [calls[i] for i in sorted(calls)], names


@pytest.mark.parametrize("tokens_per_frame", [1, 3, 1000], ids=["single tokens", "merged", "one chunk"])
async def test_op22_streamed_tool_calls(tokens_per_frame: int) -> None:
    def text(prompt: str) -> str:
        return "x" * 200 if prompt == "bystander" else TWO_CALLS

    backend = Backend(MemoryBroker(), text=text, tokens_per_frame=tokens_per_frame)
    async with gateway_stack(backend, context=2048) as stack, bystander(stack):
        body = chat(tools=[F, G], stream=True, stream_options={"include_usage": True})
        whole = await ask(stack, tools=[F, G])
        message = whole["choices"][0]["message"]
        assert message["content"] == "I look it up."
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert [name for name, _ in wanted] == ["get_weather", "get_time"]
        for concurrency in (1, 32):
            answers = await asyncio.gather(*(send(stack, CHAT, body) for _ in range(concurrency)))
            for got in map(frames, answers):
                content, calls, names = joined(got)
                assert content == "I look it up."
                assert [(call["name"], call["arguments"]) for call in calls] == wanted
                assert names == len({call["id"] for call in calls}) == 2
                assert [json.loads(call["arguments"]) for call in calls][1] == {"zone": "cet"}
                assert [reason for reason in finishes(got) if reason] == ["tool_calls"]
                assert got[-2]["usage"] == whole["usage"]


async def test_op22_thoughts_and_calls_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<think>Is it warm? I call it.</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    backend = Backend(MemoryBroker(), text=lambda prompt: "x" * 200 if prompt == "bystander" else text)
    async with gateway_stack(backend, context=1024) as stack, bystander(stack):
        codec = stack.service.models.get(MODEL).codec
        form = type(codec.form)(codec.form.tools, True, codec.form.special)
        monkeypatch.setattr(codec, "form", form)
        answer = await ask(stack, tools=[G])
        thoughts = len(TOKENIZER.encode(text.partition("\n\n")[0]))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Is it warm? I call it."
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_time"]
        got = frames(await send(stack, CHAT, chat(tools=[G], stream=True)))
        deltas = [choice["delta"] for event in got[:-1] for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Is it warm? I call it."
        assert joined(got)[0] == ""
        # without tools and with the model's will, the text is the answer's
        assert (await ask(stack, tool_choice="none", tools=[G]))["choices"][0]["message"]["content"].startswith(
            "<tool_call>"
        )


async def test_op22_forced_calls_by_a_random_model(stack: Stack) -> None:
    """Whatever the model prefers, it calls what it must, by the schema; alone and in a crowd, streamed and not."""
    async with bystander(stack):
        fields = {"tools": [F, G], "parallel_tool_calls": False, "temperature": 1.3, "max_tokens": 300, "n": 2}
        for choice, names in (
            ("required", {"get_weather", "get_time"}),
            ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ):
            asked = [fields | {"tool_choice": choice, "seed": 3}]
            answers = await asyncio.gather(*(ask(stack, **more) for more in asked))
            streams = await asyncio.gather(*(send(stack, CHAT, chat(stream=True, **more)) for more in asked))
            for answer, stream in zip(answers, streams, strict=True):
                for i, one in enumerate(answer["choices"]):
                    assert one["finish_reason"] == "tool_calls"
                    assert one["message"]["content"] is None
                    calls = one["message"]["tool_calls"]
                    assert {call["function"]["name"] for call in calls} <= names
                    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (F, G)}
                    for call in calls:
                        jsonschema.validate(
                            json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]]
                        )
                    streamed = joined(frames(stream), i)[1]
                    assert [(c["name"], c["arguments"]) for c in streamed] == [
                        (c["function"]["name"], c["function"]["arguments"]) for c in calls
                    ]


# ---------------------------------------------------------------------------------------------- OP-23, OP-24, OP-25


async def test_op23_an_invalid_schema_or_regex_is_a_quick_400(stack: Stack) -> None:
    deep = b'{"type":"array","items":' * 2000 + b"{}" + b"}" * 2000
    large = {"type": "object", "properties": {f"p{i}": {"enum": [f"e{j}" for j in range(24)]} for i in range(6000)}}
    assert len(json.dumps(large)) > 1024 * 1024
    schema = "response_format.json_schema.schema"
    bodies: list[tuple[Any, str | None]] = [
        (chat(response_format=wants({"properties": {"a": "text"}})), schema),
        (chat(response_format=wants({"$ref": "#/$defs/nowhere"})), schema),
        (chat(response_format=wants(large)), schema),
        (chat(structured_outputs={"regex": "(["}), "structured_outputs.regex"),
        (json.dumps(chat(response_format=wants("SCHEMA"))).encode().replace(b'"SCHEMA"', deep), None),
        (completion(structured_outputs={"grammar": "start: nowhere"}), "structured_outputs.grammar"),
    ]
    async with bystander(stack):
        for body, param in bodies:
            path = "completions" if isinstance(body, dict) and "prompt" in body else CHAT
            started = time.monotonic()
            response = await send(stack, path, body)
            assert response.status_code == 400, response.text
            assert time.monotonic() - started < 20  # under 2 s where nothing else runs
            assert param is None or response.json()["error"]["param"] == param
        assert isinstance(stack.backend, RealBackend)
        assert all(reserve.sampling[0].grammar == "" for reserve in stack.backend.reserves)


async def test_op24_what_cannot_be_enforced_is_refused_and_a_200_is_valid(stack: Stack) -> None:
    async with bystander(stack):
        for pattern in ("^(?=a).*$", "^(?!b)a", "(a)\\1", "^a(?<=a)$"):
            schema = obj(x={"type": "string", "pattern": pattern})
            response = await send(stack, CHAT, chat(response_format=wants(schema)))
            assert response.status_code == 400
            assert "not supported" in response.json()["error"]["message"]
        for name in ("pattern with escapes", "union of objects", "enum with quotes", "reference"):
            answer = await ask(stack, response_format=wants(SCHEMAS[name]), max_tokens=400, temperature=1, seed=1)
            if answer["choices"][0]["finish_reason"] == "stop":
                jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMAS[name])
        escaped = obj(x={"type": "string", "pattern": r"^a\!{2,3}b$"})
        answer = await ask(stack, response_format=wants(escaped), max_tokens=400)
        assert re.fullmatch("a!{2,3}b", json.loads(answer["choices"][0]["message"]["content"])["x"])


async def test_op25_whitespace_is_bounded_and_a_cut_says_so(stack: Stack) -> None:
    schema = obj(name={"type": "string", "maxLength": 12}, tags={"type": "array", "items": WORD, "maxItems": 2})
    async with bystander(stack):
        for most in (8, 400):
            asked = [{"seed": seed, "max_tokens": most, "temperature": 1} for seed in range(25)]
            answers = await asyncio.gather(*(ask(stack, response_format=wants(schema), **more) for more in asked))
            for answer in answers:
                choice = answer["choices"][0]
                text = choice["message"]["content"]
                outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)
                assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 25
                if choice["finish_reason"] == "stop":
                    jsonschema.validate(json.loads(text), schema)
                else:
                    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", most)
            reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
            assert reasons.count("length" if most == 8 else "stop") > 20


async def test_fake_workers_keep_to_grammars_too(model: Path, tmp_path: Path) -> None:
    async with real_stack(real_options(tmp_path, model, fake=True, fake_speed=50.0), context=2048) as stack:
        for name in ("flat", "array of objects", "pattern"):
            asked = [{"seed": seed, "max_tokens": 400, "response_format": wants(SCHEMAS[name])} for seed in range(4)]
            for answer in await asyncio.gather(*(ask(stack, **fields) for fields in asked)):
                assert answer["choices"][0]["finish_reason"] == "stop"
                jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMAS[name])
        await canary(stack)


async def test_a_constrained_output_goes_on_at_another_worker(model: Path, tmp_path: Path) -> None:
    fields = {"response_format": wants(SCHEMAS["array of objects"]), "temperature": 1, "seed": 3, "max_tokens": 400}
    async with real_stack(real_options(tmp_path, model), num_workers=2) as stack:
        backend = stack.backend
        assert isinstance(backend, RealBackend)
        wanted = await ask(stack, **fields)
        going = asyncio.create_task(ask(stack, **fields))
        async with asyncio.timeout(30):
            while not any(s.stream.num_committed > 5 for s in stack.service.ingress.sessions.values()):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await backend.lose_first_worker()
        found = await going
        assert found["choices"] == wanted["choices"]
        assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
        jsonschema.validate(json.loads(found["choices"][0]["message"]["content"]), SCHEMAS["array of objects"])
