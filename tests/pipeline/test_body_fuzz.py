"""Bodies, headers and splits of all kinds, on every route that takes a body: every answer is one that is documented.

Each run has a seed of its own, which it prints. A case is made of the seed and its number alone, so
`BATON_FUZZ_SEED=S BATON_FUZZ_CASE=N` sends that one again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from services.gateway.openapi import PATH
from shared.bus.memory_bus import MemoryBroker
from tests import openai_oracle
from tests.pipeline.fuzz_cases import FORM, Case, make_case
from tests.pipeline.fuzz_client import Answer, RawClient
from tests.pipeline.fuzz_requests import GOOD, with_model
from tests.pipeline.gateway_support import HEADERS, Backend, completion, default_output, gateway_stack, http_stack
from tests.pipeline.keyed_support import World, until
from tests.pipeline.test_keyed_batches import batches
from tests.servers import RedisServer

CLIENTS = 8
CANARY_EVERY = 250
MAX_FAULTS = 10
ENOUGH = 1500
"""So many requests must have had good ones on every route among them."""
SHORT_S, LONG_S = 40.0, 600.0
NAMELESS = {"invalid_json", "invalid_form", "context_length_exceeded", "invalid_idempotency_key"}
"""Codes of a 400 that is about the whole body."""
TEMPLATES = {
    "/v1/batches/batch_none/cancel": "/v1/batches/{batch_id}/cancel",
    "/v1/responses/resp_none/cancel": "/v1/responses/{response_id}/cancel",
}
REFUSED = {"/v1/embeddings": 400, "/v1/batches": 404, **dict.fromkeys(TEMPLATES, 404)}
"""Routes whose good requests name what is not there."""
OUTPUTS = (
    default_output(""),
    '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call> and more',
    "<think>hm</think>so",
    '<tool_call>{"name": "f", "arguments": {"a": NaN, "b": 1e999, "c": "\\ud800"}}</tool_call>',
    '{"a": 1}',
)


def said(prompt: str) -> str:
    """One of several outputs; of the canary's prompt the first."""
    return OUTPUTS[0 if prompt == "hi" else len(prompt) % len(OUTPUTS)]


@pytest.fixture
async def world(redis_server: RedisServer) -> AsyncIterator[World]:
    async with batches(redis_server, linger_s=1.0, context=4096, text=said) as (made, _):
        yield made


class Judge:
    """What an answer may be, by the API's own description and by OpenAI's."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self.seen: Counter[tuple[str, int]] = Counter()
        self._validator = cache(self._make_validator)

    def check(self, case: Case, answer: Answer) -> None:
        self.seen[case.path, answer.status] += 1
        if answer.status == 0:
            assert case.short, "no answer"
            return
        assert answer.whole
        told = self._document["paths"][TEMPLATES.get(case.path, case.path)]["post"]["responses"]
        assert str(answer.status) in told, answer
        assert answer.status < 500 or (answer.status == 503 and "retry-after" in answer.headers), answer
        assert answer.kind in told[str(answer.status)]["content"], answer
        content = told[str(answer.status)]["content"][answer.kind]
        openai_oracle.check(case.path, answer.status, answer.kind, answer.body)
        if answer.kind == "text/event-stream":
            self._check_stream(case, answer.body, content)
        else:
            value = json.loads(answer.body, parse_constant=_no_constant)
            self._hold(value, content.get("schema", {}))
            if answer.status in (400, 404):
                _check_names_a_field(case, value)

    def _check_stream(self, case: Case, body: bytes, content: Mapping[str, Any]) -> None:
        assert body.endswith(b"\n\n")
        events = [
            line.removeprefix("data: ")
            for frame in body.decode().removesuffix("\n\n").split("\n\n")
            for line in frame.split("\n")
            if line.startswith("data: ")
        ]
        values = [json.loads(event, parse_constant=_no_constant) for event in events if event != "[DONE]"]
        failed = values and _is_error(values[-1])
        if failed:
            error = values.pop()
            self._hold(error, {"$ref": f"#/components/schemas/{'MessageError' if 'type' in error else 'Error'}"})
            kinds = {"service_unavailable_error", "overloaded_error"}
            # one that goes on elsewhere may have to be begun anew
            kinds |= {"conflict_error", "invalid_request_error"} if _resumes(case) else set()
            assert error["error"]["type"] in kinds, error
        for value in values:
            self._hold(value, content.get("x-event-schema", {}))
        if not failed and not _resumes(case):
            _check_end(case.path, events, values)

    def _hold(self, value: Any, schema: Mapping[str, Any]) -> None:
        faults = [
            f"{error.json_path}: {error.message[:300]}"
            for error in self._validator(json.dumps(schema)).iter_errors(value)
        ]
        assert not faults, faults

    def _make_validator(self, schema: str) -> Draft202012Validator:
        return Draft202012Validator({"components": self._document["components"], **json.loads(schema)})


def _resumes(case: Case) -> bool:
    return any(name == b"last-event-id" for name, _ in case.headers)


def _is_error(event: Any) -> bool:
    return "error" in event and event.get("type", "error") == "error"


def _check_names_a_field(case: Case, value: Any) -> None:
    error = value["error"]
    if case.path.startswith("/v1/messages"):  # which has no place for it but the message
        return
    assert error["param"] or error["code"] in NAMELESS, error


def _check_end(path: str, events: list[str], values: list[Any]) -> None:
    """It ends as streams do, and nothing comes behind the end of a choice."""
    if path == "/v1/responses":
        assert values[-1]["type"] in ("response.completed", "response.incomplete")
        assert [value["sequence_number"] for value in values] == list(range(len(values)))
    elif path == "/v1/messages":
        assert values[-1] == {"type": "message_stop"}
    else:
        assert events[-1] == "[DONE]"
        assert len(values) == len(events) - 1
        ended: set[int] = set()
        for choice in (choice for value in values for choice in value["choices"]):
            assert choice["index"] not in ended
            ended |= {choice["index"]} if choice["finish_reason"] else set()
        assert ended == set(range(len(ended)))


def _no_constant(literal: str) -> Any:
    raise AssertionError(f"{literal} is not JSON")


async def judge_of(world: World) -> Judge:
    return Judge((await world.gateways[0].client.get(PATH, headers=HEADERS)).json())


async def canary(world: World) -> None:
    """A plain request, which must be served exactly, though a machine that is too slow may say so first."""
    deadline = time.monotonic() + 30
    while True:
        answer = await world.gateways[0].client.post("/v1/completions", json=completion(max_tokens=9), headers=HEADERS)
        if answer.status_code != 503 or time.monotonic() > deadline:
            break
        await asyncio.sleep(1.0)
    assert answer.status_code == 200, answer.text
    assert default_output("hi").startswith(answer.json()["choices"][0]["text"])


async def idle(world: World) -> None:
    """Returns when nothing runs any more, neither at the gateway nor at the worker."""
    gateway = world.gateways[0]
    await until(lambda: not gateway.service.ingress.sessions)
    runs = world.backend.running.values()
    await until(lambda: all(run.acked or run.cancelled or run.cut is not None for run in runs))


class Run:
    """Cases by number until the time is over."""

    def __init__(self, world: World, judge: Judge, seed: int, seconds: float, only: int | None) -> None:
        self._world, self._judge, self._seed = world, judge, seed
        self._until = time.monotonic() + seconds
        self._only = only
        self.sent = 0
        self.faults: list[str] = []

    async def client(self) -> None:
        client = RawClient(self._world.gateways[0].url)
        try:
            while self._goes_on():
                number, self.sent = self.sent if self._only is None else self._only, self.sent + 1
                await self._one(client, number)
                if self.sent % CANARY_EVERY == 0:
                    await canary(self._world)
                    backend, rng = self._world.backend, random.Random(f"{self._seed}/{self.sent}")
                    backend.tokens_per_frame, backend.drop_every = rng.choice((1, 2, 7, 60)), rng.choice((0, 0, 0, 9))
        finally:
            client.close()

    def _goes_on(self) -> bool:
        over = self.sent > 0 if self._only is not None else time.monotonic() > self._until
        return not over and len(self.faults) < MAX_FAULTS

    async def _one(self, client: RawClient, number: int) -> None:
        case = make_case(random.Random(f"{self._seed}/{number}"))
        try:
            self._judge.check(case, await client.send(case))
        except Exception as exc:
            client.close()
            where = f"BATON_FUZZ_SEED={self._seed} BATON_FUZZ_CASE={number} (on a used connection: {client.used})"
            self.faults.append(f"{where}\n{exc!r:.1500}\n{case!r:.3000}")


async def fuzz(world: World, seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    seed = int(os.environ.get("BATON_FUZZ_SEED") or secrets.randbits(32))
    only = os.environ.get("BATON_FUZZ_CASE")
    print(f"BATON_FUZZ_SEED={seed}")
    judge = await judge_of(world)
    run = Run(world, judge, seed, seconds, int(only) if only else None)
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(run.client())
    assert not run.faults, "\n\n".join(run.faults)
    await idle(world)
    await canary(world)
    assert [record.getMessage() for record in caplog.records] == []
    print(f"{run.sent} requests: {dict(judge.seen)}")
    if run.sent > ENOUGH:
        served = {path for path, status in judge.seen if status == 200}
        assert served >= {*GOOD, FORM} - {*REFUSED}


async def test_no_request_is_a_fault_of_ours(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await fuzz(world, SHORT_S, caplog)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_no_request_is_a_fault_of_ours_at_length(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await fuzz(world, LONG_S, caplog)


# ---------------------------------------------------------------------------------------------- what it found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/detokenize"])
async def test_a_field_without_a_name_is_named(path: str) -> None:
    async with gateway_stack() as stack:
        refused = await stack.client.post(path, json={**with_model(path, GOOD[path][0]), "": 1}, headers=HEADERS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, '""')


async def test_a_part_of_a_form_without_a_name_is_told() -> None:
    async with gateway_stack() as stack:
        headers = HEADERS | {"content-type": "multipart/form-data; boundary=b"}
        refused = await stack.client.post("/v1/files", content=b"--b\r\na: b\r\n\r\nx\r\n--b--", headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_form")
    assert "has no name" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [*GOOD, FORM])
async def test_who_leaves_in_the_middle_of_a_body_is_no_error(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    body = json.dumps(with_model(path, GOOD.get(path, [{}])[0])).encode()
    async with http_stack() as (stack, url):
        client = RawClient(url)
        answer = await client.send(Case(path, body, [(b"authorization", b"Bearer key-a")], short=2))
        assert answer.status in (0, 400, 404)  # a route that needs no body may have answered
        assert (await stack.client.get("/health")).status_code == 200
    assert not caplog.records


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_text_of_other_line_ends_is_no_line_end_of_the_stream(path: str) -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n\ne"
    body = with_model(path, GOOD[path][0]) | {"stream": True}
    backend = Backend(MemoryBroker(), text=lambda prompt: text)
    async with http_stack(backend) as (_, url), httpx.AsyncClient(base_url=url, headers=HEADERS) as client:
        answer = await client.post(path, json=body)
    events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert text in "".join(said_in(json.loads(event)) for event in events if event != "[DONE]")


def said_in(event: Any) -> str:
    """The piece of text in an event of any API."""
    if "choices" in event:
        (choice,) = event["choices"] or [{}]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


async def test_a_form_that_is_here_is_refused_without_waiting_for_more(world: World) -> None:
    refused = Case(
        FORM, b"x", [(b"authorization", b"Bearer key-a"), (b"content-type", b"multipart/form-data; boundary=b")]
    )
    client = RawClient(world.gateways[0].url)
    for used in (False, True):
        answer = await client.send(refused)
        assert (answer.status, answer.kept, client.used) == (400, True, used)
    client.close()


async def test_whatever_a_model_says_is_answered_as_described(world: World) -> None:
    judge, client = await judge_of(world), RawClient(world.gateways[0].url)
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        tool = {"parameters": {"type": "object"}, "name": "f"}
        tools = {
            "/v1/chat/completions": [{"type": "function", "function": tool}],
            "/v1/responses": [{"type": "function", **tool}],
            "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
        }[path]
        for stream in (False, True):
            for length in range(1, 1 + len(OUTPUTS)):
                body = with_model(path, GOOD[path][0]) | {"tools": tools, "stream": stream}
                asked = "x" * length
                body |= {"input": asked} if "input" in body else {"messages": [{"role": "user", "content": asked}]}
                case = Case(path, json.dumps(body).encode(), [(b"authorization", b"Bearer key-a")])
                answer = await client.send(case)
                judge.check(case, answer)
                assert answer.status == 200, answer
    client.close()


async def test_what_is_broken_was_good(world: World) -> None:
    judge, client = await judge_of(world), RawClient(world.gateways[0].url)
    for path, bodies in GOOD.items():
        for body in bodies:
            case = Case(path, json.dumps(with_model(path, body)).encode(), [(b"authorization", b"Bearer key-a")])
            answer = await client.send(case)
            judge.check(case, answer)
            assert answer.status == REFUSED.get(path, 200), answer
    client.close()
