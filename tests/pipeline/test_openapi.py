"""The API's own description is true: it tells every route and field, and no answer is another than it says."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.gateway.openapi import PATH
from services.gateway.openapi_operations import OPERATIONS
from shared.ingress.field_docs import PAGE
from tests.pipeline.gateway_support import HEADERS, MODEL, chat, completion, gateway_stack
from tests.pipeline.test_keyed_batches import batches
from tests.servers import RedisServer

ADMIN = {"Authorization": "Bearer key-admin"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    ignored_auth,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
WEIGHTS = {"/v1/chat/completions": 10, "/v1/completions": 10}
"""How much more often than others a path is tried."""


@pytest.fixture(scope="module")
def url(redis_server: RedisServer) -> Iterator[str]:
    """A gateway with policy's idempotency desk, the batch service's desks, and a worker stand-in behind it."""
    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with batches(redis_server) as (world, _):
            urls.append(world.gateways[0].url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield urls[0]
    finally:
        stop.set()
        thread.join(60)


def described(url: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(url + PATH, headers=ADMIN, timeout=30).json()
    return found


def with_a_model(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the one model there is, without which nearly every request would end at its name."""
    found = deepcopy(dict(document))
    bodies = [*found["components"]["schemas"].values()]
    bodies += found["components"]["schemas"]["TokenizeRequest"]["anyOf"]
    for properties in (schema.get("properties", {}) for schema in bodies):
        if properties.get("model", {}).get("minLength"):  # an answer's has none
            properties["model"] = {"const": MODEL}
    return found


def of_no_stream(case: schemathesis.Case) -> None:
    """Takes away the place in a stream from what cannot have one, of which most requests would end."""
    body = case.body if isinstance(case.body, dict) else {}
    if case.meta.generation.mode == GenerationMode.POSITIVE and not (
        "Idempotency-Key" in case.headers and body.get("stream")
    ):
        case.headers.pop("Last-Event-ID", None)


def json_validator(document: Mapping[str, Any], path: str, method: str) -> Draft202012Validator | None:
    """Of the JSON body that an operation takes; None: it takes none."""
    found = document["paths"][path][method].get("requestBody", {}).get("content", {}).get("application/json", {})
    if "schema" not in found:
        return None
    return Draft202012Validator({"components": document["components"], **found["schema"]})


def try_all(url: str, examples: int, *, same_each_time: bool) -> int:
    """Tries about so many requests on all routes, good and bad ones, less where there are few. Returns how many."""
    document = described(url)
    schema = schemathesis.openapi.from_dict(with_a_model(document))
    operations = [found.ok() for found in schema.get_all_operations()]
    shares = sum(WEIGHTS.get(operation.path, 1) for operation in operations) * len(MODES)
    tried = 0
    with requests.Session() as session:
        for operation in operations:
            count = max(1, round(examples * WEIGHTS.get(operation.path, 1) / shares))
            validator = json_validator(document, operation.path, operation.method)
            for mode in MODES:
                tried += try_one(url, session, operation.as_strategy(mode), count, validator, same_each_time)
    return tried


def try_one(
    url: str,
    session: requests.Session,
    cases: Any,
    count: int,
    validator: Draft202012Validator | None,
    same_each_time: bool,
) -> int:
    """Tries so many requests of one operation. Returns how many."""
    tried = 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=same_each_time,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def holds(case: schemathesis.Case) -> None:
        nonlocal tried
        tried += 1
        of_no_stream(case)
        response = case.call_and_validate(base_url=url, session=session, headers=ADMIN, checks=CHECKS, timeout=60)
        if response.status_code == 200 and validator is not None:
            assert validator.is_valid(json.loads(response.request.body)), response.request.body

    with suppress(Unsatisfiable):  # of a route without parameters no request is wrong
        holds()
    return tried


@pytest.mark.timeout(300)
def test_no_answer_is_a_fault_or_undescribed(url: str) -> None:
    assert try_all(url, 620, same_each_time=True) >= 500


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_answer_is_a_fault_or_undescribed_at_length(url: str) -> None:
    assert try_all(url, 6200, same_each_time=False) >= 5000


async def test_every_route_is_described_and_needs_the_key_it_says() -> None:
    async with gateway_stack() as stack:
        stack.client.event_hooks = {}  # some routes are of other APIs
        assert (await stack.client.get(PATH)).status_code == 401
        document = (await stack.client.get(PATH, headers=HEADERS)).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                bare = await stack.client.request(method, re.sub(r"\{.*\}", "x", path))
                assert (bare.status_code == 401) == bool(operation["security"]), (method, path)
                assert str(bare.status_code) in operation["responses"]
        routes = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
        assert set(OPERATIONS) <= routes, "a route that is gone is described"


async def test_every_schema_is_one_and_is_there() -> None:
    async with gateway_stack() as stack:
        document = (await stack.client.get(PATH, headers=HEADERS)).json()
        for schema in document["components"]["schemas"].values():
            Draft202012Validator.check_schema(schema)
        for name in references(document):
            assert name in document["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.removeprefix("#/components/schemas/")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def body_validator(document: Mapping[str, Any], name: str) -> Draft202012Validator:
    return Draft202012Validator({"components": document["components"], "$ref": f"#/components/schemas/{name}"})


async def test_every_field_of_the_page_is_in_the_description() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \*)? \| (\w+).*? \| (\w+).*? \| ", PAGE.read_text(), re.M)
    assert len(rows) > 40
    async with gateway_stack() as stack:
        schemas = (await stack.client.get(PATH, headers=HEADERS)).json()["components"]["schemas"]
        for at, name in ((1, "ChatRequest"), (2, "CompletionRequest")):
            assert set(schemas[name]["properties"]) == {row[0] for row in rows if row[at] != "unknown"}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": None, "name": None},
    {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
    {"role": "user", "content": None},
    {"role": "user"},
    {"role": "user", "content": "a", "name": "b"},
    {"role": "user", "content": "a", "parsed": None},
    {"role": "user", "content": "a", "tool_calls": [CALL]},
    {"role": "system", "content": "a", "reasoning_content": "b"},
    {"role": "assistant", "content": "a", "parsed": {}, "refusal": None, "annotations": []},
    {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
    {"role": "assistant", "tool_calls": []},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "a", "tool_call_id": "c"},
    {"role": "tool", "content": "a", "tool_call_id": "c"},
    {"role": "tool", "content": "a", "tool_call_id": ""},
    {"role": "tool", "content": "a"},
    {"role": "other", "content": "a"},
]
CHATS: list[Any] = [[], *([message] for message in MESSAGES)]
FIELDS: list[dict[str, Any]] = [
    {"stop": None},
    {"stop": "a"},
    {"stop": ["a"] * 5},
    {"stop": [""]},
    {"logit_bias": {"1": 2.5}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}},
    {"min_tokens": None},
    {"min_tokens": -1},
    {"stop_token_ids": [1, 1]},
    {"stop_token_ids": [-1]},
    {"metadata": {"a": "b"}},
    {"metadata": {str(number): "" for number in range(17)}},
    {"store": False},
    {"store": True},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"unheard_of": 1},
]
PROMPTS: list[Any] = ["a", "", [], [1, 2], [[1], [2]], ["a", "b"], ["a", [1]], [["a"]], [-1], [[]], 1]

CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
INPUTS: list[Any] = [
    "a",
    [],
    None,
    [{"role": "user", "content": "a", "phase": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "input_text", "text": "a", "annotations": []}]}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}],
    [{"role": "other", "content": "a"}],
    [{"role": "user", "content": "a"}, {**CALLED, "status": "completed"}],
    [{"role": "user", "content": "a"}, {**CALLED, "name": ""}],
    [{"type": "reasoning", "summary": [], "content": []}, {"role": "user", "content": "a"}],
    [{"type": "item_reference", "id": "a"}],
]
RESPONSES = [{"input": given} for given in INPUTS] + [
    {"input": "a", **fields}
    for fields in (
        {"store": False},
        {"store": "no"},
        {"previous_response_id": ""},
        {"text": {"format": {"type": "text"}, "verbosity": None}},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"effort": None}},
        {"reasoning": {"effort": "low"}},
        {"max_output_tokens": 0},
        {"messages": []},
    )
]
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
TALKS: list[Any] = [
    [{"role": "user", "content": "a"}],
    [],
    [{"role": "system", "content": "a"}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": "a", "name": "b"}],
    [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
    [{"role": "user", "content": [{"type": "image", "source": {}}]}],
    [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
    [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [{**RESULT, "content": "a"}]}],
    [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [{**RESULT, "content": [USE]}]}],
    [{"role": "user", "content": [USE]}],
]
ANTHROPIC = [{"messages": talk} for talk in TALKS] + [
    {"messages": TALKS[0], **fields}
    for fields in (
        {"system": "a"},
        {"system": []},
        {"stop_sequences": ["a"] * 5},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled"}},
        {"temperature": 1.5},
        {"metadata": {"user_id": "a"}},
        {"input": "a"},
    )
]
LIMIT = {"max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "name", "bodies"),
    [
        (
            "chat/completions",
            "ChatRequest",
            [chat(**LIMIT, messages=found) for found in CHATS],
        ),
        ("chat/completions", "ChatRequest", [chat(**LIMIT, **fields) for fields in FIELDS]),
        ("completions", "CompletionRequest", [completion(**LIMIT, **fields) for fields in FIELDS]),
        ("completions", "CompletionRequest", [completion(prompt, **LIMIT) for prompt in PROMPTS]),
        ("responses", "ResponsesRequest", [{"model": MODEL, **body} for body in RESPONSES]),
        ("messages", "MessagesRequest", [{"model": MODEL, **LIMIT, **body} for body in ANTHROPIC]),
        ("messages/count_tokens", "MessagesCountRequest", [{"model": MODEL, "messages": talk} for talk in TALKS]),
    ],
)
async def test_what_the_description_allows_is_what_is_taken(path: str, name: str, bodies: list[Any]) -> None:
    async with gateway_stack() as stack:
        stack.client.event_hooks = {}
        document = (await stack.client.get(PATH, headers=HEADERS)).json()
        validator, taken = body_validator(document, name), 0
        for body in bodies:
            response = await stack.client.post(f"/v1/{path}", json=body, headers=HEADERS)
            assert (response.status_code == 200) == validator.is_valid(body), (body, response.text)
            taken += response.status_code == 200
        assert 0 < taken < len(bodies)
